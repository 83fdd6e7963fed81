"""Checks every value of an open file or of a live model, in pieces: the statistics of each
variable, and their problems."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._files.live import live_variables
from keras_nanguard._files.names import Identity, identities
from keras_nanguard._files.opening import opened
from keras_nanguard._files.problems import ArrayStats, Limits, find_problems, problem
from keras_nanguard._files.reading import Progress
from keras_nanguard._files.reports import ScannedVariable, ScanReport
from keras_nanguard._files.stored import (
    PARSE_ERRORS,
    Contents,
    StoredArray,
    float_name,
    named_dtype,
    plain_text,
)

FLOAT16_MAX = 65504.0
"""Largest finite float16 (IEEE 754 binary16)."""

_PIECE_VALUES = 1 << 16
"""Number of values that are counted at once: 256 KiB of float32, which stay in the cache."""


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


def scan_model(model: Any, limits: Limits) -> ScanReport:
    """Scan a live model.

    Raises:
        GuardError: if it is not a built model.
    """
    variables = []
    for live in live_variables(model):
        kind = named_dtype(live.dtype)
        pieces = [live.read()] if kind is not None and float_name(kind) else None
        float16 = getattr(live.layer, "compute_dtype", "") == "float16"
        about = (live.keras_path, live.dtype, live.shape)
        variables.append(_scanned(live.identity, about, pieces, limits, float16))
    return ScanReport(str(model.name), "model", tuple(variables))


def scan_file(path: str, progress: Progress, limits: dict[str, Any]) -> dict[str, Any]:
    """Return kind, notes and variables of a file, plain JSON values.

    Args:
        path: any model file.
        progress: called with the number of bytes read so far and of all bytes.
        limits: a `Limits` as a dict.
    """
    with opened(path) as contents:
        return scan_contents(contents, progress, Limits(**limits))[0]


def scan_contents(
    contents: Contents, progress: Progress, limits: Limits
) -> tuple[dict[str, Any], tuple[ScannedVariable, ...]]:
    """Scan an open file; return plain JSON values as `scan_file`, and the bad variables."""
    done, total, variables = 0, sum(array.nbytes for array in contents.arrays), []
    for array, who in zip(contents.arrays, identities(contents), strict=True):
        variables.append(_stored(array, who, limits))
        done += array.nbytes
        progress(done, total)
    plain = [asdict(variable) for variable in variables]
    found = {"kind": contents.kind, "notes": contents.notes, "variables": plain}
    return found, ScanReport("", contents.kind, tuple(variables)).bad


def _stored(array: StoredArray, who: Identity, limits: Limits) -> ScannedVariable:
    about, reason = (array.location, array.dtype, array.shape), array.unread
    if not reason:
        try:
            pieces = array.pieces() if array.is_float else None
            return _scanned(who, about, pieces, limits, _in_float16(who))
        except PARSE_ERRORS as error:
            reason = plain_text(str(error).strip() or type(error).__name__, 200)
    unread = (problem("unread", reason=reason),)
    return ScannedVariable(who.path, who.layer, who.name, who.role, *about, problems=unread)


def _scanned(
    who: Identity,
    about: tuple[str, str, tuple[int, ...]],
    pieces: Iterable[NDArray[Any]] | None,
    limits: Limits,
    float16: bool,
) -> ScannedVariable:
    """Scan one variable.

    Args:
        who, about: its names and role; its location, dtype and shape.
        pieces: its values, or `None` if they are no floats.
        limits, float16: see `find_problems`.
    """
    own = (who.path, who.layer, who.name, who.role, *about)
    if pieces is None:
        return ScannedVariable(*own)
    tally = Tally(limits.of(who))
    for piece in pieces:
        tally.add(piece)
    found = tally.result()
    problems = find_problems(who, found, limits, rank=len(about[2]), float16=float16)
    return ScannedVariable(*own, found, problems)


def _in_float16(who: Identity) -> bool:
    policy = who.settings.get("dtype")
    named = policy.get("config") if isinstance(policy, Mapping) else None
    name = named.get("name") if isinstance(named, Mapping) else policy
    return name in ("float16", "mixed_float16")
