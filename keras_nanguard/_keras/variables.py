"""One variable: what it is, and its value as a NumPy array, read, written or restored. A
`tf.Variable`, which belongs to no variable of Keras, is wrapped as one.

Private names of Keras:

- ``keras.src.backend.Variable``: the class of every variable. In Keras 3.6 `keras.Variable` is
  another class, which no layer uses.
- ``Variable._direct_assign`` and ``Variable._initialize``, through which a layer writes the value
  of a variable; there is no public hook.
- ``Variable._value``: the value of a variable, under `tf.distribute` one of several copies.
- ``keras.src.utils.module_utils.tensorflow``: imports TensorFlow only if it is used.
- The attribute ``global_seed_generator`` of Keras' global state
  (``keras.src.backend.common.global_state``): the generator that Keras uses if no seed is given.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.variable_names import STATISTIC
from keras_nanguard._keras import arrays as keras_arrays, torch_tensors
from keras_nanguard._keras.overrides import Overrides

VARIABLE = keras.src.backend.Variable
"""The class of every variable of Keras."""

ASSIGN, INITIALIZE = "_direct_assign", "_initialize"
"""Its methods that write a value, and the first one."""


def flat(value: Any) -> Iterator[Any]:
    """Iterate over a list, a tuple or the values of a dict; anything else is one item."""
    if isinstance(value, dict):
        return iter(value.values())
    return iter(value if isinstance(value, (list, tuple)) else (value,))


def unique(variables: Iterable[Any], besides: Iterable[Any] = ()) -> tuple[Any, ...]:
    """Return each variable once, in order, without some."""
    left_out = set(map(id, besides))
    return tuple({id(v): v for v in variables if id(v) not in left_out}.values())


def native(variable: Any) -> Any:
    """Return the variable of the backend behind a `keras.Variable`; any other one unchanged."""
    return variable.value if isinstance(variable, VARIABLE) else unwrapped(variable)


def stored(variable: Any) -> Any:
    """Return what holds the value of a variable, without the checks that `value` makes each time:
    on PyTorch for a symbolic call or a cast.
    """
    known = getattr(variable, "_value", None)
    return variable.value if known is None else known


def has_handle(value: Any) -> bool:
    """Whether it is a `tf.Variable` on one device; a distributed one raises `ValueError`."""
    try:
        return hasattr(value, "handle")
    except ValueError:
        return False


def is_variable(value: Any) -> bool:
    """Whether it is a variable of Keras."""
    return isinstance(value, VARIABLE)


@contextmanager
def on_first_replica(variables: Iterable[Any]) -> Iterator[None]:
    """Make variables of Keras with one copy per replica refer to that of the first replica."""
    with Overrides() as overrides:
        for variable in variables:
            copies: Any = getattr(variable, "_value", None)
            if hasattr(copies, "values"):
                overrides.set(variable, "_value", copies.values[0])
        yield


# What a variable is


def is_statistic(variable: Any) -> bool:
    """Whether it is a running statistic, as of BatchNorm, which has to be finite."""
    name = str(getattr(variable, "name", ""))
    return not variable.trainable and any(word in name for word in STATISTIC)


def seeds(variables: Iterable[Any]) -> list[Any]:
    """Return the states of seed generators among these variables."""
    return [v for v in variables if str(v.name).endswith("seed_generator_state")]


SEED_STEP = 7919
"""Amount by which each seed advances: a prime, so that no number of Dropout layers aligns with it.
"""


def moved_seeds(
    variables: Iterable[Any], times: int = 1, stored: Callable[[Any], Any] = lambda seed: None
) -> list[tuple[Any, Any]]:
    """Return the seeds among these variables, each with its value, or the one that is `stored`,
    advanced.
    """
    moved = []
    for seed in seeds(variables):
        known = stored(seed)
        value = read(seed) if known is None else np.array(known)
        value[..., -1] += np.asarray(SEED_STEP * times, value.dtype)
        moved.append((seed, value))
    return moved


def global_seed_variables() -> list[Any]:
    """Return the state of the generator that Keras uses without a seed, if it exists already."""
    generator = keras.src.backend.common.global_state.get_global_attribute("global_seed_generator")
    return [] if generator is None else [generator.state]


def bytes_of(variable: Any) -> int:
    """Return the bytes of the value of a variable without reading it; 0 if unknown."""
    bits = re.search(r"[0-9]+", str(variable.dtype))
    try:
        count = math.prod(int(n or 0) for n in variable.shape)
    except (TypeError, ValueError):  # a shape that is not known
        return 0
    return count * max(int(bits[0]) // 8, 1) if bits is not None else count


def on_host(variable: Any) -> bool:
    """Whether its value is in host memory, not on an accelerator."""
    return "cpu" in str(getattr(native(variable), "device", "cpu")).lower()


# Values as NumPy arrays


def read(variable: Any) -> np.ndarray[Any, Any]:
    """Return the variable's value as a NumPy array that shares no memory with it."""
    return np.array(view(variable))


def view(variable: Any) -> np.ndarray[Any, Any]:
    """Return the value as a NumPy array that may share its memory: read it at once, never write."""
    value = variable.value
    if has_handle(value):  # on TensorFlow this takes a quarter of the time of `.numpy()`
        operations = keras.src.utils.module_utils.tensorflow.raw_ops
        value = operations.ReadVariableOp(resource=value.handle, dtype=value.dtype)
    return keras_arrays.as_array(value)


def is_finite(variable: Any) -> bool:
    """Return whether every entry of the variable's value is finite."""
    return finiteness.is_finite(view(variable))


# Writing


def write(variable: Any, array: Any) -> None:
    """Assign a copy of the array to the variable: some backends modify the array."""
    variable.assign(np.array(array))


def restorer(variable: Any) -> Callable[[], Any]:
    """Return a function that restores the current value of a variable of Keras or the backend."""
    if hasattr(variable, "restorer"):  # the rates of an optimizer of torch
        restore: Callable[[], Any] = variable.restorer()
        return restore
    if is_variable(variable) or hasattr(variable, "path"):  # or wrapped
        array = read(variable)
        return lambda: write(variable, array)
    if hasattr(variable, "untyped_storage"):  # of torch
        kept = variable.detach().clone()
        return lambda: torch_tensors.write_tensor(variable.data, kept)
    value = variable.read_value()
    return lambda: variable.assign(value)


# A variable of TensorFlow

_AS_KERAS = "_nanguard_as_keras"
"""The attribute of a `tf.Variable` in which its `NativeVariable` is kept."""


class NativeVariable:
    """A `tf.Variable` with the interface of a `keras.Variable`: a path, the name of its dtype, a
    value.

    Keras optimizers accept a `tf.Variable` (of a `tf.Module`, of TF-Hub, of Sonnet) as well.

    Attributes:
        value: the `tf.Variable`.
        path, name: its name, without the `:0` that TensorFlow appends.
    """

    __slots__ = ("name", "path", "value")

    def __init__(self, variable: Any):
        self.value, self.path = variable, str(variable.name).partition(":")[0]
        self.name = self.path.rpartition("/")[2]

    @property
    def dtype(self) -> str:
        """Name of the dtype, as Keras writes it."""
        return str(self.value.dtype.name)

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Its shape."""
        return tuple(self.value.shape)

    @property
    def trainable(self) -> bool:
        """Whether a gradient tape watches it."""
        return bool(self.value.trainable)

    def assign(self, value: Any) -> None:
        """Set its value."""
        self.value.assign(value)


def as_keras(variable: Any) -> Any:
    """Return a `keras.Variable` unchanged; wrap a `tf.Variable`, always in the same object."""
    if hasattr(variable, "path") or not hasattr(variable, "read_value"):
        return variable
    known = getattr(variable, _AS_KERAS, None)
    if known is None:
        known = NativeVariable(variable)
        setattr(variable, _AS_KERAS, known)
    return known


def unwrapped(variable: Any) -> Any:
    """Return the variable that was passed to `as_keras`."""
    return variable.value if isinstance(variable, NativeVariable) else variable
