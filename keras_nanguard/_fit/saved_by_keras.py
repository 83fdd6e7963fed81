"""Finds by trial which variables of a train state Keras saves with a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_nanguard._keras import saving as keras_saving, variables as keras_variables, whole_writes
from keras_nanguard._keras.overrides import without_warnings

__all__ = ["left_out"]


def left_out(model: Any, weights: Path, variables: Sequence[Any]) -> frozenset[int]:
    """Return the numbers of the variables that loading this file, just saved, does not restore.

    This works for any layer and release of Keras. It takes no copy of the state: one entry of each
    variable is changed, and restored afterwards.
    """
    marks = [_Mark(variable) for variable in variables]
    try:
        for mark in marks:
            mark.make()
        with without_warnings():
            keras_saving.load_weights(model, weights)
        return frozenset(number for number, mark in enumerate(marks) if mark.is_there())
    finally:
        whole_writes.finish(mark.undo for mark in marks)


class _Mark:
    """A changed first entry of a variable, which shows whether a file has restored it."""

    def __init__(self, variable: Any):
        self.variable = variable
        array = keras_variables.view(variable)
        self.first = np.array(array.flat[0]) if array.size else None

    def make(self) -> None:
        """Write the other value."""
        if self.first is not None:
            self._put((self.first == 0).astype(self.first.dtype))

    def is_there(self) -> bool:
        """Whether the other value is still there."""
        return self.first is not None and not _same(
            np.array(keras_variables.view(self.variable).flat[0]), self.first
        )

    def undo(self) -> None:
        """Restore the first value, if necessary."""
        if self.is_there():
            self._put(self.first)

    def _put(self, value: Any) -> None:
        array = keras_variables.read(self.variable)
        array.flat[0] = value
        keras_variables.assign(self.variable, array)


def _same(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    return one.tobytes() == other.tobytes()
