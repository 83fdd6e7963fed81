"""Checks the values of a recording from a file, so that later code need not expect malformed ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keras_nanguard._core import plain_json

__all__ = ["MAX_WHOLE", "bins", "meta", "steps", "table", "whole"]

MAX_WHOLE = 1 << 53
"""Largest number of a step, epoch or row. Smaller ones can be added and halved in 64 bits."""

_META: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("model", "backend", "policy", "status", "writer"), (str,)),
    **dict.fromkeys(("began", "written"), (int, float)),
    **dict.fromkeys(("format", "epochs", "steps_per_epoch", "base", "since"), (int, type(None))),
    "versions": (dict,),
    "budgets": (list,),
}
"""Types of the entries of `meta` that this version knows."""


def meta(found: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `meta` after checking the types of the known ones.

    Raises:
        ValueError: if a type is wrong.
    """
    for key, kinds in _META.items():
        value = found.get(key)
        if key in found and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise ValueError(f"its {key} is a {type(value).__name__}")
        if isinstance(value, int):
            whole(value)
        elif isinstance(value, float) and not abs(value) < MAX_WHOLE:
            raise ValueError(f"its {key} is {value}")
    return found


def whole(value: Any) -> int:
    """Return a whole number of moderate size.

    Raises:
        TypeError, ValueError: if it is not one.
    """
    found = int(value)
    if not -MAX_WHOLE <= found <= MAX_WHOLE:
        raise ValueError("it has a step number that is too large")
    return found


def bins(found: dict[str, Any]) -> dict[str, Any]:
    """Return bins whose counts can be added up.

    Raises:
        ValueError: if they cannot.
    """
    for name in ("count", "refused", "overflows", "undone"):
        if (found[name] < 0).any() or (found[name] > MAX_WHOLE >> 20).any():
            raise ValueError(f"the table bins has a {name} that cannot be")
    return found


def table(text: str) -> dict[str, Any]:
    """Return an object from JSON.

    Raises:
        ValueError: if it is not an object.
    """
    found = plain_json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("the data of an event is not an object")
    return found


def steps(text: str) -> tuple[int, ...]:
    """Return a list of steps from JSON.

    Raises:
        TypeError, ValueError: if it is not one.
    """
    return tuple(whole(step) for step in plain_json.loads(text))
