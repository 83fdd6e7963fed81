"""Writes bad samples to a CSV file."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path

from keras_nanguard._core import atomic_files
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._recording.records import BadSample

__all__ = ["COLUMNS", "write"]

COLUMNS = ("label", "index", "times", "steps", "why", "fingerprint")
"""The header of the table."""


def write(samples: Sequence[BadSample], path: str | os.PathLike[str]) -> None:
    """Write bad samples to a `.csv` file atomically, one per row, with a header.

    Raises:
        GuardError: if the suffix is another one.
        OSError: if it cannot be written.
    """
    file = Path(path)
    if file.suffix.lower() != ".csv":
        received, remedy = repr(os.fspath(path)), 'Write guard.bad_samples("bad.csv").'
        raise GuardError(expected("a file that ends in .csv", received, remedy))
    with (
        atomic_files.beside(file) as unfinished,
        unfinished.open("w", newline="", encoding="utf-8") as opened,
    ):
        writer = csv.writer(opened)
        writer.writerow(COLUMNS)
        for one in samples:
            index = "" if one.index is None else one.index
            steps = " ".join(map(str, one.steps))
            writer.writerow((one.label, index, one.times, steps, one.why, one.fingerprint))
