"""A bad step that is examined: it can run again, also changed, and its evidence grows. What its
batch contains, and which rows or targets may be to blame.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_nanguard._backends import current, processes
from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.origins import bad_rows
from keras_nanguard._backends.shared.replay import ReplayableStep, ReplayResult
from keras_nanguard._core import finiteness, memory
from keras_nanguard._core.data import named
from keras_nanguard._core.history import JUMP
from keras_nanguard._core.observations import NOWHERE
from keras_nanguard._diagnose.evidence import (
    BatchFacts,
    Evidence,
    ReplayFacts,
    TargetFault,
    distinct,
)
from keras_nanguard._diagnose.targets import PROBABILITIES, classes_of, rejected
from keras_nanguard._keras import (
    arrays as keras_arrays,
    layers as keras_layers,
    losses as keras_losses,
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

    def with_(self, **found: Any) -> Case:
        """Return the case with more evidence."""
        return dataclasses.replace(self, evidence=dataclasses.replace(self.evidence, **found))

    def with_run(self, run: ReplayResult, result: str) -> Case:
        """Return the case with what a replay has shown; `result` is that of `ReplayFacts`."""
        e, origin = self.evidence, run.origin or NOWHERE
        if origin.source == "batch":
            name = named(origin.op, keras_layers.input_names(self.step.model))
            origin = dataclasses.replace(origin, op=name)
        path = run.first_path if run.first else e.bad_path
        replay = dataclasses.replace(
            e.replay,
            result=result,
            error=run.error,
            origin=origin,
            loss_parts=tuple((name, float(np.mean(v))) for name, v in run.sample_losses),
            bad_rows=_bad_in_results(run, e.batch.count),
            output_shapes=tuple((path, array.shape) for path, array in run.outputs),
            table=run.rows,
        )
        return self.with_(bad_site=run.first, bad_path=path, replay=replay)

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


def batch_facts(model: Any, batch: Any) -> BatchFacts:
    """Return what the batch of a step contains."""
    names, ids = keras_layers.input_names(model), not keras_layers.takes_floats(model)

    def shown(parts: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(dataclasses.replace(p, name=named(p.name, names)) for p in parts)

    return BatchFacts(
        count=batches.row_count(batch),
        inputs_bad=shown(batches.bad(batch, ("inputs",))),
        targets_bad=batches.bad(batch, ("targets", "sample_weight")),
        inputs=tuple(
            dataclasses.replace(p, integer=p.integer and ids)
            for p in shown(batches.spreads(batch, "inputs"))
        ),
        targets=batches.spreads(batch, "targets"),
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


# Targets


def target_fault(case: Case) -> TargetFault | None:
    """Return the first problem of the targets, given the shapes of the outputs of a replay if it
    has any, and the proof that it is the reason for the failure.
    """
    model = case.step.model
    outputs = case.evidence.replay.output_shapes or keras_layers.output_shapes(model)
    found = targets_by_loss(model, case.batch, outputs)
    for output, loss, part, shape in found:
        width = classes_of(loss, shape)
        wrong = None if part is None else rejected(loss, part.array, width)
        if part is not None and wrong is not None:
            output, proof = output if len(found) > 1 else "", _proof(case, part, wrong.valid)
            return TargetFault(str(loss.name), output, wrong.rows, wrong.clause, proof)
    return None


def _proof(case: Case, part: batches.Part, valid: Any) -> str:
    """Return why the targets in a part of the batch are the reason for the failure, as a sentence:
    with `valid` ones the step is finite, or the loss has only fallen, to below where it has a
    minimum with probabilities as targets. `""` if neither is known.
    """
    e, growth = case.evidence, case.evidence.run.growth
    if e.bad_site == "outputs" or not (e.bad_site or e.replay.error):
        return ""
    if valid is not None and valid.shape == tuple(part.value.shape):
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


class LossTargets(NamedTuple):
    """The targets of one loss.

    Attributes:
        output: name of the output, `""` if it has none.
        part: the targets in the batch, `None` if unknown.
        shape: shape of the output, with the rows; `()` if unknown.
    """

    output: str
    loss: Any
    part: batches.Part | None
    shape: tuple[int | None, ...]


def targets_by_loss(
    model: Any, batch: Any, outputs: Sequence[tuple[str, tuple[int | None, ...]]]
) -> list[LossTargets]:
    """Return each compiled loss with its targets and the shape of its output.

    Losses, targets and outputs in dicts can be in three different orders, so they are matched by
    name, and only without names by place.

    Args:
        batch: the arguments of the step; `None` if unknown.
        outputs: path and shape of each output.
    """
    entries = keras_losses.losses_by_output(model)
    targets = [(part.path, part) for part in batches.parts(batch) if part.role == "targets"]

    def of(items: Sequence[tuple[str, Any]], name: str, place: int) -> Any:
        named = {path.rpartition("/")[2]: item for path, item in items}
        if name in named:
            return named[name]
        known = len(items) in (1, len(entries)) and place < len(items)
        return items[place][1] if known else None

    return [
        LossTargets(name, loss, of(targets, name, place), of(outputs, name, place) or ())
        for place, (name, loss) in enumerate(entries)
    ]


def negative_loss(model: Any, losses: Sequence[float]) -> TargetFault | None:
    """Return the problem of the targets that a negative loss implies, if no loss of the model can
    be negative.
    """
    entries = [loss for _, loss in keras_losses.losses_by_output(model)]
    if not entries or not any(loss < -1e-3 for loss in losses) or keras_layers.adds_losses(model):
        return None
    if not all(keras_losses.class_of(loss) in PROBABILITIES for loss in entries):
        return None
    proof = f"With probabilities as targets the loss cannot be negative; it was {min(losses):.3g}."
    return TargetFault(str(entries[0].name), "", (), "values that are not probabilities", proof)


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
