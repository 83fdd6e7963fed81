"""Changes of a step for the trials of a diagnosis: an earlier state, scaled data, the model in
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._backends.shared.replay import ReplayableStep
from keras_nanguard._core import finiteness
from keras_nanguard._keras import (
    arrays as keras_arrays,
    precision,
    variables as keras_variables,
)
from keras_nanguard._keras.train_state import TrainState

Start = Callable[[Any], Any]
"""Returns the value that a variable had in an earlier state, `None` if it was not in it."""


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
    if keras_arrays.is_sparse(value) or hasattr(value, "nested_row_splits"):
        return value
    array = finiteness.widen(keras_variables.dense(value))
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
