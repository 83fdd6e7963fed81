"""Repair of one variable: which values are bad, and what replaces them, or why nothing does. Pure
functions."""

from __future__ import annotations

import math
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

_CONSTANTS = {"zeros": 0.0, "ones": 1.0}

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
        identity, location: names, role and place of the variable, as in a `Change`.
        values: the old values, of any float or complex dtype.
        options: how each role is repaired.
        initial, source: return initial values, and the good values of the source.
    """
    method = options.method(identity.role)
    bad = bad_values(values, identity, options)
    count = int(bad.sum())
    if not count:
        new: Values = "no single value is bad"
    elif method == "keep":
        new = f"unchanged: {options.remedy(identity.role)}".removesuffix(": ")
    elif method == "source":
        new = _whole(source(), values)
    else:
        found = np.full((), _CONSTANTS[method]) if method in _CONSTANTS else initial()
        new = found if isinstance(found, str) else _filled(found, values, bad)
    if not isinstance(new, str) and bad_values(new, identity, options).any():
        new = "the new values are bad too"
    if isinstance(new, str):
        return Change(identity.path, location, method, "skipped", new, count), None
    detail = f"{count} of {bad.size} values {_WORDS[method]}"
    return Change(identity.path, location, method, "done", detail, count), new


def _whole(good: Values, old: NDArray[Any]) -> Values:
    """Return the whole variable of the source: its values belong together."""
    if not isinstance(good, str) and good.shape != old.shape:
        return f"the source has the shape {good.shape} there"
    return good if isinstance(good, str) else good.astype(old.dtype)


def _filled(new: NDArray[Any], old: NDArray[Any], bad: NDArray[np.bool_]) -> NDArray[Any]:
    """Return the old values with the bad ones replaced."""
    result = old.copy(order="K")
    result[bad] = np.broadcast_to(new, old.shape)[bad].astype(old.dtype)
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
    wide = values if values.dtype.kind in "fc" else values.astype(np.float32)
    bound = options.limits.of(identity)
    with np.errstate(all="ignore"):
        bad = np.asarray(~np.isfinite(wide))
        if math.isfinite(bound):
            bad |= np.abs(wide) > np.float64(bound)
        if "variance" in identity.name or "stddev" in identity.name:
            bad |= wide.real < 0
    return bad
