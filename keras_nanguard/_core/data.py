"""The arrays of a batch, and their names for the user."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

ROLES = {"inputs": "x", "targets": "y"}
"""Arguments of `fit`, by the role of their arrays."""

ARGUMENTS = ("inputs", "targets", "sample_weight")
"""The roles of the arguments of a step, in their order."""


def arguments(args: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield role, path and value of each array of a batch, given the arguments of the step:
    `(data,)` in Keras, anything in a loop."""
    args, kwargs = tuple(args) if isinstance(args, (list, tuple)) else (args,), {}
    if len(args) == 2 and isinstance(args[0], tuple) and isinstance(args[1], dict):
        args, kwargs = args  # of a step of a loop
    data = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    for role, value in zip(ARGUMENTS, data[: len(ARGUMENTS)]):
        yield from ((role, path, v) for path, v in leaves(role, value))
    for value in (*data[len(ARGUMENTS) :], kwargs):
        yield from (("inputs", path, v) for path, v in leaves("inputs", value))


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of an argument of a step, or of `fit`, with their paths in incidents."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(f"{path}/{key}", item)
    elif isinstance(value, (list, tuple)):
        for key, item in enumerate(value):
            yield from leaves(f"{path}/{key}" if len(value) > 1 else path, item)
    elif value is not None:
        yield path, value


def is_iterator(value: Any) -> bool:
    """Whether a value yields another item each time. Open files do not count."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def named(path: str, names: tuple[str, ...]) -> str:
    """Return the path of an array of the inputs (`inputs/1`, `x`) with the name of its
    `keras.Input` in place of its number."""
    role, _, rest = path.partition("/")
    number = int(rest) if rest.isdecimal() else 0 if not rest and len(names) == 1 else len(names)
    known = role in ("inputs", "x") and number < len(names) and names[number]
    return f"{role}/{names[number]}" if known else path


def argument_path(path: str) -> str:
    """Return the path of an array of the batch by the arguments of `fit`: `x`, `x/age`, `y`."""
    role, slash, rest = path.partition("/")
    return ROLES.get(role, role) + slash + rest
