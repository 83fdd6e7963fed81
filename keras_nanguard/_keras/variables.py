"""The variables of a model: what each is, and its value as a NumPy array: copied, viewed, written,
all or none.

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

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import keras
import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.errors import StateLostError
from keras_nanguard._core.variable_names import STATISTIC
from keras_nanguard._keras import arrays as keras_arrays

VARIABLE = keras.src.backend.Variable
"""The class of every variable of Keras."""

ASSIGN, INITIALIZE = "_direct_assign", "_initialize"
"""Its methods that write a value, and the first one."""

_NAME = "_nanguard_as_keras"


def flat(value: Any) -> Iterator[Any]:
    """Iterate over a list, a tuple or the values of a dict; anything else is one item."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return iter((value,))
    return iter(value)


def unique(variables: Iterable[Any]) -> list[Any]:
    """Return each variable once, in order."""
    return list({id(v): v for v in variables}.values())


# Variables of Keras, and of the backend


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
    known = getattr(variable, _NAME, None)
    if known is None:
        known = NativeVariable(variable)
        setattr(variable, _NAME, known)
    return known


def unwrapped(variable: Any) -> Any:
    """Return the variable that was passed to `as_keras`."""
    return variable.value if isinstance(variable, NativeVariable) else variable


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
    replaced = [(v, v._value) for v in variables if hasattr(getattr(v, "_value", None), "values")]
    for variable, value in replaced:
        variable._value = value.values[0]
    try:
        yield
    finally:
        for variable, value in replaced:
            variable._value = value


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
    if hasattr(variable, "held"):  # the rates of an optimizer of torch
        restore: Callable[[], Any] = variable.held()
        return restore
    if is_variable(variable) or hasattr(variable, "path"):  # or wrapped
        array = read(variable)
        return lambda: write(variable, array)
    if hasattr(variable, "untyped_storage"):  # of torch
        kept = variable.detach().clone()
        return lambda: write_tensor(variable.data, kept)
    value = variable.read_value()
    return lambda: variable.assign(value)


def write_tensor(tensor: Any, value: Any) -> None:
    """Write a tensor of PyTorch, each number in memory once: PyTorch cannot write to an expanded
    tensor as a whole (`Normalization(mean=0.0)`).
    """
    if str(tensor.layout) == "torch.strided":
        once = tuple(slice(1 if stride == 0 else None) for stride in tensor.stride())
        tensor, value = tensor[once], value[once]
    tensor.copy_(value)


# Writing many variables so that a failure never leaves a mixture of two states. Memory of a device
# can be exhausted, a file can become unreadable and Ctrl-C can arrive between any two variables. A
# failed write is attempted once more, because memory is often free a moment later. If it fails
# again, the finished writes are undone. If the old values are unknown, the other writes are
# completed.

ATTEMPTS = 2
"""Number of attempts of each part. In `finish` an interrupt also ends only one attempt."""


def write_all(pairs: Iterable[tuple[Any, Any]]) -> None:
    """Write each array into its variable: all of them or none.

    The old values are copied, one variable after the other, and written back if anything is raised.
    That takes a second copy of the state in host memory.

    Args:
        pairs: `(variable, array)`, each array of the shape and dtype of its variable.

    Raises:
        StateLostError: if the old values cannot be written back.
        BaseException: the exception raised while writing.
    """
    before: list[tuple[Any, Any]] = []
    try:
        for variable, array in pairs:
            before.append((variable, _repeated(read, variable)))
            _repeated(write, variable, array)
    except BaseException:
        finish(partial(write, *pair) for pair in before)
        raise


def _repeated(part: Callable[..., Any], *args: Any) -> Any:
    """Return `part(*args)`, called once more after an error, but not after an interrupt."""
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(Exception):
            return part(*args)
    return part(*args)


def finish(parts: Iterable[Callable[[], Any]]) -> None:
    """Do every part, even if some raise. Each part can be repeated without harm.

    Raises:
        StateLostError: if a part has failed twice.
        BaseException: an interrupt (`KeyboardInterrupt`, `SystemExit`), after every part is done.
    """
    waiting = list(parts)
    interrupt: BaseException | None = None
    failed: list[BaseException] = []
    for part in waiting:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                part()
                break
            except BaseException as error:  # noqa: BLE001  it is raised again at the end
                interrupt = interrupt or (None if isinstance(error, Exception) else error)
                if attempt == ATTEMPTS:
                    failed.append(error)
    if failed:
        raise StateLostError(
            "Expected to write the complete state of the model. Received:"
            f" {type(failed[0]).__name__}: {failed[0]} ({len(failed)} of {len(waiting)} writes"
            " failed). The model holds values of two different steps: load a checkpoint before you"
            " use it."
        ) from failed[0]
    if interrupt is not None:
        raise interrupt
