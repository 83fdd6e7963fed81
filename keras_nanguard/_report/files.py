"""Files of incidents and bad samples: written by a guard, read by the command line. Nothing in them
is executed."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from keras_nanguard._core import atomic_files, plain_values
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.incident import BUNDLES, FORMAT, Incident
from keras_nanguard._core.plain_values import one_line, plain_text
from keras_nanguard._recording import database
from keras_nanguard._recording.recording import BadSample, Recording, incidents as incidents_of
from keras_nanguard._report import html
from keras_nanguard._report.shown import ShownRun

T = TypeVar("T")

MAX_BYTES = 256 << 20
"""Maximum size of a file that is read."""

_SQLITE = Path(database.NAME).suffix

SAMPLE_COLUMNS = ("label", "index", "times", "steps", "reason", "fingerprint")
"""The header of a table of bad samples."""

_BUNDLES = ("incident.json", "*/incident.json", f"{BUNDLES}/*/incident.json")

_REMEDY = (
    "Pass a .json or .jsonl file that guard.report(path) wrote, a recording (.sqlite), "
    "or the directory that was given to NanGuard."
)


def write(run: ShownRun, path: str | os.PathLike[str]) -> Path:
    """Write the incidents of a run to a file atomically, and return its path.

    Args:
        run: the run.
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
    with atomic_files.beside(Path(os.path.realpath(path))) as unfinished:
        unfinished.write_bytes(text.encode("utf-8", "replace"))
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


def read(path: str | os.PathLike[str]) -> ShownRun:
    """Read a run: its incidents, and its recording if there is one.

    Args:
        path: the directory of a guard, a recording, a `.json` or `.jsonl` file of `write`, a
            bundle, or a folder of bundles.

    Raises:
        GuardError: if there is no such file, or it contains something else.
    """
    name, path = os.fspath(path), Path(path)
    if path.is_dir():
        return replace(_of_folder(path), directory=path, name=name)
    if path.suffix.lower() == _SQLITE:
        return replace(_of_recording(path), name=name)
    if path.suffix.lower() == ".html" and path.is_file():
        remedy = f"Open it in a browser. {_REMEDY}"
        raise GuardError(expected("a file of incidents", f"{str(path)!r}, a finished page", remedy))
    return ShownRun(_of_text(path), name=name)


def _of_folder(path: Path) -> ShownRun:
    """Return the incidents of a run, from its recording, and of other bundles.

    If one of these files cannot be read, the report is made from the others.
    """
    sources = [file for file in (path / database.NAME,) if file.is_file()]
    problems: list[GuardError] = []
    found = next((run for file in sources for run in _tried(read, file, problems)), ShownRun())
    listed = {Path(incident.bundle).name for incident in found.incidents if incident.bundle}
    files = {file for pattern in _BUNDLES for file in path.glob(pattern) if file.is_file()}
    files = {file for file in files if file.parent.name not in listed}
    if not files and not sources:
        wanted = "the directory of a guard, or a folder with bundles"
        raise GuardError(expected(wanted, f"{str(path)!r}, which contains neither", _REMEDY))
    known = len(problems) < len(sources)
    read_all = [own for file in sorted(files) for own in _tried(_of_text, file, problems)]
    if problems and not (known or read_all):
        raise problems[0]
    bundled = [incident for own in read_all for incident in own]
    bundled.sort(key=lambda incident: incident.step)
    unread = [f"Not read: {one_line(error)}" for error in problems]
    return replace(found, incidents=[*bundled, *found.incidents], unread=unread)


def _tried(read: Callable[[Path], T], file: Path, problems: list[GuardError]) -> Iterator[T]:
    """Yield what a file holds; if it cannot be read, append the error to `problems`."""
    try:
        yield read(file)
    except GuardError as error:
        problems.append(error)


def _of_recording(path: Path) -> ShownRun:
    """Return the run in a recording, which is empty until its first transaction."""
    if not path.exists():
        raise GuardError(expected("a readable report", f"{str(path)!r}: no such file", _REMEDY))
    with _expecting("a recording of incidents", path):
        recording = Recording.read(path) if path.stat().st_size else Recording()
        return ShownRun([incident for incident, _ in incidents_of(recording)], recording)


def _of_text(path: Path) -> list[Incident]:
    with _expecting("a readable report", path):
        if path.exists() and not path.is_file():  # a pipe would block
            raise ValueError("neither a file nor a folder")
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    with _expecting("JSON", path):
        if path.suffix.lower() == ".jsonl":
            entries = [plain_values.loads(line) for line in text.split("\n") if line.strip()]
        else:
            document = plain_values.loads(text)
            listed = document.get("incidents") if isinstance(document, dict) else None
            entries = listed if isinstance(listed, list) else [document]
    with _expecting("an incident", path):
        return [Incident.from_dict(entry) for entry in entries]


@contextmanager
def _expecting(what: str, path: Path) -> Iterator[None]:
    """Convert any exception of a damaged or missing file to a `GuardError` with the expected
    content.
    """
    try:
        yield
    except GuardError:
        raise
    except (OSError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or plain_text(error)
        if isinstance(error, UnicodeDecodeError):
            reason = "not a text file"
        raise GuardError(expected(what, f"{str(path)!r}: {reason}", _REMEDY)) from error
