"""The one definition of "finite": counts, and sums that are finite exactly when what they sum over is.

A sum (or a sum of squares) of finite numbers is finite unless it overflows; a sum with one NaN or Inf in it never is:
NaN and Inf absorb every addition, and Inf - Inf is NaN. So one pass that reads a tensor once, with no comparison and no
temporary, tells whether a precise look is needed. ``max(|x|)`` would not do: several backends drop NaN there.

The host's half, in NumPy. Each backend has the same two sums in its own idiom beside its transaction.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["counts", "fingerprint", "is_finite", "is_float", "largest", "widen"]

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


_NATIVE = frozenset("fdbBhHiIlLqQ?")
"""Type codes of the dtypes in which NumPy can count as they are."""

_SMALL = 4096
"""Entries up to which comparing each of them is faster than setting up a dot product."""

_WORDS = 256
"""Columns of the table of a fingerprint."""


def is_float(dtype: Any) -> bool:
    """Whether values of this dtype (a name, as Keras writes it) can be NaN or Inf."""
    return str(dtype) in _FLOATS


def widen(array: Any) -> np.ndarray[Any, Any]:
    """Return the array in a dtype in which NumPy can count: ml_dtypes (bfloat16, float8) and float16 as float32."""
    known: np.ndarray[Any, Any] = np.asarray(array)
    if known.dtype.char in _NATIVE:  # NumPy's own, whose long names take it longer than their numbers
        return known
    if known.dtype.kind == "V" or known.dtype == np.float16 or known.dtype.name.startswith(("bfloat", "float8")):
        return known.astype(np.float32)
    return known


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


def fingerprint(array: Any) -> np.ndarray[Any, Any]:
    """Return a few numbers that stay as they are only while every bit of the array does.

    The bits are laid out as a table of integers and added up by rows and by columns, which takes 0.4% of the room of a copy. The
    sums cannot overflow in a way that matters, and a change of less than four entries cannot leave both as they were.
    """
    flat = np.ravel(array)
    words = flat.view(np.dtype(f"u{min(flat.dtype.itemsize, 8)}"))
    whole = words.size - words.size % _WORDS if words.size >= _SMALL else 0
    table = words[:whole].reshape(-1, _WORDS)
    sums = [np.add.reduce(table, axis, dtype=table.dtype) for axis in (0, 1)]
    return np.concatenate([*sums, words[whole:]])
