"""Temporary overrides of attributes of one instance, without Keras' attribute tracking."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


def set_instance(target: Any, name: str, value: Any) -> None:
    """Set an attribute on one instance, without Keras' attribute tracking."""
    object.__setattr__(target, name, value)


def unset_instance(target: Any, name: str) -> None:
    """Remove an attribute set by `set_instance`, if it is still there."""
    target.__dict__.pop(name, None)


class Overrides:
    """Overrides attributes of instances until `give_back`, or the end of a `with` block."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], tuple[Any, Any]] = {}

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute on one instance, and store the instance's own value before the first
        time. A property, such as `Variable.regularizer`, is read and set.
        """
        is_property = hasattr(getattr(type(target), name, None), "__set__")
        own = getattr(target, name) if is_property else vars(target).get(name, _ABSENT)
        self._before.setdefault((id(target), name), (target, own))
        set_instance(target, name, value)

    def give_back(self) -> None:
        """Restore every instance; may be called any number of times."""
        while self._before:
            (_, name), (target, before) = self._before.popitem()
            if before is _ABSENT:
                unset_instance(target, name)
            else:
                set_instance(target, name, before)

    def __enter__(self) -> Overrides:
        return self

    def __exit__(self, *details: Any) -> None:
        self.give_back()
