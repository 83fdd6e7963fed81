"""The log of incidents in the directory of a run: one JSON line per incident, appended as they
occur.

All lines are complete. A line that could not be written completely is removed, and so is a partial
line of a killed process when the next run starts. Imports no backend.
"""

from __future__ import annotations

import os
from pathlib import Path

from keras_nanguard._core.incident import Incident

__all__ = ["NAME", "add", "begin"]

NAME = "incidents.jsonl"
"""Name of the file within the guard's directory."""

_TAIL = 1 << 20


def _opened(path: str, flags: int) -> int:
    """Open the file itself, and not the target of a link."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def begin(directory: str | os.PathLike[str]) -> None:
    """Create the file if it is missing, which distinguishes a run without incidents from no run, and remove a partial last line.

    Raises:
        OSError: if it cannot be written.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / NAME, "ab+", opener=_opened) as file:
        size = end = file.tell()
        while end:
            start = max(0, end - _TAIL)
            file.seek(start)
            if (at := file.read(end - start).rfind(b"\n")) >= 0:
                end = start + at + 1
                break
            end = start
        if end < size:
            file.truncate(end)


def add(directory: str | os.PathLike[str], incident: Incident) -> None:
    """Append one incident to the file.

    Raises:
        OSError: if it cannot be written; the file is then unchanged.
    """
    line = (incident.to_json() + "\n").encode()
    with open(Path(directory) / NAME, "ab", buffering=0, opener=_opened) as file:
        before = file.tell()
        try:
            written = file.write(line)
            if written < len(line):
                raise OSError(28, "The disk is full", str(Path(directory) / NAME))
        except OSError:
            file.truncate(before)
            raise
