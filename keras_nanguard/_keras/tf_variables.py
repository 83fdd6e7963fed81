"""A `tf.Variable`, which belongs to no variable of Keras, as a variable of Keras."""

from __future__ import annotations

from typing import Any

_NAME = "_nanguard_as_keras"
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
    known = getattr(variable, _NAME, None)
    if known is None:
        known = NativeVariable(variable)
        setattr(variable, _NAME, known)
    return known


def unwrapped(variable: Any) -> Any:
    """Return the variable that was passed to `as_keras`."""
    return variable.value if isinstance(variable, NativeVariable) else variable
