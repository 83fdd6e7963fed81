"""The one definition of "finite": counts, and sums that are finite exactly when what they sum over is.

A sum (or a sum of squares) of finite numbers is finite unless it overflows; a sum with one NaN or Inf in it never is:
NaN and Inf absorb every addition, and Inf - Inf is NaN. So one pass that reads a tensor once, with no comparison and no
temporary, tells whether a precise look is needed. ``max(|x|)`` would not do: several backends drop NaN there.

The host's half, in NumPy. Each backend has the same two sums in its own idiom beside its transaction.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["counts", "is_finite", "is_float", "largest", "widen"]

_FLOATS = frozenset(
    {
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
        "complex64",
        "complex128",
    }
)


_SMALL = 4096
"""Entries up to which comparing each of them is faster than setting up a dot product."""


def is_float(dtype: Any) -> bool:
    """Whether values of this dtype (a name, as Keras writes it) can be NaN or Inf."""
    return str(dtype) in _FLOATS


def widen(array: Any) -> np.ndarray[Any, Any]:
    """Return the array in a dtype in which NumPy can count: ml_dtypes (bfloat16, float8) and float16 as float32."""
    array = np.asarray(array)
    if array.dtype.kind == "V" or array.dtype == np.float16 or array.dtype.name.startswith(("bfloat", "float8")):
        wide: np.ndarray[Any, Any] = array.astype(np.float32)
        return wide
    return np.asarray(array)


def is_finite(array: Any) -> bool:
    """Whether no entry is NaN or Inf; non-float arrays always are finite."""
    array = widen(array)
    if array.dtype.kind not in "fc" or array.size == 0:
        return True
    if array.size < _SMALL:
        return bool(np.isfinite(array).all())
    with np.errstate(all="ignore"):
        flat = np.ravel(array)
        if flat.dtype.kind == "f" and np.isfinite(np.dot(flat, flat)):
            return True
    return bool(np.isfinite(array).all())


def counts(array: Any) -> tuple[int, int, int]:
    """Return `(nan, inf, size)` of an array; dtypes that cannot hold NaN or Inf count as `(0, 0, size)`."""
    array = widen(array)
    if array.dtype.kind not in "fc":
        return 0, 0, int(array.size)
    return int(np.isnan(array).sum()), int(np.isinf(array).sum()), int(array.size)


def largest(array: Any) -> float:
    """Return the largest magnitude of an array that is finite, 0 for one that is empty or no float."""
    array = widen(array)
    return float(np.max(np.abs(array))) if array.dtype.kind in "fc" and array.size else 0.0
