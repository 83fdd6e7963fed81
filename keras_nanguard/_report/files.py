"""The files of reports: incidents and bad samples are written, the recording of a run is read.
Nothing in it is executed."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from keras_nanguard._core import atomic_files
from keras_nanguard._core.errors import FileFormatError, GuardError, expected
from keras_nanguard._core.incident import BUNDLES, FORMAT, Incident
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._recording import database
from keras_nanguard._recording.recording import BadSample, Recording, incidents as incidents_of
from keras_nanguard._report import html
from keras_nanguard._report.reported_run import ReportedRun

SAMPLE_COLUMNS = ("label", "index", "times", "steps", "reason", "fingerprint")
"""The header of a table of bad samples."""


def write(run: ReportedRun, path: str | os.PathLike[str]) -> Path:
    """Write the incidents of a run to a file atomically, and return its path.

    Args:
        path: ends in `.json` (one object with a format version), `.jsonl` (one incident per line)
            or `.html`.

    Raises:
        GuardError: for another suffix.
        OSError: if it cannot be written, such as `FileNotFoundError` if its folder is missing; it
            names `path`.
    """
    path = Path(path)
    document = {"format": FORMAT, "incidents": list(run.incidents)}
    texts: dict[str, Callable[[], str]] = {
        ".json": lambda: json.dumps(document, indent=2, default=Incident.to_dict),
        ".jsonl": lambda: "".join(f"{incident.to_json()}\n" for incident in run.incidents),
        ".html": lambda: html.page(run),
    }
    kind = path.suffix.lower()
    if kind not in texts:
        wanted = "a path that ends in .json, .jsonl or .html"
        raise GuardError(expected(wanted, f"path={str(path)!r}", "Choose one of them."))
    return save(texts[kind](), path)


def save(text: str, path: Path) -> Path:
    """Write a text to a file atomically, and return its path.

    Raises:
        OSError: if it cannot be written; it names `path`.
    """
    atomic_files.write_text(Path(os.path.realpath(path)), text)
    return path


def write_samples(samples: Sequence[BadSample], path: str | os.PathLike[str]) -> None:
    """Write bad samples to a `.csv` file atomically, one per row, with a header.

    Raises:
        GuardError: if the suffix is another one.
        OSError: if it cannot be written.
    """
    path = Path(path)
    if path.suffix.lower() != ".csv":
        received, remedy = repr(os.fspath(path)), 'Write guard.bad_samples("bad.csv").'
        raise GuardError(expected("a file that ends in .csv", received, remedy))
    table = io.StringIO()
    writer = csv.DictWriter(table, SAMPLE_COLUMNS)
    writer.writeheader()
    for one in samples:
        writer.writerow({**one.to_dict(), "steps": " ".join(map(str, one.steps))})
    save(table.getvalue(), path)


def is_empty(directory: Path) -> bool:
    """Whether a run has written nothing yet: neither into its recording nor a bundle."""
    file = directory / database.NAME
    recorded = file.is_file() and file.stat().st_size > 0
    return not recorded and not any((directory / BUNDLES).glob("*"))


def read(path: str | os.PathLike[str]) -> ReportedRun:
    """Read a run from its recording. In a directory that is empty until its first transaction.

    Args:
        path: the directory of a guard, or a recording.

    Raises:
        GuardError: if there is no recording, or it cannot be read.
    """
    directory = Path(path) if os.path.isdir(path) else None
    file = Path(path) if directory is None else directory / database.NAME
    empty = directory is not None and file.is_file() and is_empty(directory)
    recording = Recording() if empty else Recording.read(file)
    try:
        found = [incident for incident, _ in incidents_of(recording)]
    except FileFormatError as error:
        received = f"{str(file)!r}: {plain_text(error)}"
        remedy = "Read it with the version that wrote it."
        raise GuardError(expected("a recording of incidents", received, remedy)) from error
    return ReportedRun(found, recording, directory, os.fspath(path))
