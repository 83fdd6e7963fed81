"""The one definition of "finite": counts, and sums that are finite exactly when all of their terms
are.

A sum (or a sum of squares) of finite numbers is finite unless it overflows; a sum with a NaN or Inf
among its terms never is: NaN and Inf absorb every addition, and Inf - Inf is NaN. So one pass that
reads a tensor once, with no comparison and no temporary, decides whether exact counts are needed.
``max(|x|)`` is not suitable: several backends drop NaN there.

This is the NumPy implementation for the host. Each backend implements the same two sums next to its
transaction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_NATIVE = frozenset("fdbBhHiIlLqQ?")
"""Type codes of the dtypes that NumPy supports without conversion."""

_SMALL = 4096
"""Number of entries up to which comparing each of them is faster than a dot product."""

_MIN_EXACT = 1e-20
"""A sum of squares between this and its inverse has neither overflowed nor underflowed in
float32."""

_PIECE = 1 << 18
"""Number of entries that are checked at a time. More would need memory without being faster."""


def is_float(dtype: Any) -> bool:
    """Whether values of this dtype (a name, as Keras writes it) can be NaN or Inf: of a real or
    complex float of NumPy or `ml_dtypes`."""
    return str(dtype).startswith(("float", "bfloat", "complex"))


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of NumPy or of any backend, as Keras writes it."""
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def is_inexact(tensor: Any) -> bool:
    """Whether entries of this tensor, array or variable, of NumPy or of any backend, can be NaN or
    Inf; `False` for what has no dtype.
    """
    return is_float(dtype_name(getattr(tensor, "dtype", "")))


def is_real(dtype: Any) -> bool:
    """Whether a dtype of NumPy or of any backend is a real float."""
    name = dtype_name(dtype)
    return is_float(name) and not name.startswith("complex")


def named_dtype(name: str) -> np.dtype[Any] | None:
    """Return the dtype of a name, including those of `ml_dtypes`; `None` if there is none."""
    try:
        return np.dtype(name)
    except TypeError:
        pass
    if not is_float(name):
        return None
    import ml_dtypes  # only here, to keep `--help` and float32 files fast

    kind = getattr(ml_dtypes, name, None)
    return None if kind is None else np.dtype(kind)


@cache
def float_limits(dtype: str) -> tuple[float, float]:
    """Return the smallest normal and the largest number of a real float dtype; 0 and infinity for
    any other."""
    if not is_real(dtype):
        return 0.0, math.inf
    import ml_dtypes  # only here, to keep `--help` fast

    limits = ml_dtypes.finfo(dtype)
    return float(limits.smallest_normal), float(limits.max)


def widen(array: Any) -> Array:
    """Return the array in a dtype that NumPy computes with: ml_dtypes (bfloat16, float8) and
    float16 as float32."""
    known: Array = np.asarray(array)
    if known.dtype.char in _NATIVE:  # a type code is faster to read than the name of the dtype
        return known
    small = known.dtype.kind == "V" or known.dtype == np.float16
    small = small or known.dtype.name.startswith(("bfloat", "float8"))
    return known.astype(np.float32) if small else known


def is_finite(array: Any) -> bool:
    """Whether no entry is NaN or Inf; non-float arrays always are finite."""
    array = np.asarray(array)
    if array.size < _SMALL:
        array = widen(array)
        return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())
    with np.errstate(all="ignore"):
        sums = ((np.dot(piece, piece), piece) for piece in _pieces(array))
        return all(np.isfinite(total) or np.isfinite(piece).all() for total, piece in sums)


def counts(array: Any) -> tuple[int, int, int]:
    """Return `(nan, inf, size)` of an array, `(0, 0, size)` if its dtype holds neither."""
    array, nan, inf = np.asarray(array), 0, 0
    for piece in _pieces(array):
        nan += int(np.count_nonzero(np.isnan(piece)))
        inf += int(np.count_nonzero(np.isinf(piece)))
    return nan, inf, int(array.size)


def largest(array: Any) -> float:
    """Return the largest magnitude of a finite array, 0 if it is empty or not of a float dtype."""
    return max((float(np.abs(piece).max()) for piece in _pieces(array)), default=0.0)


def sizes(array: Array) -> tuple[float, float]:
    """Return the norm and the largest magnitude of an array."""
    wide = widen(array)
    if wide.dtype.kind not in "fc" or not wide.size:
        return 0.0, 0.0
    with np.errstate(all="ignore"):
        flat = wide.ravel()
        ends = (flat.max(), flat.min()) if flat.dtype.kind == "f" else flat
        largest = float(np.abs(ends).max())
        squares, unit = float(np.vdot(flat, flat).real), 1.0
        if not _MIN_EXACT < squares < 1.0 / _MIN_EXACT and 0.0 < largest < math.inf:
            scaled, unit = flat / largest, largest
            squares = float(np.vdot(scaled, scaled).real)
    norm = unit * math.sqrt(squares) if squares >= 0.0 else math.inf
    return (norm if math.isfinite(norm) else math.inf), largest


def _pieces(array: Any) -> Iterator[Array]:
    """Yield all entries of an array of a float dtype, widened, in pieces that are small enough to
    compute with in little memory.

    Arrays of other dtypes yield nothing, and no piece is empty. Entries come in the order in which
    they are stored, so none is copied.
    """
    array = np.asarray(array)
    if widen(array[:0] if array.ndim else array).dtype.kind in "fc" and array.size:
        pieces = np.nditer(array, ["external_loop", "buffered"], order="K", buffersize=_PIECE)
        yield from (widen(piece) for piece in pieces)
