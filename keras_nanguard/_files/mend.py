"""Repair of one variable: which values are bad, and their replacements, or why there are none. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._files.judge import STATISTICS_LIMIT

__all__ = ["CHOICES", "Change", "Choices", "Limits", "bad_values", "repaired_values"]

CHOICES: Mapping[str, tuple[str, ...]] = {
    "statistics": ("initial", "source", "keep"),
    "weights": ("initial", "zeros", "ones", "source", "keep"),
    "slots": ("reset", "source", "keep"),
}
"""The methods of repair, by role."""

_FIELDS = {"statistics": "statistics", "weight": "weights", "slot": "slots"}


_PIECE_VALUES = 1 << 20
"""Number of values per piece, so that no float64 copy of a large array is needed."""


class Limits(TypedDict):
    """The limits beyond which a value is bad, as keyword arguments of `scan`."""

    limit: float | None
    statistics_limit: float


@dataclass(frozen=True, slots=True)
class Choices:
    """How each role is repaired.

    Attributes:
        statistics: `"initial"`: bad values are replaced by initial values; `"source"`: the whole variable comes from
            the good file; `"keep"`: nothing is done.
        weights: the same, or bad values are replaced by 0 (`"zeros"`) or 1 (`"ones"`).
        slots: `"reset"`: all slots of an optimizer with a bad one are reset.
        statistics_limit: magnitude above which a moving statistic is bad.
        limit: magnitude above which any value is bad, or `None`.
    """

    statistics: str = "initial"
    weights: str = "keep"
    slots: str = "reset"
    statistics_limit: float = STATISTICS_LIMIT
    limit: float | None = None

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise GuardError(expected(f"one of {', '.join(allowed)}", f"{name}={value!r}", "Choose one."))

    @property
    def limits(self) -> Limits:
        """The limits, as `scan` takes them."""
        return {"limit": self.limit, "statistics_limit": self.statistics_limit}

    def remedy(self, role: str) -> str:
        """Return which arguments replace the bad values of a role, `""` if none do."""
        if role not in _FIELDS:
            return ""
        field = _FIELDS[role]
        others = [f"{field}={value!r}" for value in CHOICES[field] if value not in ("keep", "source")]
        return f"choose {' or '.join(others)}, or name a source"

    def method(self, role: str) -> str:
        """Return the method for a role; a variable that is neither weight, statistic nor slot is kept."""
        return str(getattr(self, _FIELDS[role])) if role in _FIELDS else "keep"


@dataclass(frozen=True, slots=True)
class Change:
    """The repair of one variable, done or planned.

    Attributes:
        path: path of the variable.
        location: Keras path of the variable, or its place in the file.
        method: `"initial"`, `"zeros"`, `"ones"`, `"source"`, `"reset"` or `"keep"`.
        status: `"done"` or `"skipped"`, as in an `Outcome`.
        detail: what was changed, or why nothing was.
        count: number of values that were bad.
    """

    path: str
    location: str
    method: str
    status: str
    detail: str
    count: int = 0


def bad_values(values: NDArray[Any], name: str, role: str, layer_class: str, choices: Choices) -> NDArray[np.bool_]:
    """Return which values of a variable are bad.

    Args:
        values: the variable, of any float or complex dtype.
        name: its name within its layer.
        role: its role.
        layer_class: class of its layer.
        choices: the limits.

    Returns:
        Mask of the shape of `values`: non-finite, beyond a limit, or a negative variance.
    """
    bad = np.empty(values.shape, np.bool_)
    flat, found = values.reshape(-1), bad.reshape(-1)
    for start in range(0, flat.size, _PIECE_VALUES):
        part = slice(start, start + _PIECE_VALUES)
        found[part] = _bad_values(flat[part], name, role, layer_class, choices)
    return bad


def _bad_values(piece: NDArray[Any], name: str, role: str, layer_class: str, choices: Choices) -> NDArray[np.bool_]:
    values = piece if piece.dtype.kind == "c" else piece.astype(np.float64)
    with np.errstate(all="ignore"):
        magnitude = np.abs(values)
        bad: NDArray[np.bool_] = ~np.isfinite(values)
        if role == "statistics" and layer_class != "Normalization":
            bad |= magnitude > choices.statistics_limit
        if choices.limit is not None:
            bad |= magnitude > choices.limit
        if "variance" in name or "stddev" in name:
            bad |= values.real < 0
    return bad


def repaired_values(
    values: NDArray[Any], bad: NDArray[np.bool_], method: str, first: NDArray[Any] | str, donor: NDArray[Any] | str, remedy: str = ""
) -> NDArray[Any] | str:
    """Return the repaired values in the dtype of the old ones, or the reason why there are none.

    Args:
        values: the old values.
        bad: which of them are bad.
        method: one of `CHOICES`.
        first: initial values of the variable, or why there are none.
        donor: the variable in the good file, or why there is none.
        remedy: how to replace it, for the method `"keep"`.

    Returns:
        The donor for `"source"`, otherwise the old values with the bad ones replaced.
    """
    if method == "keep":
        return f"unchanged: {remedy}" if remedy else "unchanged"
    if method == "source":
        if isinstance(donor, str):
            return donor
        return donor.astype(values.dtype).reshape(values.shape)
    new: NDArray[Any] | str = {"zeros": np.zeros(()), "ones": np.ones(())}.get(method, first)
    if isinstance(new, str):
        return new
    result = values.copy()
    result[bad] = np.broadcast_to(new, values.shape)[bad].astype(values.dtype)
    return result
