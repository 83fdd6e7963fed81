"""Files of incidents: written by a guard, read by the command line. They contain only data; nothing in them is executed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from keras_nanguard._core import atomic_files, plain_json
from keras_nanguard._core.errors import FileFormatError, GuardError, expected
from keras_nanguard._core.incident import FORMAT, Incident
from keras_nanguard._core.plain_text import plain_text
from keras_nanguard._recording import database
from keras_nanguard._recording.recording import Recording
from keras_nanguard._report import console, html, log, recorded_incidents

__all__ = ["read", "recorded", "save", "without_removed_bundles", "write"]

MAX_BYTES = 256 << 20
"""Maximum size of a file that is read."""

_RECORDING = Path(database.NAME).suffix


def write(
    incidents: Sequence[Incident],
    head: str,
    path: str | os.PathLike[str],
    recording: Recording | None = None,
    directory: str | os.PathLike[str] | None = None,
) -> Path:
    """Write incidents to a file atomically, and return its path.

    Args:
        incidents: the incidents.
        head: lines before the incidents in Markdown and HTML.
        path: ends in `.json` (one object with a format version), `.jsonl` (one incident per line),
            `.md` or `.html`.
        recording: the recording of the run, for HTML.
        directory: the directory of the run, for the bundles in HTML.

    Raises:
        GuardError: for another suffix.
        OSError: if it cannot be written, such as `FileNotFoundError` if its folder is missing; it
            names `path`.
    """
    path = Path(path)
    texts: dict[str, Callable[[], str]] = {
        ".json": lambda: json.dumps({"format": FORMAT, "incidents": [i.to_dict() for i in incidents]}, indent=2),
        ".jsonl": lambda: "".join(i.to_json() + "\n" for i in incidents),
        ".md": lambda: console.markdown(incidents, head),
        ".html": lambda: html.page(recording or Recording(), incidents, head, directory),
    }
    if path.suffix not in texts:
        raise GuardError(expected("a path that ends in .json, .jsonl, .md or .html", f"path={str(path)!r}", "Choose one of them."))
    return save(texts[path.suffix](), path)


def save(text: str, path: Path) -> Path:
    """Write a text to a file atomically, and return its path.

    Raises:
        OSError: if it cannot be written; it names `path`.
    """
    with atomic_files.beside(Path(os.path.realpath(path))) as unfinished:
        unfinished.write_text(text, encoding="utf-8", errors="replace")
    return path


def recorded(path: str | os.PathLike[str]) -> Recording:
    """Return the recording in the directory of a run, or in a file `.sqlite`; an empty one if there
    is none yet.

    Raises:
        GuardError: if it is damaged or of a newer version.
    """
    file = database.path_of(path)
    return Recording.read(file) if file.suffix == _RECORDING and _is_made(file) else Recording()


def _is_made(file: Path) -> bool:
    """Whether a recording has its tables, which a run creates at its beginning."""
    try:
        with file.open("rb") as opened:
            head = opened.read(100)
    except OSError:
        return file.exists()  # reading it says why
    application, version = head[68:72], head[60:64]
    return bool(head) and not (application == database.APPLICATION.to_bytes(4, "big") and not any(version))


def without_removed_bundles(incidents: Iterable[Incident], newest: str) -> list[Incident]:
    """Return incidents, with `bundle=None` for those whose bundle was removed."""
    folder = os.path.dirname(newest)
    try:
        there = {os.path.join(folder, name) for name in os.listdir(folder)}
    except OSError:
        return list(incidents)
    gone = (i.bundle is not None and os.path.dirname(i.bundle) == folder and i.bundle not in there for i in incidents)
    return [i.with_(bundle=None) if removed else i for i, removed in zip(incidents, gone)]


def read(path: str | os.PathLike[str]) -> list[Incident]:
    """Read incidents from the directory of a guard, a `.json` or `.jsonl` file of `write`, a bundle, a folder of bundles, or a recording.

    Raises:
        GuardError: if there is no such file, or it contains something else.
    """
    path = Path(path)
    if path.is_dir():
        return _of_folder(path)
    if path.suffix == ".jsonl":
        return _lines(path)
    if path.suffix == _RECORDING:
        return _of_recording(path)
    if path.suffix == ".html" and path.is_file():
        raise GuardError(expected("a file of incidents", f"{str(path)!r}, a page that is finished", f"Open it in a browser. {_REMEDY}"))
    document = _document(_text(path), path)
    if isinstance(document, dict) and isinstance(document.get("incidents"), list):
        return [_incident(entry, path) for entry in document["incidents"]]
    return [_incident(document, path)]


def _of_folder(path: Path) -> list[Incident]:
    """Return the incidents in the directory of a run: those of its log, else of its recording, and
    of further bundles.
    """
    logged = None
    if (path / log.NAME).is_file():
        logged = _lines(path / log.NAME)
    elif (path / database.NAME).is_file():
        logged = _of_recording(path / database.NAME)
    listed = {Path(incident.bundle).name for incident in logged or () if incident.bundle}
    patterns = ("incident.json", "*/incident.json", "incidents/*/incident.json")
    files = sorted({p for pattern in patterns for p in path.glob(pattern) if p.is_file() and p.parent.name not in listed})
    if not files and logged is None:
        raise GuardError(expected("the directory of a guard, or a folder with bundles", f"{str(path)!r}, which contains neither", _REMEDY))
    bundled = sorted((_incident(_document(_text(file), file), file) for file in files), key=lambda i: i.step)
    return [*bundled, *(logged or ())]


def _of_recording(path: Path) -> list[Incident]:
    if not path.exists():
        raise GuardError(expected("a readable report", f"{str(path)!r}: no such file", _REMEDY))
    try:
        return [incident for incident, _ in recorded_incidents.incidents(recorded(path))]
    except FileFormatError as error:
        raise GuardError(f"{path}: {error}") from error


def _lines(path: Path) -> list[Incident]:
    """Return the incidents of a `.jsonl` file. An incomplete last line belongs to a process that is
    writing, or was killed.
    """
    lines = _text(path).split("\n")
    if path.name == log.NAME:
        del lines[-1]
    return [_incident(_document(line, path), path) for line in lines if line.strip()]


_REMEDY = "Pass a .json or .jsonl file that guard.report(path) wrote, a recording (.sqlite), or the directory that was given to NanGuard."


def _text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # a pipe would block
            raise GuardError(expected("a file or a folder", f"{str(path)!r}, which is neither", _REMEDY))
        if path.stat().st_size > MAX_BYTES:
            raise GuardError(expected(f"a file of at most {MAX_BYTES} bytes", f"{str(path)!r}, which is larger", _REMEDY))
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, GuardError):
            raise
        reason = error.strerror if isinstance(error, OSError) else "not a text file" if isinstance(error, UnicodeDecodeError) else error
        raise GuardError(expected("a readable report", f"{str(path)!r}: {reason}", _REMEDY)) from error


def _document(text: str, path: Path) -> Any:
    try:
        return plain_json.loads(text)
    except ValueError as error:
        raise GuardError(expected("JSON", f"{str(path)!r}: {plain_text(error)}", _REMEDY)) from error


def _incident(data: Any, path: Path) -> Incident:
    try:
        return Incident.from_dict(data)
    except GuardError as error:
        raise GuardError(f"{path}: {error}") from error
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise GuardError(expected("an incident", f"{str(path)!r}: {plain_text(error)}", _REMEDY)) from error
