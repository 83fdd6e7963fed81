"""A bad step that is examined: it can run again, also changed, and its evidence grows. What its
batch contains, and which rows may be to blame.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_nanguard._backends import current, processes
from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.origins import bad_rows
from keras_nanguard._backends.shared.replay import ReplayableStep, ReplayResult
from keras_nanguard._core import finiteness, memory
from keras_nanguard._core.data import named
from keras_nanguard._core.observations import NOWHERE
from keras_nanguard._diagnose.evidence import Evidence, ReplayFacts, distinct
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
