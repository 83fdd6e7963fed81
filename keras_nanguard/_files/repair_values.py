"""Repair of one variable: which values are bad, and what replaces them, or why nothing does. Pure
functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._files.names import Identity
from keras_nanguard._files.repair_options import RepairOptions
from keras_nanguard._files.reports import Change

__all__ = ["Values", "bad_values", "repaired"]

Values = NDArray[Any] | str
"""The values of a variable, or the reason why there are none."""

_PIECE_VALUES = 1 << 20
"""Number of values per piece, so that no float64 copy of a large array is needed."""

_WORDS = {
    "initial": "set to initial values",
    "zeros": "set to 0",
    "ones": "set to 1",
    "source": "were bad: the variable was taken from the source",
}
"""What each method does."""


def repaired(
    identity: Identity,
    location: str,
    values: NDArray[Any],
    options: RepairOptions,
    initial: Callable[[], Values],
    source: Callable[[], Values],
) -> tuple[Change, NDArray[Any] | None]:
    """Return the repair of a variable and its new values in the dtype of the old ones, `None` if it
    is not repaired.

    Args:
        identity: names and role of the variable.
        location: its Keras path, or its place in the file.
        values: the old values, of any float or complex dtype.
        options: how each role is repaired.
        initial: returns initial values.
        source: returns the good values of the source.
    """
    method = options.method(identity.role)
    bad = bad_values(values, identity, options)
    count = int(bad.sum())
    new = _replaced(values, bad, method, initial, source, options.remedy(identity.role))
    if not isinstance(new, str) and bad_values(new, identity, options).any():
        new = "the new values are bad too"
    if isinstance(new, str):
        return Change(identity.path, location, method, "skipped", new, count), None
    detail = f"{count} of {bad.size} values {_WORDS[method]}"
    return Change(identity.path, location, method, "done", detail, count), new


def _replaced(
    values: NDArray[Any],
    bad: NDArray[np.bool_],
    method: str,
    initial: Callable[[], Values],
    source: Callable[[], Values],
    remedy: str,
) -> Values:
    if not bad.any():
        return "no single value is bad"
    if method == "keep":
        return f"unchanged: {remedy}" if remedy else "unchanged"
    if method == "source":
        good = source()
        if not isinstance(good, str) and good.shape != values.shape:
            return f"the source has the shape {good.shape} there"
        return good if isinstance(good, str) else good.astype(values.dtype)
    constants = {"zeros": 0.0, "ones": 1.0}
    new = np.full((), constants[method]) if method in constants else initial()
    if isinstance(new, str):
        return new
    result = values.copy()
    result[bad] = np.broadcast_to(new, values.shape)[bad].astype(values.dtype)
    return result


def bad_values(
    values: NDArray[Any], identity: Identity, options: RepairOptions
) -> NDArray[np.bool_]:
    """Return which values of a variable are bad.

    Args:
        values: the variable, of any float or complex dtype.
        identity: its names and role.
        options: the limits.

    Returns:
        Mask of the shape of `values`: non-finite, beyond a limit, or a negative variance.
    """
    bad = np.empty(values.shape, np.bool_)
    flat, found = values.reshape(-1), bad.reshape(-1)
    for start in range(0, flat.size, _PIECE_VALUES):
        part = slice(start, start + _PIECE_VALUES)
        found[part] = _bad_values(flat[part], identity, options)
    return bad


def _bad_values(
    piece: NDArray[Any], identity: Identity, options: RepairOptions
) -> NDArray[np.bool_]:
    values = piece if piece.dtype.kind == "c" else piece.astype(np.float64)
    with np.errstate(all="ignore"):
        magnitude = np.abs(values)
        bad: NDArray[np.bool_] = ~np.isfinite(values)
        if identity.role == "statistics" and identity.layer_class != "Normalization":
            bad |= magnitude > options.statistics_limit
        if options.limit is not None:
            bad |= magnitude > options.limit
        if "variance" in identity.name or "stddev" in identity.name:
            bad |= values.real < 0
    return bad
