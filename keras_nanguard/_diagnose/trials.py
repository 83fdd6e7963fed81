"""The trials on one refused step: each answers one question, and runs only if its answer can decide
the cause.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from keras_nanguard._backends import current, processes
from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.compiled_replay import run_compiled
from keras_nanguard._backends.shared.origins import bad_rows
from keras_nanguard._backends.shared.replay import ReplayableStep, ReplayResult, preserved
from keras_nanguard._core import finiteness, memory
from keras_nanguard._core.data_names import input_names, named
from keras_nanguard._core.evidence import Evidence, Origin, Spread
from keras_nanguard._diagnose.causes import HUGE_DATA, LARGE_DATA, grown, kind
from keras_nanguard._diagnose.facts import target_fault
from keras_nanguard._diagnose.precision import in_float32
from keras_nanguard._keras import layers as keras_layers, variables as keras_variables
from keras_nanguard._keras.train_state import TrainState

Start = Callable[[Any], Any]
"""Returns the value that a variable had in an earlier state, `None` if it was not in it."""

TRIAL_STEPS = 6
"""Number of steps of the trial that restarts with scaled data."""

EARLY = 50
"""Step up to which a failure counts as one of the first steps."""


class Trials:
    """The replays of one refused step.

    Args:
        step: the step, on the state before it.
        batch: its arguments.
        evidence: the evidence that needs no replay.
        start: the state before the first step, `None` if it is not known.
        obstacle: why the step cannot be replayed, as a sentence; `""` if it can.
    """

    def __init__(
        self,
        step: ReplayableStep,
        batch: Any,
        evidence: Evidence,
        start: Start | None = None,
        obstacle: str = "",
    ):
        self.step, self.batch, self.evidence, self.start = step, batch, evidence, start
        self.obstacle = obstacle
        self.train_state = TrainState.of(step.model, step.optimizers)
        self.run = ReplayResult()

    def carried_out(self) -> Evidence:
        """Run the trials and return the evidence with their results."""
        return with_names(self._run_trials(), self.step.model)

    def _run_trials(self) -> Evidence:
        self.look_at_batch()
        if self.evidence.state or not self.evidence.refused:
            return self.evidence
        if obstacle := self.obstacle or self._obstacle():
            self.add(notes=(obstacle,))
            return self.evidence
        self._replay()
        self.look_at_targets()
        if not self.run.error and not self.run.finite:
            self._rerun_in_float32()
            self._rerun_unscaled()
            self._find_rows()
            self._rerun_at_start()
            self._rerun_in_inference()
            self._restart_with_scaled_data()
        return self.evidence

    def _obstacle(self) -> str:
        """Return why this process cannot replay the step, as a sentence; `""` if it can."""
        host = current.host()
        if processes.count() > 1 and (host.SPREADS_ARRAYS or host.is_sharded(self.step.model)):
            several = f"The step runs in {processes.count()} processes"
            return f"{several}, so it cannot be replayed in one of them."
        copied = (*self.step.variables(), *self.train_state.trainable)  # the state, and gradients
        size = sum(keras_variables.bytes_of(v) for v in copied if keras_variables.on_host(v))
        if memory.room_for(size):
            return ""
        return f"The step was not replayed: this needs {memory.readable(size)} of free memory."

    def add(self, **found: Any) -> None:
        """Add results to the evidence."""
        self.evidence = dataclasses.replace(self.evidence, **found)

    def look_at_batch(self) -> None:
        """Add the facts about the batch to the evidence."""
        self.add(
            count=batches.row_count(self.batch),
            inputs_bad=batches.bad(self.batch, ("inputs",)),
            targets_bad=batches.bad(self.batch, ("targets", "sample_weight")),
            inputs=batches.spreads(self.batch, "inputs"),
            targets=batches.spreads(self.batch, "targets"),
        )

    def _replay(self) -> None:
        """Replay the step eagerly; if that is finite, replay it in the mode in which it was
        compiled.
        """
        run = self.step.run(self.batch, observe=True, update=True)
        self.note(run, "replay")
        if run.finite and self.evidence.mode == "eager":
            self.add(same_mode="finite")
        elif run.finite:
            again = run_compiled(self.step, self.batch, jit=self.evidence.mode == "xla")
            self.add(same_mode=again.word)
            if again.first:
                self.note(again, "")

    def note(self, run: ReplayResult, replay: str) -> None:
        """Add the result of a replay to the evidence, under the name `replay` if it is the
        first.
        """
        self.run = run
        self.add(
            **({replay: run.word} if replay else {}),
            replay_error=run.error,
            first=run.first,
            first_path=run.first_path if run.first else self.evidence.first_path,
            origin=run.origin,
            loss_parts=tuple((name, float(np.mean(values))) for name, values in run.sample_losses),
            table=run.rows,
        )

    def look_at_targets(self) -> None:
        """Add what the losses do not accept to the evidence."""
        arrays = [p.array for p in batches.parts(self.batch) if p.role == "targets"]
        shapes = [array.shape for _, array in self.run.outputs] or keras_layers.output_shapes(
            self.step.model
        )
        widths = [int(shape[-1] or 0) if shape else 0 for shape in shapes]
        self.add(target_fault=target_fault(self.step.model, arrays, widths))

    def _rerun_in_float32(self) -> None:
        if self.evidence.low_precision:
            with in_float32(self.step.model, self.step.variables(), self.step.optimizers):
                self.add(float32=self.step.run(self.batch, update=True).word)

    def _rerun_unscaled(self) -> None:
        scales = [scale for scale, _ in self.train_state.scales]
        if scales and self.evidence.first == "gradients":
            with preserved(scales):
                for scale in scales:
                    keras_variables.write(scale, np.ones((), "float32"))
                self.add(unscaled=self.step.run(self.batch).word)

    def _find_rows(self) -> None:
        """Find the rows without which the step is finite; rows that do not pass this test are not
        named.
        """
        e = self.evidence
        if e.first in ("slots", "weights"):
            self._accept(self._outliers())
            return
        suspects = blamed_rows(self.run, e.count)
        if self._accept(suspects) or self._accept(self._further(suspects)):
            return
        bad_data = (*e.inputs_bad, *e.targets_bad)
        if self._accept(tuple(dict.fromkeys(row for part in bad_data for row in part.rows))):
            return
        if self._accept(self._outliers()) or suspects or grown(e):
            return
        mixed = e.first in ("loss", "statistics", "gradients")
        if e.replay == "bad" and e.count > 1 and mixed:
            self._accept(bisected(e.count, self._is_bad_on))

    def _accept(self, suspects: Sequence[int]) -> bool:
        """Blame these rows, if the step without them is finite."""
        some = 0 < len(suspects) < self.evidence.count
        if not some or not self._without(suspects).finite:
            return False
        self.add(rows=tuple(suspects), without_rows="finite")
        return True

    def _without(self, suspects: Sequence[int]) -> ReplayResult:
        """Run the step without some rows, in the mode in which it is bad."""
        rest = batches.without(self.batch, suspects)
        if self.evidence.first in ("slots", "weights"):
            return self.step.run(rest, update=True)
        if self.evidence.replay == "finite" and self.step.judged is None:
            return run_compiled(self.step, rest, jit=self.evidence.mode == "xla")
        return self.step.rerun(rest)

    def _further(self, suspects: tuple[int, ...]) -> tuple[int, ...]:
        """Add the rows that are bad once the first suspects are gone, for another reason."""
        if not suspects or self.evidence.replay != "bad":
            return ()
        kept = [row for row in range(self.evidence.count) if row not in suspects]
        rest = batches.without(self.batch, suspects)
        found = blamed_rows(self.step.run(rest, observe=True), batches.row_count(rest))
        more = {kept[row % len(kept)] for row in found}
        return (*suspects, *sorted(more)) if more else ()

    def _outliers(self) -> tuple[int, ...]:
        """Return the outliers of the batch, if they are few."""
        spreads: tuple[Spread, ...] = (*self.evidence.inputs, *self.evidence.targets)
        found = tuple(dict.fromkeys(row for spread in spreads for row in spread.outliers))
        return found if len(found) <= max(1, self.evidence.count // 4) else ()

    def _is_bad_on(self, chosen: Sequence[int]) -> bool:
        """Run the step on these rows only."""
        others = sorted({*range(self.evidence.count)} - {*chosen})
        return not self.step.rerun(batches.without(self.batch, others)).finite

    def _rerun_in_inference(self) -> None:
        origin, data = self.run.origin, self.batch[0] if len(self.batch) == 1 else None
        if origin is None or origin.phase != "forward" or origin.source != "operation":
            return
        if not isinstance(data, tuple):
            return
        with self.step.preserved():
            try:
                outputs = self.step.model(data[0], training=False)
            except Exception:  # noqa: BLE001  a custom model need not accept this call
                return
        arrays = (array for _, array in keras_variables.named_arrays(outputs))
        self.add(inference="finite" if all(map(finiteness.is_finite, arrays)) else "bad")

    def _rerun_at_start(self) -> None:
        """Run the batch on the initial state: does it overflow there, too, or only after the first
        steps?
        """
        e = self.evidence
        if e.inputs_bad or e.targets_bad or self.start is None:
            return
        if not 0 < e.step <= EARLY or kind(e.origin) not in ("exp", "overflow") or grown(e):
            return
        with self.step.preserved():
            _restore(self.train_state.restorable, self.start)
            self.add(at_start=self.step.rerun(self.batch).word)

    def _restart_with_scaled_data(self) -> None:
        """Train a few steps from the initial state on this batch, unchanged and scaled: does the
        scale cause the divergence?
        """
        e, first = self.evidence, self.start
        largest = max((s.max_abs for s in (*e.inputs, *e.targets) if not s.integer), default=0.0)
        if first is None or e.step > EARLY or largest < LARGE_DATA:
            return
        if kind(e.origin) == "pole" or not grown(e):
            return
        plain = self._growth_from(first, self.batch)
        scaled = self._growth_from(first, batches.mapped(self.batch, standardized))
        cured = (plain >= 1e2 and scaled < 1e1) or (largest >= HUGE_DATA and scaled < plain / 1e3)
        self.add(rescaled="finite" if cured else "bad")

    def _growth_from(self, start: Start, batch: Any) -> float:
        """Return the factor by which the loss grows over a few steps, infinite if it overflows."""
        losses, _ = train_from(self.step, start, [batch] * TRIAL_STEPS)
        finite = math.isfinite(losses[-1]) and losses[0]
        return abs(losses[-1]) / abs(losses[0]) if finite else math.inf


def train_from(
    step: ReplayableStep, start: Start, sequence: Iterable[Any]
) -> tuple[list[float], str]:
    """Train from an earlier state and restore the present one.

    Args:
        step: the step.
        start: the earlier state.
        sequence: the arguments of each step.

    Returns:
        The losses up to the first that is not finite, and the path of the first weight that is not
        finite after the last step, `""` if there is none.
    """
    train_state = TrainState.of(step.model, step.optimizers)
    losses: list[float] = []
    with step.preserved():
        _restore(train_state.everything, start)
        for batch in sequence:
            losses.append(step.train(batch))
            if not math.isfinite(losses[-1]):
                return losses, ""
        bad = (
            v for v in train_state.trainable if not finiteness.is_finite(keras_variables.view(v))
        )
        return losses, str(next((v.path for v in bad), ""))


def _restore(variables: Sequence[Any], start: Start) -> None:
    for variable in variables:
        value = start(variable)
        if value is not None:
            keras_variables.write(variable, value)


def with_names(evidence: Evidence, model: Any) -> Evidence:
    """Return the evidence with the names of the model's inputs in place of their indices, if the
    user named them.
    """
    names = input_names(model)
    if not any(names):
        return evidence
    origin = evidence.origin
    if origin is not None and origin.source == "batch":
        origin = dataclasses.replace(origin, op=named(origin.op, names))
    parts: dict[str, Any] = {
        field: tuple(dataclasses.replace(part, name=named(part.name, names)) for part in found)
        for field, found in (("inputs", evidence.inputs), ("inputs_bad", evidence.inputs_bad))
    }
    return dataclasses.replace(evidence, origin=origin, **parts)


def standardized(role: str, value: Any) -> Any:
    """Return floats with mean 0 and standard deviation 1 in each feature; targets only if they are
    large, no sparse or ragged ones.
    """
    if keras_variables.is_sparse(value) or hasattr(value, "nested_row_splits"):
        return value
    array = finiteness.widen(keras_variables.dense(value))
    if array.dtype.kind != "f" or role == "sample_weight" or not array.ndim:
        return value
    array = array.astype(np.float64)
    if role == "targets" and np.abs(array).max() <= 10.0:
        return value
    deviation = array.std(axis=0)
    scaled = (array - array.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    return keras.ops.cast(scaled, keras.backend.standardize_dtype(value.dtype))


MAX_TRIALS = 16
"""Maximum number of replays in the search for a row."""


def blamed_rows(run: ReplayResult, count: int) -> tuple[int, ...]:
    """Return the rows that are bad in a replay, none if all of them are.

    The origin of the bad value is the most precise; then the loss values per sample; then the
    outputs of the model.
    """
    origin: Origin | None = run.origin
    if origin is not None and origin.rows:
        return origin.rows
    if origin is not None and origin.all_rows and origin.source == "operation":
        return ()
    for _, values in (*run.sample_losses, *run.outputs):
        if found := bad_rows(np.asarray(values), count)[0]:
            return found
    return ()


def bisected(count: int, is_bad: Callable[[Sequence[int]], bool]) -> tuple[int, ...]:
    """Return the one row on which the step is bad, none if there is not exactly one.

    Args:
        count: number of rows.
        is_bad: runs the step on these rows only and returns whether it is bad.
    """
    trials, found = 0, list(range(count))
    while len(found) > 1 and trials < MAX_TRIALS:
        left, right = found[: len(found) // 2], found[len(found) // 2 :]
        bad_left, bad_right = is_bad(left), is_bad(right)
        trials += 2
        if bad_left == bad_right:
            return ()
        found = left if bad_left else right
    return tuple(found) if len(found) == 1 else ()
