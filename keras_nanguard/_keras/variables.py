"""The values of Keras' variables, and of tensors, as NumPy arrays: read, looked at in place, written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np

from keras_nanguard._keras import native_variables, spread_arrays

__all__ = [
    *("VARIABLE", "dense", "flat", "global_seed_variables", "has_handle", "is_statistic", "is_variable", "named_arrays"),
    *("native", "read", "read_tensor", "seeds", "unique", "view", "write"),
]

VARIABLE = keras.src.backend.Variable
"""Class of every variable of Keras' own. In Keras 3.6 `keras.Variable` is a class of its own, which no layer uses."""


def flat(value: Any) -> Iterator[Any]:
    """Iterate over a list, a tuple or the values of a dict; anything else is one item."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return iter((value,))
    return iter(value)


def unique(variables: Iterable[Any]) -> list[Any]:
    """Return each of them once, in order."""
    return list({id(v): v for v in variables}.values())


def native(variable: Any) -> Any:
    """Return the backend's own variable behind one of Keras', and any other one as it is."""
    return variable.value if isinstance(variable, (VARIABLE, native_variables.NativeVariable)) else variable


def has_handle(value: Any) -> bool:
    """Whether it is a `tf.Variable` of one device; one that is spread over several raises when it is asked."""
    try:
        return hasattr(value, "handle")
    except ValueError:
        return False


def is_variable(value: Any) -> bool:
    """Whether it is a variable of Keras' own."""
    return isinstance(value, VARIABLE)


def read(variable: Any) -> np.ndarray[Any, Any]:
    """Return the variable's value as a NumPy array that shares no memory with it."""
    return np.array(keras.ops.convert_to_numpy(spread_arrays.whole(variable.value)))


def view(variable: Any) -> np.ndarray[Any, Any]:
    """Return the variable's value as a NumPy array that may share its memory: read it at once, never write it."""
    value = variable.value
    if has_handle(value):  # a tf.Variable: the bare operation takes a quarter of the time of `.numpy()`
        value = keras.src.utils.module_utils.tensorflow.raw_ops.ReadVariableOp(resource=value.handle, dtype=value.dtype)
    return _as_numpy(value)


def _as_numpy(value: Any) -> np.ndarray[Any, Any]:
    """Return a tensor's numbers, in its own memory where that can be read."""
    if hasattr(value, "detach"):  # torch: NumPy knows neither its gradients, nor its devices, nor its bfloat16
        value = value.detach().cpu()
        return np.asarray(keras.ops.convert_to_numpy(value) if "bfloat16" in str(value.dtype) else value.numpy())
    if hasattr(value, "numpy"):  # TensorFlow: `.numpy()` makes a copy of a tensor; a mirrored variable is no array by itself
        value = value.read_value() if hasattr(value, "read_value") else value
        return np.asarray(value if len(value.shape) else value.numpy())  # a scalar of bfloat16 is no array by itself either
    return np.asarray(keras.ops.convert_to_numpy(spread_arrays.whole(value)))


def is_statistic(variable: Any) -> bool:
    """Whether the variable is a running statistic that has to be finite: of BatchNorm, Normalization and the like."""
    name = str(getattr(variable, "name", ""))
    return not variable.trainable and ("mean" in name or "variance" in name)


def write(variable: Any, array: Any) -> None:
    """Give the variable a value, from outside of any step: a copy, for some backends work on in the array they are given."""
    variable.assign(np.array(array))


def seeds(variables: Iterable[Any]) -> list[Any]:
    """Return the states of seed generators among these variables."""
    return [v for v in variables if str(v.name).endswith("seed_generator_state")]


def named_arrays(data: Any) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield `(path, array)` for every tensor of nested data, as `0`, `0/1` or `0/name`; text and `None` are left out."""
    yield from _named("", data)


def _named(path: str, data: Any) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(data, dict):
        children = data.items()
    elif isinstance(data, (list, tuple)):
        children = enumerate(data)
    elif data is not None:
        array = dense(data)
        if array.dtype.kind not in "OSU":
            yield path, array
    for key, value in children:
        yield from _named(f"{path}/{key}" if path else str(key), value)


def dense(value: Any) -> np.ndarray[Any, Any]:
    """Return the numbers of a tensor as a NumPy array: of a sparse one its values, of a ragged one its flat values."""
    for name in ("flat_values", "values"):
        inner_values = getattr(value, name, None)
        if inner_values is not None and not callable(inner_values):
            return dense(inner_values)
    if hasattr(value, "detach"):
        return _as_numpy(value)
    return spread_arrays.as_array(value)


def read_tensor(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a tensor's value as a NumPy array of its own."""
    return np.array(keras.ops.convert_to_numpy(tensor))


def global_seed_variables() -> list[Any]:
    """Return the state of the generator that Keras falls back to where no seed is given, if it exists already.

    `keras.src.random.seed_generator.global_seed_generator` makes it on first use and keeps it under this name.
    """
    generator = keras.src.backend.common.global_state.get_global_attribute("global_seed_generator")
    return [] if generator is None else [generator.state]
