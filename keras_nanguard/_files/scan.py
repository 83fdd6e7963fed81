"""`scan`: finds every non-finite or out-of-range value in a live model or in a file, grouped by
layer, worst first."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._files import reading
from keras_nanguard._files.problems import STATISTICS_LIMIT, Limits
from keras_nanguard._files.reading import Progress
from keras_nanguard._files.reports import ScanReport, variable_of


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
        return report_of(path, reading.ask("scan", path, progress, limits=asdict(limits)))
    from keras_nanguard._files.scanner import scan_model  # with NumPy

    return scan_model(model_or_path, limits)


def report_of(path: str, found: dict[str, Any]) -> ScanReport:
    """Return the report of a file from what `scanner.scan_file` has found in it."""
    variables = tuple(map(variable_of, found["variables"]))
    return ScanReport(plain_text(path), found["kind"], variables, tuple(found["notes"]))
