"""Attributes set on one instance for a while, past Keras' attribute tracking, and given back."""

from __future__ import annotations

from typing import Any

__all__ = ["Overrides", "set_instance", "unset_instance"]

_ABSENT = object()


def set_instance(target: Any, name: str, value: Any) -> None:
    """Set an attribute on one instance, past Keras' attribute tracking."""
    object.__setattr__(target, name, value)


def unset_instance(target: Any, name: str) -> None:
    """Remove an attribute set by `set_instance`, if it is still there."""
    target.__dict__.pop(name, None)


class Overrides:
    """What stands in for attributes of instances until it is given back; a context that does so."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute on one instance, and remember what the instance itself had there."""
        self._before.append((target, name, vars(target).get(name, _ABSENT)))
        set_instance(target, name, value)

    def give_back(self) -> None:
        """Leave every instance as it was; may be called any number of times."""
        while self._before:
            target, name, before = self._before.pop()
            unset_instance(target, name) if before is _ABSENT else set_instance(target, name, before)

    def __enter__(self) -> Overrides:
        return self

    def __exit__(self, *details: Any) -> None:
        self.give_back()
