"""`scan`: finds every non-finite or out-of-range value in a live model or in a file, in pieces.

Imports no backend, and of a file only what another process has read of it.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core.plain_values import first_line, plain_text
from keras_nanguard._files import isolated
from keras_nanguard._files.formats.contents import Contents, ModelArray
from keras_nanguard._files.formats.limits import PARSE_ERRORS
from keras_nanguard._files.isolated import Progress
from keras_nanguard._files.problems import (
    STATISTICS_LIMIT,
    ArrayStats,
    Limits,
    Problem,
    find_problems,
    problem,
)
from keras_nanguard._files.reports import ScannedVariable, ScanReport, report_of

FLOAT16_MAX = 65504.0
"""Largest finite float16 (IEEE 754 binary16)."""

_PIECE_VALUES = 1 << 16
"""Number of values that are counted at once: 256 KiB of float32, which stay in the cache."""


def scan(
    model_or_path: Any,
    *,
    limit: float | None = None,
    statistics_limit: float = STATISTICS_LIMIT,
    progress: Progress | None = None,
) -> ScanReport:
    """Check every value of a live model or of a file.

    A file is read in pieces, without building the model or importing a backend, so it may be larger
    than memory.

    Args:
        model_or_path: a built Keras model, or the path of a `.keras`, `.weights.h5`, legacy `.h5`,
            `.npz` file, the index of sharded weights, or an Orbax checkpoint.
        limit: magnitude that no value may exceed; `None` for no limit.
        statistics_limit: magnitude that no moving statistic may exceed.
        progress: called with the number of bytes read so far and of all bytes.

    Returns:
        The report.

    Raises:
        FileFormatError: if the file is missing, truncated, malicious or of another format.
        GuardError: if it is neither a built model nor a path, or a limit is not a positive number.

    Example:

        report = scan("model.keras")
        if not report.ok:
            print(report)
    """
    limits = Limits(limit, statistics_limit)
    if isinstance(model_or_path, (str, os.PathLike)):
        path = os.fsdecode(model_or_path)
        return report_of(isolated.run_in_subprocess("scan", path, progress, limits=asdict(limits)))
    from keras_nanguard._files.live import live_contents

    return scan_contents(live_contents(model_or_path), limits)


def scan_contents(
    contents: Contents, limits: Limits, progress: Progress | None = None
) -> ScanReport:
    """Return the report of a live model or of an open file; for `progress` see `scan`."""
    done, total, variables = 0, sum(array.nbytes for array in contents.arrays), []
    for array in contents.arrays:
        variables.append(_scanned(array, limits))
        done += array.nbytes
        if progress is not None:
            progress(done, total)
    return ScanReport(contents.source, contents.kind, tuple(variables), tuple(contents.notes))


def _scanned(array: ModelArray, limits: Limits) -> ScannedVariable:
    who, reason, found = array.who, array.unread, None
    problems: tuple[Problem, ...] = ()
    if array.is_float:
        try:
            found = statistics(array.pieces(), limits.of(who))
            problems = find_problems(array, found, limits)
        except PARSE_ERRORS as error:
            reason = first_line(error)
    if reason:
        problems = (problem("unread", reason=reason),)
    path, layer, name, location = map(plain_text, (who.path, who.layer, who.name, array.location))
    about = (location, array.dtype, array.shape)
    return ScannedVariable(path, layer, name, who.role, *about, found, problems)


def statistics(pieces: Iterable[Any], limit: float | None = None) -> ArrayStats:
    """Return the statistics of an array.

    Args:
        pieces: its parts, of any size, any shape and any float or complex dtype.
        limit: magnitude above which a finite value is counted as beyond the limit.
    """
    counts: Counter[str] = Counter()
    smallest, largest, mean, finite = math.inf, -math.inf, 0.0, 0
    with np.errstate(all="ignore"):
        for values in _blocks(pieces):
            # The minimum or maximum of values with a NaN is NaN, and an infinity is one of the two.
            counts["size"] += values.size
            low, high = float(values.min()), float(values.max())
            if not (math.isfinite(low) and math.isfinite(high)):
                counts["nan"] += int(np.count_nonzero(np.isnan(values)))
                counts["posinf"] += int(np.count_nonzero(values == np.inf))
                counts["neginf"] += int(np.count_nonzero(values == -np.inf))
                values = values[np.isfinite(values)]
                if not values.size:
                    continue
                low, high = float(values.min()), float(values.max())
            smallest, largest = min(smallest, low), max(largest, high)
            total = float(values.sum())
            if math.isfinite(total):
                added = total / values.size
            else:  # the sum overflows; their mean never does
                added = min(max(float((values / values.size).sum()), low), high)
            finite += values.size
            share = values.size / finite
            mean = (1.0 - share) * mean + share * added
            if low <= 0 <= high:
                counts["zeros"] += values.size - int(np.count_nonzero(values))
            bounds = {"beyond_float16": FLOAT16_MAX, "beyond_limit": limit}
            for name, bound in bounds.items():
                if bound is not None and max(-low, high) > bound:
                    counts[name] += int(np.count_nonzero(np.abs(values) > np.float64(bound)))
    if not finite:
        return ArrayStats(**counts)
    mean = min(max(mean, smallest), largest)
    return ArrayStats(**counts, min=smallest, max=largest, mean=mean)


def _blocks(pieces: Iterable[Any]) -> Iterator[NDArray[Any]]:
    """Yield the values in blocks, in the native float type in which NumPy counts them exactly."""
    for piece in pieces:
        flat = np.ascontiguousarray(piece).reshape(-1)
        if flat.dtype.kind == "c":
            flat = flat.view(flat.real.dtype)
        is_wide = flat.dtype.kind == "f" and flat.dtype.itemsize >= 4
        wide = flat.dtype.newbyteorder("=") if is_wide else np.dtype(np.float32)
        for start in range(0, flat.size, _PIECE_VALUES):
            yield flat[start : start + _PIECE_VALUES].astype(wide, copy=False)
