"""Caches a compiled step, so that the next fit of the same model need not trace it again.

Keras keeps its train function until the next `compile`. A guarded one is kept as long: on the model
itself, so that it is released with the model, with a key of everything that is built into its
trace.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from keras_nanguard._keras import overrides

__all__ = ["forget", "keep", "take"]

NAME = "_nanguard_kept_step"


class _CachedStep:
    """Hides the step from code that searches the attributes of a model for variables."""

    __slots__ = ("key", "step")

    def __init__(self, key: tuple[Any, ...], step: Any):
        self.key, self.step = key, step


def keep(model: Any, key: tuple[Any, ...], step: Any) -> None:
    """Store the step for the next fit.

    Args:
        model: the model of the step.
        key: everything that is built in; compared by identity, numbers and bound methods by
            equality.
        step: the step.
    """
    overrides.set_instance(model, NAME, _CachedStep(key, step))


def take(model: Any, key: tuple[Any, ...]) -> Any:
    """Return and remove the step with the same key, or `None`."""
    kept = vars(model).get(NAME)
    forget(model)
    return kept.step if kept is not None and _same(kept.key, key) else None


def forget(model: Any) -> None:
    """Remove the step."""
    overrides.unset_instance(model, NAME)


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(map(_is, one, other))


def _is(one: Any, other: Any) -> bool:
    return one is other or (
        type(one) is type(other) and isinstance(one, (int, MethodType)) and one == other
    )
