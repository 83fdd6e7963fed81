"""Attributes set on one instance for a while, past Keras' attribute tracking, and given back.

What all threads share, a class or a module, is overridden for those threads alone that ask for it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["Overrides", "ThreadOverrides", "set_instance", "unset_instance", "without_warnings"]

_ABSENT = object()

_FILTERS = threading.RLock()
"""Held by the one thread that has changed the filters of `warnings`, which belong to the whole process."""


def set_instance(target: Any, name: str, value: Any) -> None:
    """Set an attribute on one instance, past Keras' attribute tracking."""
    object.__setattr__(target, name, value)


def unset_instance(target: Any, name: str) -> None:
    """Remove an attribute set by `set_instance`, if it is still there."""
    target.__dict__.pop(name, None)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Issue no warning meanwhile. One thread after the other: the last to leave would put back what another had changed, for good."""
    with _FILTERS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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


class ThreadOverrides:
    """What stands in for functions of a class or a module in the threads that have entered, and in no other.

    The first thread that enters puts it in place, the last one that leaves takes it off, in whatever order they do.

    Args:
        target: the class or module.
        functions: by name, what is called in place of each: `function(real, inside, *args, **kwargs)` with what this thread has
            entered with, in order.
    """

    def __init__(self, target: Any, functions: Mapping[str, Callable[..., Any]]):
        self._target, self._functions = target, dict(functions)
        self._lock = threading.Lock()
        self._inside: dict[int, list[Any]] = {}
        self._before: dict[str, tuple[Any, Any]] = {}
        self._hooks: dict[str, tuple[Any, Any]] = {}  # the last ones, each with what it stands for

    def enter(self, what: Any) -> None:
        """Have the functions replaced in this thread until `leave`."""
        with self._lock:
            if not self._inside:
                self._put()
            self._inside.setdefault(threading.get_ident(), []).append(what)

    def leave(self, what: Any) -> None:
        """Undo `enter`, called in the same thread with the same object."""
        with self._lock:
            thread = threading.get_ident()
            inside = self._inside[thread]
            if len(inside) > 1:
                self._inside[thread] = [entry for entry in inside if entry is not what]
                return
            del self._inside[thread]
            if not self._inside:
                self._take_off()

    def _put(self) -> None:
        for name, function in self._functions.items():
            real, known = getattr(self._target, name), self._hooks.get(name)
            if known is None or known[0] is not real:
                known = self._hooks[name] = real, self._hook(real, function)
            self._before[name] = vars(self._target).get(name, _ABSENT), known[1]
            setattr(self._target, name, known[1])

    def _take_off(self) -> None:
        for name, (before, ours) in self._before.items():
            if vars(self._target).get(name) is not ours:
                continue  # someone else has put something around it since, which calls it and finds that it does nothing
            if before is _ABSENT:
                delattr(self._target, name)
            else:
                setattr(self._target, name, before)
        self._before.clear()

    def _hook(self, real: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        entered = self._inside

        def hook(*args: Any, **kwargs: Any) -> Any:
            inside = entered.get(threading.get_ident())
            return real(*args, **kwargs) if inside is None else function(real, inside, *args, **kwargs)

        return hook
