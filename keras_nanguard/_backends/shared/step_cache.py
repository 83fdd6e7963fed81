"""A compiled step that outlives its fit: the next one of the same model need not trace it again.

Keras keeps its train function until `compile`, whatever is fitted with it. A guarded one is kept as long: on the model
itself, so that it goes when the model goes, and under everything that its trace has built in.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from keras_nanguard._keras import overrides

__all__ = ["forget", "keep", "take"]

NAME = "_nanguard_kept_step"


class _CachedStep:
    """Hides what it holds from all that looks for variables among the attributes of a model."""

    __slots__ = ("key", "step")

    def __init__(self, key: tuple[Any, ...], step: Any):
        self.key, self.step = key, step


def keep(model: Any, key: tuple[Any, ...], step: Any) -> None:
    """Keep the step for the next fit.

    Args:
        model: the model whose step it is.
        key: everything that is built in; compared one by one, by identity, numbers and bound methods by equality.
        step: whatever `take` is to return.
    """
    overrides.set_instance(model, NAME, _CachedStep(key, step))


def take(model: Any, key: tuple[Any, ...]) -> Any:
    """Return the step that was kept under the same key and forget it; `None` where there is none."""
    kept = vars(model).get(NAME)
    forget(model)
    return kept.step if kept is not None and _same(kept.key, key) else None


def forget(model: Any) -> None:
    """Let the next fit trace its step."""
    overrides.unset_instance(model, NAME)


def _same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return len(one) == len(other) and all(map(_is, one, other))


def _is(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, (int, MethodType)) and one == other)
