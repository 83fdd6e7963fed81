"""A refused step that is examined, and the trials on it: each replays it with one change, and
answers one question. A trial runs only if its result can decide the cause.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from keras_nanguard._backends import current, processes
from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.origins import bad_rows
from keras_nanguard._backends.shared.replay import ReplayableStep, ReplayResult, preserved
from keras_nanguard._core import finiteness, memory
from keras_nanguard._core.data import named
from keras_nanguard._core.history import JUMP
from keras_nanguard._core.observations import NOWHERE
from keras_nanguard._diagnose.changes import (
    Start,
    computing_in_float32,
    restore,
    standardized,
)
from keras_nanguard._diagnose.configuration import negative_loss, targets_by_loss
from keras_nanguard._diagnose.evidence import HUGE_DATA, LARGE_DATA, Evidence, TargetFault, distinct
from keras_nanguard._keras import (
    layers as keras_layers,
    losses as keras_losses,
    variables as keras_variables,
)
from keras_nanguard._keras.train_state import TrainState

TRIAL_STEPS = 6
"""Number of steps of the trial that restarts with scaled data."""

EARLY = 50
"""Step up to which a failure counts as one of the first steps."""

MAX_HALVINGS = 16
"""Maximum number of times that a batch is halved in the search for a row."""


@dataclass(frozen=True)
class Case:
    """A step, and what is known about it.

    Attributes:
        step: the step, on the state before it.
        start: the state before the first step, `None` if it is not known.
        run: the replay that the evidence describes.
    """

    step: ReplayableStep
    batch: Any
    evidence: Evidence
    start: Start | None = None
    run: ReplayResult = field(default_factory=ReplayResult)

    def with_(self, **found: Any) -> Case:
        """Return the case with more evidence."""
        return dataclasses.replace(self, evidence=dataclasses.replace(self.evidence, **found))

    def with_part(self, part: str, **found: Any) -> Case:
        """Return the case with more evidence in one part: `replay`, `batch`, `trials` or `run`."""
        return self.with_(**{part: dataclasses.replace(getattr(self.evidence, part), **found)})

    def with_batch(self) -> Case:
        """Return the case with the evidence from its batch alone."""
        batch, names = self.batch, keras_layers.input_names(self.step.model)
        ids = not keras_layers.takes_floats(self.step.model)

        def shown(parts: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(dataclasses.replace(p, name=named(p.name, names)) for p in parts)

        return self.with_part(
            "batch",
            count=batches.row_count(batch),
            inputs_bad=shown(batches.bad(batch, ("inputs",))),
            targets_bad=batches.bad(batch, ("targets", "sample_weight")),
            inputs=tuple(
                dataclasses.replace(p, integer=p.integer and ids)
                for p in shown(batches.spreads(batch, "inputs"))
            ),
            targets=batches.spreads(batch, "targets"),
        )

    def with_run(self, run: ReplayResult) -> Case:
        """Return the case with the result of a replay."""
        origin = run.origin or NOWHERE
        if origin.source == "batch":
            name = named(origin.op, keras_layers.input_names(self.step.model))
            origin = dataclasses.replace(origin, op=name)
        path = run.first_path if run.first else self.evidence.first_path
        return (
            dataclasses.replace(self, run=run)
            .with_(first=run.first, first_path=path)
            .with_part(
                "replay",
                error=run.error,
                origin=origin,
                loss_parts=tuple((name, float(np.mean(v))) for name, v in run.sample_losses),
                table=run.rows,
            )
        )

    def with_targets(self) -> Case:
        """Return the case with the first problem of the targets, given the shapes of the outputs of
        its replay, if it has any, and the proof that it is the reason for the failure.
        """
        model = self.step.model
        outputs = [(path, array.shape) for path, array in self.run.outputs]
        found = targets_by_loss(model, self.batch, outputs or keras_layers.output_shapes(model))
        for output, loss, part, shape in found:
            width = keras_losses.classes_of(loss, shape)
            wrong = None if part is None else keras_losses.rejected(loss, part.array, width)
            if part is not None and wrong is not None:
                output, proof = output if len(found) > 1 else "", self._proof(part, wrong.valid)
                fault = TargetFault(str(loss.name), output, wrong.rows, wrong.clause, proof)
                return self.with_part("batch", target_fault=fault)
        return self.with_part("batch", target_fault=None)

    def _proof(self, part: batches.Part, valid: Any) -> str:
        """Return why the targets in a part of the batch are the reason for the failure, as a
        sentence: with `valid` ones the step is finite, or the loss has only fallen, to below where
        it has a minimum with probabilities as targets. `""` if neither is known.
        """
        e, losses = self.evidence, self.evidence.run.growth.losses
        if self.run.finite or self.run.first == "outputs":
            return ""
        if valid is not None and valid.shape == tuple(part.value.shape):
            given = keras.ops.cast(valid, keras.backend.standardize_dtype(part.value.dtype))

            def corrected(role: str, value: Any) -> Any:
                return given if role == part.role and value is part.value else value

            batch = batches.mapped(self.batch, corrected)
            if self.again(batch).finite:
                return "With targets in the range of the loss the same step is finite."
        farthest = max(losses, key=abs, default=0.0)
        # A rate that is too high makes it rise first. Later, the sign of a huge loss is chance.
        large = (v for v in losses if abs(v) * e.run.growth.loss > JUMP * abs(farthest))
        first = next(large, farthest)
        negative = negative_loss(self.step.model, [first]) if e.grown() else None
        return "" if negative is None else negative.proof

    def again(self, batch: Any) -> ReplayResult:
        """Run the step once more, in the fastest mode in which it is bad."""
        e = self.evidence
        if e.first in ("slots", "weights"):
            return self.step.run(batch, update=True)
        only_compiled = e.replay.result == "finite"
        if only_compiled and self.step.judged is None:
            return self.step.run_compiled(batch, jit=e.mode == "xla")
        return self.step.rerun(batch)


def tensors(batch: Any) -> Any:
    """Return a batch with its arrays as tensors of the backend."""
    return keras.tree.map_structure(
        lambda value: None if value is None else keras.ops.convert_to_tensor(value), batch
    )


def investigated(case: Case, obstacle: str = "") -> Case:
    """Return a case with the results of a replay and of all trials.

    Args:
        case: the case, with the evidence that needs no replay.
        obstacle: why the step cannot be replayed, as a sentence; `""` if it can.
    """
    case = _tried(case.with_batch(), obstacle)
    if case.evidence.first == "weights":
        trained = TrainState.of(case.step.model, case.step.optimizers).trainable
        weight = next((v for v in trained if v.path == case.evidence.first_path), None)
        constraint = getattr(weight, "constraint", None)
        name = type(constraint).__name__ if constraint is not None else ""
        case = case.with_part("run", constraint=name)
    return case


def _tried(case: Case, obstacle: str) -> Case:
    if case.evidence.state or not case.evidence.refused:
        return case
    if obstacle := obstacle or _obstacle(case.step):
        return case.with_(notes=(obstacle,))
    return with_trials(replayed(case).with_targets())


def with_trials(case: Case) -> Case:
    """Return a case with the results of all trials, if its replay is bad."""
    if not case.run.error and not case.run.finite:
        for trial in TRIALS:
            case = case.with_part("trials", **trial(case))
    return case


def _obstacle(step: ReplayableStep) -> str:
    """Return why this process cannot replay the step, as a sentence; `""` if it can."""
    host = current.host()
    if processes.count() > 1 and (host.SPREADS_ARRAYS or host.is_sharded(step.model)):
        several = f"The step runs in {processes.count()} processes"
        return f"{several}, so it cannot be replayed in one of them."
    gradients = TrainState.of(step.model, step.optimizers).trainable
    copied = (*step.variables(), *gradients)
    size = sum(keras_variables.bytes_of(v) for v in copied if keras_variables.on_host(v))
    if memory.room_for(size):
        return ""
    return f"The step was not replayed: this needs {memory.readable(size)} of free memory."


def replayed(case: Case) -> Case:
    """Replay the step eagerly and, if that is finite, in the mode in which it was compiled."""
    run, mode = case.step.run(case.batch, observe=True, update=True), case.evidence.mode
    case = case.with_run(run).with_part("replay", result=run.word)
    if not run.finite:
        return case
    if mode == "eager":
        return case.with_part("replay", same_mode="finite")
    again = case.step.run_compiled(case.batch, jit=mode == "xla")
    case = case.with_part("replay", same_mode=again.word)
    return case.with_run(again) if again.first else case


def _in_float32(case: Case) -> dict[str, Any]:
    """Is the step finite in float32?"""
    if not case.evidence.run.low_precision:
        return {}
    with computing_in_float32(case.step):
        return {"float32": case.step.run(case.batch, update=True).word}


def _unscaled(case: Case) -> dict[str, Any]:
    """Is the step finite with a loss scale of 1?"""
    state = TrainState.of(case.step.model, case.step.optimizers)
    scales = [scale for scale, _ in state.scales]
    if not scales or case.evidence.first != "gradients":
        return {}
    with preserved(scales):
        for scale in scales:
            keras_variables.write(scale, np.ones((), "float32"))
        return {"unscaled": case.step.run(case.batch).word}


def _without_rows(case: Case) -> dict[str, Any]:
    """Is the step finite without some rows?"""
    for rows in _suspects(case):
        some = 0 < len(rows) < case.evidence.batch.count
        if some and case.again(batches.without(case.batch, rows)).finite:
            return {"rows": rows, "without_rows": "finite"}
    return {}


def _at_start(case: Case) -> dict[str, Any]:
    """Does the batch overflow on the initial state, too, or only after the first steps?"""
    e, step = case.evidence, case.step
    if case.start is None or e.batch.inputs_bad or e.batch.targets_bad or e.grown():
        return {}
    if not 0 < e.step <= EARLY or e.kind not in ("exp", "overflow"):
        return {}
    with step.preserved():
        restore(TrainState.of(step.model, step.optimizers).restorable, case.start)
        return {"at_start": case.again(case.batch).word}


def is_bad_at_start(case: Case, update: bool) -> bool:
    """Return whether the step is bad from the initial state as well.

    Args:
        update: whether a bad update counts, and not only bad gradients.
    """
    if case.start is None or _obstacle(case.step):
        return False
    with case.step.preserved():
        state = TrainState.of(case.step.model, case.step.optimizers)
        restore(state.restorable, case.start)
        return case.step.run(case.batch, update=update).word == "bad"


def _in_inference(case: Case) -> dict[str, Any]:
    """Is the forward pass finite in inference mode?"""
    origin, data = case.evidence.replay.origin, case.batch[0] if len(case.batch) == 1 else None
    forward = origin.phase == "forward" and origin.source == "operation"
    if case.evidence.trials.inference or not forward or not isinstance(data, tuple):
        return {}
    with case.step.preserved():
        try:
            outputs = case.step.model(data[0], training=False)
        except Exception:  # noqa: BLE001  a custom model need not accept this call
            return {}
    arrays = (array for _, array in keras_variables.named_arrays(outputs))
    return {"inference": "finite" if all(map(finiteness.is_finite, arrays)) else "bad"}


def _with_scaled_data(case: Case) -> dict[str, Any]:
    """Does training on this batch, from the initial state, diverge only if the data is unscaled?"""
    e, step, start = case.evidence, case.step, case.start
    largest = e.largest.max_abs
    if start is None or e.step > EARLY or largest < LARGE_DATA:
        return {}
    if e.kind == "pole" or not e.grown():
        return {}

    def growth(batch: Any) -> float:
        """Return the factor by which the loss grows over a few steps, infinite if it overflows."""
        with step.preserved():
            restore(TrainState.of(step.model, step.optimizers).everything, start)
            losses: list[float] = []
            while len(losses) < TRIAL_STEPS and all(map(math.isfinite, losses)):
                losses.append(abs(step.train(batch)))
        finite = all(map(math.isfinite, losses)) and losses[0]
        return losses[-1] / losses[0] if finite else math.inf

    scale = functools.partial(standardized, ids=not keras_layers.takes_floats(step.model))
    plain, scaled = growth(case.batch), growth(batches.mapped(case.batch, scale))
    cured = (plain >= 1e2 and scaled < 1e1) or (largest >= HUGE_DATA and scaled < plain / 1e3)
    return {"rescaled": "finite" if cured else "bad"}


TRIALS: tuple[Callable[[Case], dict[str, Any]], ...] = (
    _in_float32,
    _unscaled,
    _without_rows,
    _at_start,
    _in_inference,
    _with_scaled_data,
)
"""The trials in order: each returns fields of `TrialFacts`, none if it is not needed."""


# Rows


def _suspects(case: Case) -> Iterator[tuple[int, ...]]:
    """Yield rows that may be to blame, the best supported first."""
    e = case.evidence
    if e.first in ("slots", "weights"):
        yield e.outliers((*e.batch.inputs, *e.batch.targets))
        return
    in_results = _bad_in_results(case.run, e.batch.count)
    blamed = _blamed(case.run, in_results)
    yield blamed
    if blamed and not set(in_results) <= set(blamed):  # other operations are undefined in others
        yield distinct((blamed, in_results))
    yield distinct(part.rows for part in (*e.batch.inputs_bad, *e.batch.targets_bad))
    yield e.outliers((*e.batch.inputs, *e.batch.targets))
    mixed = e.first in ("loss", "statistics", "gradients")
    if mixed and e.replay.result == "bad" and e.batch.count > 1 and not (blamed or e.grown()):
        yield _bisected(case)


def _blamed(run: ReplayResult, in_results: tuple[int, ...]) -> tuple[int, ...]:
    """Return the rows that are bad in a replay, none if all of them are: those of the origin of the
    bad value, which is the most precise, or those that are bad `in_results`.
    """
    origin = run.origin or NOWHERE
    if origin.rows or (origin.all_rows and origin.source == "operation"):
        return origin.rows
    return in_results


def _bad_in_results(run: ReplayResult, count: int) -> tuple[int, ...]:
    """Return the rows with bad loss values, or else with bad outputs of the model; none if all of
    them are bad.
    """
    for _, values in (*run.sample_losses, *run.outputs):
        if found := bad_rows(np.asarray(values), count)[0]:
            return found
    return ()


def _bisected(case: Case) -> tuple[int, ...]:
    """Return the only row with which the step is bad; no row if there are several or none."""
    everything = range(case.evidence.batch.count)

    def is_bad(rows: Sequence[int]) -> bool:
        others = [row for row in everything if row not in rows]
        return not case.again(batches.without(case.batch, others)).finite

    found: Sequence[int] = everything
    for _ in range(MAX_HALVINGS):
        if len(found) < 2:
            break
        left, right = found[: len(found) // 2], found[len(found) // 2 :]
        bad_left, bad_right = is_bad(left), is_bad(right)
        if bad_left == bad_right:
            return ()
        found = left if bad_left else right
    return tuple(found) if len(found) == 1 else ()
