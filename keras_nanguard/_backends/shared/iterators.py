"""Whether the step of a loop takes its batch from an iterator: it cannot be called again then."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from keras_nanguard._core.data import is_iterator

MAX_DEPTH = 4
"""Maximum depth to which calls between functions of the user are followed."""


def reads_iterator(function: Any) -> bool:
    """Whether a function, or one of the same module that it names, refers to an iterator: in its
    closure, among the globals that it names, as an attribute of these that it names, or as one of
    the object whose method it is.

    Each call of such a function takes the next item, so it cannot be called again with the same
    data.
    """
    return any(map(is_iterator, _referred(function, MAX_DEPTH, set())))


def _referred(function: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """Yield the objects that a function refers to."""
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values())
        function = function.func
    owner = getattr(function, "__self__", None)
    function = getattr(function, "python_function", function)  # of a `tf.function`
    function = getattr(function, "__wrapped__", function)
    owner, plain = getattr(function, "__self__", owner), getattr(function, "__func__", function)
    owner = getattr(owner, "weakrefself_target__", lambda: owner)()  # of a method of TensorFlow
    if depth == MAX_DEPTH and callable(plain) and not isinstance(plain, types.FunctionType):
        owner, plain = plain, type(plain).__call__
    if not isinstance(plain, types.FunctionType) or id(plain) in seen or not depth:
        return
    seen.add(id(plain))
    names = [name for name in plain.__code__.co_names if name in plain.__globals__]
    values = [plain.__globals__[name] for name in names]
    for cell in plain.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            continue
    held = [getattr(value, "__dict__", {}) for value in values]
    values += [own[name] for own in held for name in plain.__code__.co_names if name in own]
    if not isinstance(owner, types.ModuleType):
        values += getattr(owner, "__dict__", {}).values()
    for value in values:
        yield value
        if getattr(value, "__module__", None) == plain.__module__:
            yield from _referred(value, depth - 1, seen)
