"""Whether the fields of a record that was read from a file hold what their annotations say."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from dataclasses import is_dataclass
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

__all__ = ["check"]


def check(record: Any) -> None:
    """Check the fields of a dataclass, and of those within it, whose annotations are of plain
    Python types.

    Raises:
        TypeError: if one holds something else.
    """
    for name, hint in _hints(record.__class__).items():
        value = getattr(record, name)
        if not _fits(value, hint):
            raise TypeError(
                f"{name} is {type(value).__name__}; expected {getattr(hint, '__name__', hint)}"
            )


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


_NUMBERS: dict[Any, tuple[Any, int]] = {int: (Integral, 1 << 62), float: (Real, 1 << 1000)}
"""What counts as such a number, NumPy's included, and the largest integer among them that can be
computed with and shown.
"""


def _fits(value: Any, hint: Any) -> bool:
    kind, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if kind in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if kind is Literal:
        return isinstance(value, str)  # the record itself says which words there are
    if kind is tuple:
        return isinstance(value, tuple) and all(_fits(item, inner[0]) for item in value)
    if kind is Mapping:
        return isinstance(value, Mapping) and all(
            _fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items()
        )
    if hint in _NUMBERS:
        number, most = _NUMBERS[hint]
        small = not isinstance(value, Integral) or abs(int(value)) <= most
        return isinstance(value, number) and not isinstance(value, bool) and small
    fits = isinstance(value, hint)
    if fits and is_dataclass(value):
        check(value)
    return fits
