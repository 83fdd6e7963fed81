"""Changes of a step, one at a time: the model in float32, scaled data, a lower rate, clipping, the
batch without some rows; and training from an earlier state up to the bad step with each of them.

The change that cures a failure identifies its cause: a divergence that a tenth of the learning rate
cures is due to the rate, one that only float32 cures to the dtype, one that disappears without
three rows to these rows.

Private to Keras, because there is no public way: ``Variable._value``, and ``_dtype`` of variables,
losses and symbolic tensors. `tests/keras_internals/test_internals.py` fails when a release of Keras
removes one of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.replay import ReplayableStep
from keras_nanguard._core import finiteness
from keras_nanguard._diagnose.evidence import LOW
from keras_nanguard._diagnose.facts import lowest
from keras_nanguard._diagnose.sentences import at_rows
from keras_nanguard._keras import (
    arrays as keras_arrays,
    layers as keras_layers,
    losses as keras_losses,
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.overrides import Overrides
from keras_nanguard._keras.train_state import TrainState

Start = Callable[[Any], Any]
"""Returns the value that a variable had in an earlier state, `None` if it was not in it."""

MIN_GROWTH = 10.0
"""Factor of the last loss over the first above which it is reported as growing."""


def reruns_with_changes(
    step: ReplayableStep, start: Start, sequence: Sequence[Any], rows: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Yield `(change, result)` of each rerun, and at the end which changes cure the failure.

    Args:
        step: the step.
        start: the state before the first step of the sequence.
        sequence: the arguments of each step, the bad one last.
        rows: rows of its batch that are to blame.
    """
    yield "unchanged", _outcome(step, start, sequence)[1]
    cures: list[str] = []
    for change, changed in _changes(step, sequence, rows):
        healthy, result = _outcome(step, start, changed)
        cures += [change] * healthy
        yield change, result
    yield "cured by", "; ".join(cures) or "none of these changes"


def _changes(
    step: ReplayableStep, sequence: Sequence[Any], rows: Sequence[int]
) -> Iterator[tuple[str, Sequence[Any]]]:
    """Make one change at a time; yield its words while it lasts, and the arguments of each step."""
    optimizers = list(map(keras_optimizers.inner, step.optimizers))
    with Overrides() as overrides:
        for optimizer in optimizers:
            keras_optimizers.set_rate(optimizer, lambda rate: rate() * 0.1, overrides)
        yield "with a tenth of the learning rate", sequence
    with Overrides() as overrides:
        for optimizer in optimizers:
            for name, value in (("clipnorm", None), ("clipvalue", None), ("global_clipnorm", 1.0)):
                overrides.set(optimizer, name, value)
        yield "with gradients clipped to a global norm of 1", sequence
    if lowest(step.model):
        with in_float32(step):
            yield "in float32", sequence
    bad = sequence[-1]
    if rows and len(rows) < batches.row_count(bad):
        rest = batches.without(bad, rows)
        yield f"without {at_rows(rows)}", [rest if one is bad else one for one in sequence]
    scaled = [batches.mapped(one, standardized) for one in sequence]
    yield "with inputs and targets scaled to unit standard deviation", scaled


def _outcome(step: ReplayableStep, start: Start, sequence: Sequence[Any]) -> tuple[bool, str]:
    """Return whether a rerun is healthy, and its result in words."""
    losses, bad_weight = train_from(step, start, sequence)
    if not math.isfinite(losses[-1]):
        return False, f"the loss is not finite at step {len(losses)} of {len(sequence)}"
    if bad_weight:
        return False, f"the loss stays finite, but {bad_weight} does not"
    grown = abs(losses[-1]) > MIN_GROWTH * abs(losses[0]) + 1e-12
    course = "grows" if grown else "stays finite,"
    return not grown, f"the loss {course} from {losses[0]:.3g} to {losses[-1]:.3g}"


def train_from(
    step: ReplayableStep, start: Start, sequence: Iterable[Any]
) -> tuple[list[float], str]:
    """Train from an earlier state and restore the current one.

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
        restore(train_state.everything, start)
        for batch in sequence:
            losses.append(step.train(batch))
            if not math.isfinite(losses[-1]):
                return losses, ""
        for variable in train_state.trainable:
            if not keras_variables.is_finite(variable):
                return losses, str(variable.path)
    return losses, ""


def restore(variables: Sequence[Any], start: Start) -> None:
    """Write the values of an earlier state, as far as it has them."""
    for variable in variables:
        value = start(variable)
        if value is not None:
            keras_variables.write(variable, value)


def standardized(role: str, value: Any) -> Any:
    """Return floats with mean 0 and standard deviation 1 in each feature; targets only if they are
    large, no sparse or ragged ones.
    """
    if keras_arrays.is_sparse(value) or hasattr(value, "nested_row_splits"):
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


@contextlib.contextmanager
def in_float32(step: ReplayableStep) -> Iterator[None]:
    """Make the model of a step compute in float32, with float32 copies of all variables of the step
    that have a low dtype.
    """
    twins: list[tuple[Any, Any]] = []
    with Overrides() as overrides:
        for layer in keras_layers.layers_of(step.model):
            keras_layers.replace_policy(layer, keras.DTypePolicy("float32"), LOW, overrides)
        for tensor in keras_layers.symbolic_inputs(step.model):
            overrides.set(tensor, "_dtype", "float32")
        for loss in keras_losses.losses_of(step.model):
            if str(getattr(loss, "dtype", "")) in LOW:
                overrides.set(loss, "_dtype", "float32")
        for variable in step.variables():
            if str(getattr(variable, "dtype", "")) not in LOW:
                continue
            native, twin = getattr(variable, "value", None), current.replay().twin(variable)
            if twin is not None:
                overrides.set(variable, "_value", twin)
                overrides.set(variable, "_dtype", "float32")
                twins.append((native, twin))
        for optimizer in step.optimizers:
            keras_optimizers.register_twins(optimizer, twins, overrides)
        yield
