"""Float dtypes by name, and the statistics of an array, computed in pieces. NumPy only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._files.problems import ArrayStats

__all__ = ["FLOAT16_MAX", "Tally", "float_name", "named_dtype", "statistics", "tiles"]

FLOAT16_MAX = 65504.0
"""Largest finite float16 (IEEE 754 binary16)."""

_PIECE_VALUES = 1 << 16
"""Number of values that are counted at once: 256 KiB of float32, which stay in the cache."""

_SMALL_FLOATS = ("bfloat16", "float8", "float6", "float4")


def named_dtype(name: str) -> np.dtype[Any] | None:
    """Return the dtype of a name, including those of `ml_dtypes`; `None` if there is none."""
    try:
        return np.dtype(name)
    except TypeError:
        pass
    if not name.startswith(_SMALL_FLOATS):
        return None
    import ml_dtypes  # only here, to keep `--help` and float32 files fast

    kind = getattr(ml_dtypes, name, None)
    return None if kind is None else np.dtype(kind)


def float_name(dtype: np.dtype[Any]) -> str | None:
    """Return the name of a float or complex dtype (`"float32"`, `"bfloat16"`), else `None`."""
    name = str(dtype.name)
    is_float = name.startswith(_SMALL_FLOATS) or (dtype.kind in "fc" and dtype.fields is None)
    return name if is_float else None


def tiles(shape: tuple[int, ...], tile: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield the indices of the tiles of a shape, which cover it once.

    Args:
        shape: shape of an array.
        tile: shape of a tile, such as a chunk of an HDF5 dataset.
    """
    grid = [range(0, length, max(1, step)) for length, step in zip(shape, tile, strict=True)]
    for corner in itertools.product(*grid):
        ends = (min(start + step, n) for start, step, n in zip(corner, tile, shape))
        yield tuple(slice(start, end) for start, end in zip(corner, ends))


def statistics(array: Any, limit: float | None = None) -> ArrayStats:
    """Return the statistics of an array in memory.

    Args:
        array: anything that NumPy can convert to an array of floats.
        limit: magnitude above which a finite value is counted as beyond the limit.
    """
    tally = Tally(limit)
    tally.add(np.asarray(array))
    return tally.result()


class Tally:
    """Accumulates the statistics of the pieces of one array.

    Args:
        limit: magnitude above which a finite value is counted as beyond the limit.

    Example:

        tally = Tally(limit=1e6)
        for piece in pieces:
            tally.add(piece)
        tally.result().nan
    """

    def __init__(self, limit: float | None = None):
        self._limit = math.inf if limit is None else float(limit)
        self._size = self._nan = self._posinf = self._neginf = 0
        self._zeros = self._denormals = self._beyond_float16 = self._beyond_limit = 0
        self._min, self._max, self._sum = math.inf, -math.inf, 0.0

    def add(self, piece: NDArray[Any]) -> None:
        """Count one piece (of any size, any shape and any float or complex dtype)."""
        flat = np.ascontiguousarray(piece).reshape(-1)
        if flat.dtype.kind == "c":
            flat = flat.view(flat.real.dtype)
        wide = _wide(flat.dtype)
        tiny = wide.type(_smallest_normal(flat.dtype))
        with np.errstate(all="ignore"):
            for start in range(0, flat.size, _PIECE_VALUES):
                self._add(flat[start : start + _PIECE_VALUES].astype(wide, copy=False), tiny)

    def _add(self, values: NDArray[Any], tiny: Any) -> None:
        # The minimum or maximum of values with a NaN is NaN, and an infinity is one of the two.
        self._size += values.size
        low, high = float(values.min()), float(values.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            values = self._finite(values)
            if values.size == 0:
                return
            low, high = float(values.min()), float(values.max())
        self._min, self._max = min(self._min, low), max(self._max, high)
        total = float(values.sum())
        self._sum += total if math.isfinite(total) else float(values.sum(dtype=np.float64))
        magnitudes = np.abs(values)
        if magnitudes.min() < tiny:
            zeros = int(np.count_nonzero(magnitudes == 0))
            self._zeros += zeros
            self._denormals += int(np.count_nonzero(magnitudes < tiny)) - zeros
        largest = max(-low, high)
        if largest > FLOAT16_MAX:
            self._beyond_float16 += int(np.count_nonzero(magnitudes > FLOAT16_MAX))
        if largest > self._limit:
            self._beyond_limit += int(np.count_nonzero(magnitudes > np.float64(self._limit)))

    def _finite(self, values: NDArray[Any]) -> NDArray[Any]:
        """Count NaN and Inf, and return the other values."""
        self._nan += int(np.count_nonzero(np.isnan(values)))
        self._posinf += int(np.count_nonzero(values == np.inf))
        self._neginf += int(np.count_nonzero(values == -np.inf))
        finite: NDArray[Any] = values[np.isfinite(values)]
        return finite

    def result(self) -> ArrayStats:
        """Return the statistics of all pieces so far."""
        counts = (self._size, self._nan, self._posinf, self._neginf, self._zeros, self._denormals)
        beyond = (self._beyond_float16, self._beyond_limit)
        finite = self._size - self._nan - self._posinf - self._neginf
        if not finite:
            return ArrayStats(*counts, *beyond)
        mean = min(max(self._sum / finite, self._min), self._max)
        return ArrayStats(*counts, *beyond, self._min, self._max, mean)


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the native float type in which NumPy counts the values of a dtype exactly."""
    if dtype.kind == "f" and dtype.itemsize >= 4:
        return dtype.newbyteorder("=")
    return np.dtype(np.float32)


@cache
def _smallest_normal(dtype: np.dtype[Any]) -> float:
    if dtype.kind == "f" and dtype.name.startswith("float") and dtype.itemsize > 1:
        return float(np.finfo(dtype).smallest_normal)
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).smallest_normal)
