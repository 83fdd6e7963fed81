"""The examination of a bad step: its replay, then the trials, each of which replays it with one
change and answers one question. A trial runs only if its result can decide the cause.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_nanguard._backends import current, processes
from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.origins import bad_rows
from keras_nanguard._backends.shared.replay import ReplayableStep, ReplayResult, preserved
from keras_nanguard._core import finiteness, memory
from keras_nanguard._core.data import named
from keras_nanguard._core.observations import NOWHERE
from keras_nanguard._diagnose.causes import SCALE_TOO_HIGH
from keras_nanguard._diagnose.evidence import (
    HUGE_DATA,
    LARGE_DATA,
    Evidence,
    ReplayFacts,
    TargetFault,
    distinct,
)
from keras_nanguard._diagnose.growth import JUMP
from keras_nanguard._diagnose.targets import (
    classes_of,
    negative_loss,
    rejected,
    targets_by_loss,
)
from keras_nanguard._keras import (
    arrays as keras_arrays,
    layers as keras_layers,
    precision,
    variables as keras_variables,
)
from keras_nanguard._keras.train_state import TrainState

MAX_HALVINGS = 16
"""Maximum number of times that a batch is halved in the search for a row."""

Start = Callable[[Any], Any]
"""Returns the value that a variable had in an earlier state, `None` if it was not in it."""

TRIAL_STEPS = 6
"""Number of steps of the trial that restarts with scaled data."""

EARLY = 50
"""Step up to which a failure counts as one of the first steps."""


@dataclass(frozen=True)
class Case:
    """A step, and what is known about it.

    Attributes:
        step: the step, on the state before it.
        start: the state before the first step, `None` if it is not known.
    """

    step: ReplayableStep
    batch: Any
    evidence: Evidence
    start: Start | None = None

    def with_trials(self, **found: Any) -> Case:
        """Return the case with these results of trials."""
        trials = dataclasses.replace(self.evidence.trials, **found)
        return dataclasses.replace(self, evidence=dataclasses.replace(self.evidence, trials=trials))

    def with_run(self, run: ReplayResult, result: str, same_mode: str = "") -> Case:
        """Return the case with what a replay has shown; for `result` and `same_mode` see
        `ReplayFacts`.
        """
        origin = run.origin or NOWHERE
        if origin.source == "batch":
            name = named(origin.op, keras_layers.input_names(self.step.model))
            origin = dataclasses.replace(origin, op=name)
        replay = ReplayFacts(
            result=result,
            error=run.error,
            same_mode=same_mode,
            bad_site=run.first,
            bad_path=run.first_path,
            origin=origin,
            loss_parts=tuple((name, float(np.mean(v))) for name, v in run.sample_losses),
            bad_rows=_bad_in_results(run, self.evidence.batch.count),
            output_shapes=tuple((path, array.shape) for path, array in run.outputs),
            table=run.rows,
        )
        return dataclasses.replace(self, evidence=dataclasses.replace(self.evidence, replay=replay))

    def again(self, batch: Any) -> ReplayResult:
        """Run the step once more, in the fastest mode in which it is bad."""
        e = self.evidence
        if e.bad_site in ("slots", "weights"):
            return self.step.run(batch, update=True)
        only_compiled = e.replay.result == "finite"
        if only_compiled and self.step.judged is None:
            return self.step.run_compiled(batch, jit=e.mode == "xla")
        return self.step.rerun(batch)


def examine(case: Case) -> Evidence:
    """Return the evidence of a case with the results of a replay and, unless its step has committed
    or its state was bad before, which decides, of all trials.
    """
    case, e = _replayed(case), case.evidence
    decides = not e.incident.refused or bool(e.state)
    return (case if decides else run_trials(case)).evidence


def _replayed(case: Case) -> Case:
    """Replay the step eagerly and, if that is finite, in the mode in which it was compiled."""
    run, mode = case.step.run(case.batch, observe=True, update=True), case.evidence.mode
    if not run.finite:
        return case.with_run(run, run.word)
    again = run if mode == "eager" else case.step.run_compiled(case.batch, jit=mode == "xla")
    return case.with_run(again if again.first else run, run.word, again.word)


def run_trials(case: Case) -> Case:
    """Return a replayed case with the problem of its targets and, if the replay is bad, the results
    of all trials.
    """
    case = case.with_trials(target_fault=_targets(case))
    if case.evidence.bad_site and not case.evidence.replay.error:
        for trial in TRIALS:
            case = case.with_trials(**trial(case))
    return case


def obstacle_to(step: ReplayableStep) -> str:
    """Return why this process cannot replay a step, as a sentence; `""` if it can."""
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


def tensors(batch: Any) -> Any:
    """Return a batch with its arrays as tensors of the backend."""
    return keras.tree.map_structure(
        lambda value: None if value is None else keras.ops.convert_to_tensor(value), batch
    )


# The trials


def _targets(case: Case) -> TargetFault | None:
    """Return the first problem of the targets, with the proof that it is the reason for the
    failure; the outputs have the shapes of a replay if it has any.
    """
    model = case.step.model
    outputs = case.evidence.replay.output_shapes or keras_layers.output_shapes(model)
    found = targets_by_loss(model, case.batch, outputs)
    for output, loss, part, shape in found:
        wrong = None if part is None else rejected(loss, part.array, classes_of(loss, shape))
        if part is not None and wrong is not None:
            output, proof = output if len(found) > 1 else "", _proof(case, part, wrong.valid)
            return TargetFault(str(loss.name), output, wrong.rows, wrong.clause, proof)
    return None


def _proof(case: Case, part: batches.Part, valid: finiteness.Array) -> str:
    """Return why the targets in a part of the batch are the reason for the failure, as a sentence:
    with `valid` ones the step is finite, or the loss has only fallen, to below where it has a
    minimum with probabilities as targets. `""` if neither is known.
    """
    e, growth = case.evidence, case.evidence.growth
    if e.bad_site == "outputs" or not (e.bad_site or e.replay.error):
        return ""
    if valid.shape == tuple(part.value.shape):
        given = keras.ops.cast(valid, keras.backend.standardize_dtype(part.value.dtype))

        def corrected(role: str, value: Any) -> Any:
            return given if role == part.role and value is part.value else value

        if case.again(batches.mapped(case.batch, corrected)).finite:
            return "With targets in the range of the loss the same step is finite."
    farthest = max(growth.losses, key=abs, default=0.0)
    # A rate that is too high makes it rise first. Later, the sign of a huge loss is chance.
    large = (v for v in growth.losses if abs(v) * growth.loss > JUMP * abs(farthest))
    first = next(large, farthest)
    negative = negative_loss(case.step.model, [first]) if e.grown() else None
    return "" if negative is None else negative.proof


def _in_float32(case: Case) -> dict[str, Any]:
    """Is the step finite in float32?"""
    if not case.evidence.low_precision:
        return {}
    with computing_in_float32(case.step):
        return {"float32": case.step.run(case.batch, update=True).word}


def _unscaled(case: Case) -> dict[str, Any]:
    """Is the step finite with a loss scale of 1? Only a step of the user scales the loss itself."""
    state, e = TrainState.of(case.step.model, case.step.optimizers), case.evidence
    scales = [scale for scale, _ in state.scales]
    in_loss = e.bad_site == "loss" and (e.loss_scale or 0.0) > SCALE_TOO_HIGH
    if not scales or not (in_loss or e.bad_site == "gradients"):
        return {}
    with preserved(scales):
        for scale in scales:
            keras_variables.write(scale, np.ones((), "float32"))
        return {"unscaled": case.step.run(case.batch).word}


def _without_rows(case: Case) -> dict[str, Any]:
    """Is the step finite without some rows?"""
    for rows in suspects(case):
        some = 0 < len(rows) < case.evidence.batch.count
        if some and case.again(batches.without(case.batch, rows)).finite:
            return {"rows": rows, "without_rows": "finite"}
    return {}


def _at_start(case: Case) -> dict[str, Any]:
    """Does the batch overflow on the initial state, too, or only after the first steps?"""
    e = case.evidence
    if case.start is None or e.batch.inputs_bad or e.batch.targets_bad or e.grown():
        return {}
    if not 0 < e.incident.step <= EARLY or e.mechanism not in ("exp", "overflow"):
        return {}
    with at_state(case.step, case.start):
        return {"at_start": case.again(case.batch).word}


def _with_scaled_data(case: Case) -> dict[str, Any]:
    """Does training on this batch, from the initial state, diverge only if the data is unscaled?"""
    e, step, start = case.evidence, case.step, case.start
    largest = e.largest.max_abs
    if start is None or e.incident.step > EARLY or largest < LARGE_DATA:
        return {}
    if e.mechanism == "pole" or not e.grown():
        return {}

    def growth(batch: Any) -> float:
        """Return the factor by which the loss grows over a few steps, infinite if it overflows."""
        with at_state(step, start, rates=True):
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
    _with_scaled_data,
)
"""The trials in order: each returns fields of `TrialFacts`, none if it is not needed."""


# Rows


def _bad_in_results(run: ReplayResult, count: int) -> tuple[int, ...]:
    """Return the rows with bad loss values, or else with bad outputs of the model; none if all of
    them are bad, or if the run has raised or is bad in its update only.
    """
    if run.finite or run.error or run.first in ("slots", "weights"):
        return ()
    for _, values in (*run.sample_losses, *run.outputs):
        if found := bad_rows(np.asarray(values), count)[0]:
            return found
    return ()


def suspects(case: Case) -> Iterator[tuple[int, ...]]:
    """Yield rows that may be to blame, the best supported first."""
    e = case.evidence
    if e.bad_site in ("slots", "weights"):
        yield e.outliers((*e.batch.inputs, *e.batch.targets))
        return
    blamed, in_results = _rows_to_blame(e.replay), e.replay.bad_rows
    yield blamed
    if blamed and not set(in_results) <= set(blamed):  # other operations are undefined in others
        yield distinct((blamed, in_results))
    yield distinct(part.rows for part in (*e.batch.inputs_bad, *e.batch.targets_bad))
    yield e.outliers((*e.batch.inputs, *e.batch.targets))
    mixed = e.bad_site in ("loss", "statistics", "gradients")
    if mixed and e.replay.result == "bad" and e.batch.count > 1 and not (blamed or e.grown()):
        yield _only_row(case)


def _rows_to_blame(replay: ReplayFacts) -> tuple[int, ...]:
    """Return the rows that are bad in a replay, none if all of them are: those of the origin of the
    bad value, which is the most precise, or those with bad results.
    """
    origin = replay.origin
    if origin.rows or (origin.all_rows and origin.source == "operation"):
        return origin.rows
    return replay.bad_rows


def _only_row(case: Case) -> tuple[int, ...]:
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


# Changes of a step for the trials: an earlier state, scaled data, the model in float32


@contextmanager
def at_state(step: ReplayableStep, start: Start, rates: bool = False) -> Iterator[None]:
    """Give a step an earlier state, as far as it is known, and restore the current one at the end.

    Args:
        rates: whether loss scale and learning rates are the earlier ones, too.
    """
    state = TrainState.of(step.model, step.optimizers)
    with step.preserved():
        for variable in state.everything if rates else state.restorable:
            value = start(variable)
            if value is not None:
                keras_variables.write(variable, value)
        yield


def standardized(role: str, value: Any, ids: bool = True) -> Any:
    """Return floats with mean 0 and standard deviation 1 in each feature; targets only if they are
    large, no sparse or ragged ones.

    Args:
        ids: whether integers in the inputs are ids, which are not scaled.
    """
    if keras_arrays.is_sparse(value) or keras_arrays.is_ragged(value):
        return value
    array = finiteness.widen(keras_arrays.dense(value))
    is_float = array.dtype.kind == "f"
    counts = array.dtype.kind in "iu" and role == "inputs" and not ids
    if not (is_float or counts) or role == "sample_weight" or not array.ndim:
        return value
    array = array.astype(np.float64)
    if role == "targets" and np.abs(array).max() <= 10.0:
        return value
    deviation = array.std(axis=0)
    scaled = (array - array.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    dtype = value.dtype if is_float else keras.backend.floatx()
    return keras.ops.cast(scaled, keras.backend.standardize_dtype(dtype))


def computing_in_float32(step: ReplayableStep) -> AbstractContextManager[None]:
    """Make the model of a step compute in float32, with float32 copies of all variables of the step
    that have a low dtype.
    """
    twin = current.replay().twin
    return precision.computing_in_float32(step.model, step.optimizers, step.variables(), twin)
