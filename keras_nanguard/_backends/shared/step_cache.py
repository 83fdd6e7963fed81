"""The compiled step of a guarded fit, kept for the next fit of the model."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from keras_nanguard._keras import overrides

_KEPT = "_nanguard_kept_step"
"""The attribute of the model. So the step is released with it. Keras keeps its train function as
long.
"""

Key = tuple[Any, ...]


class StepCache:
    """Keeps the step of one fit for the next one, which need not trace it again.

    Attributes:
        usable: whether the next fit may use it: nothing that is built into it was changed.
    """

    def __init__(self, model: Any):
        self._model, self.usable = model, True

    def take(self, key: Callable[[], Key]) -> Any:
        """Take the step of an earlier fit from the model; `None` if it does not fit this one.

        Args:
            key: returns everything that is built into the step.
        """
        if not self.usable:
            return None
        kept = vars(self._model).get(_KEPT)
        forget_step(self._model)
        return kept.step if kept is not None and _fits(kept.key, key()) else None

    def keep(self, key: Key, step: Any) -> None:
        """Keep a step for the next fit."""
        overrides.set_instance(self._model, _KEPT, _Kept(key, step))


class _Kept:
    """Hides the step from code that searches the attributes of a model for variables."""

    __slots__ = ("key", "step")

    def __init__(self, key: Key, step: Any):
        self.key, self.step = key, step


def _fits(key: Key, other: Key) -> bool:
    """Whether two keys have the same objects, the same numbers and equal bound methods."""
    return len(key) == len(other) and all(
        one is two or (type(one) is type(two) and isinstance(one, (int, MethodType)) and one == two)
        for one, two in zip(key, other)
    )


def forget_step(model: Any) -> None:
    """Remove the compiled step that was kept for the next fit of a model."""
    overrides.unset_instance(model, _KEPT)
