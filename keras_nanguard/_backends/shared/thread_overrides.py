"""Overrides of functions of a class or a module, which all threads share, in some threads only."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_ABSENT = object()

_NO_THREAD = -1
"""Stands for a thread that calls nothing."""


class ThreadOverrides:
    """Overrides of functions of a class or a module in the threads that have entered, and in no
    other.

    The first thread that enters installs them, and the last one that leaves removes them. If
    threads enter often, `held` keeps them installed in between, because changing a class
    invalidates Python's cache of its attributes.

    Args:
        target: the class or module.
        functions: the replacement of each function by name, called as `function(real, inside,
            *args, **kwargs)`, where `inside` are the objects that this thread has entered with, in
            order.
        more: returns further targets with their functions when the overrides are installed.
    """

    def __init__(
        self,
        target: Any,
        functions: Mapping[str, Callable[..., Any]],
        more: Callable[[], Iterable[tuple[Any, Mapping[str, Callable[..., Any]]]]] = tuple,
    ):
        self._places, self._more = [(target, functions)], more
        self._lock = threading.Lock()
        self._inside: dict[int, list[Any]] = {}
        self._before: dict[tuple[Any, str], tuple[Any, Any]] = {}
        self._hooks: dict[tuple[Any, str], tuple[Any, Any]] = {}
        """The latest ones, each after the function that it replaces."""

    def inside(self) -> list[Any]:
        """Return the objects that this thread has entered with, in order."""
        return self._inside.get(threading.get_ident(), [])

    def held(self) -> contextlib.ExitStack:
        """Keep the functions installed until the context that is returned ends, in any thread."""
        return self.entered(self, _NO_THREAD)

    def entered(self, what: Any, thread: int | None = None) -> contextlib.ExitStack:
        """Override the functions in this thread until the context that is returned ends."""
        self.enter(what, thread)
        ending = contextlib.ExitStack()
        ending.callback(self.leave, what, thread)
        return ending

    def enter(self, what: Any, thread: int | None = None) -> None:
        """Override the functions in this thread until `leave`."""
        with self._lock:
            if not self._inside:
                try:
                    self._install()
                except BaseException:
                    self._remove()
                    raise
            thread = threading.get_ident() if thread is None else thread
            self._inside[thread] = [*self._inside.get(thread, ()), what]

    def leave(self, what: Any, thread: int | None = None) -> None:
        """Undo `enter`, called in the same thread with the same object."""
        with self._lock:
            thread = threading.get_ident() if thread is None else thread
            inside = self._inside.pop(thread)
            place = next(n for n, entry in enumerate(inside) if entry is what)
            if len(inside) > 1:
                self._inside[thread] = [*inside[:place], *inside[place + 1 :]]
            if not self._inside:
                self._remove()

    def _install(self) -> None:
        for target, functions in (*self._places, *self._more()):
            for name, function in functions.items():
                real, known = getattr(target, name), self._hooks.get((target, name))
                if known is None or known[0] is not real:
                    known = self._hooks[target, name] = real, self._hook(real, function)
                self._before[target, name] = vars(target).get(name, _ABSENT), known[1]
                setattr(target, name, known[1])

    def _remove(self) -> None:
        for (target, name), (before, ours) in self._before.items():
            if vars(target).get(name) is not ours:
                continue  # other code has wrapped it since; the hook passes calls through
            if before is _ABSENT:
                delattr(target, name)
            else:
                setattr(target, name, before)
        self._before.clear()

    def _hook(self, real: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        entered = self._inside

        def hook(*args: Any, **kwargs: Any) -> Any:
            inside = entered.get(threading.get_ident())
            return (
                real(*args, **kwargs) if inside is None else function(real, inside, *args, **kwargs)
            )

        return hook
