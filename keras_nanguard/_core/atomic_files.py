"""Files that are whole or not there: written beside and renamed, brought to the disk, and checked when read.

Imports no backend.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from keras_nanguard._core.errors import FileFormatError

__all__ = ["beside", "fingerprint", "flush_to_disk", "put", "read_json", "remove", "sweep", "write_json"]

BESIDE = ".unfinished-"
"""Start of the name of everything that is being written, or being removed."""


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def flush_to_disk(path: Path) -> None:
    """Have the contents of a file, or the names in a folder, on the disk before going on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def put(finished: Path, path: Path) -> None:
    """Give a finished file or folder its name, and have that name on the disk."""
    os.replace(finished, path)
    if os.name != "nt":  # which opens no folder
        flush_to_disk(path.parent)


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Give the name under which a file or folder is to be written; it gets its own when the block ends, and is removed on an error."""
    unfinished = path.with_name(f"{BESIDE}{os.getpid()}-{path.name}")
    _discard(unfinished)
    try:
        yield unfinished
        put(unfinished, path)
    except BaseException:
        with suppress(OSError):
            _discard(unfinished)
        raise


def _discard(path: Path) -> None:
    is_folder = path.is_dir() and not path.is_symlink()
    shutil.rmtree(path, ignore_errors=True) if is_folder else path.unlink(missing_ok=True)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object with a checksum of itself, in one piece."""
    text = json.dumps({**data, "sha256": _seal(data)}, indent=1, allow_nan=False)
    with beside(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object that `write_json` has written.

    Raises:
        FileFormatError: if it is missing, cut short or changed.
    """
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict) or data.pop("sha256", None) != _seal(data):
        raise FileFormatError(f"{path} is not as it was written: its checksum does not fit")
    return data


def _seal(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def remove(path: Path) -> None:
    """Remove a folder such that it is never half there under its own name; of a link to one, the link alone."""
    unfinished = path.with_name(BESIDE + path.name)
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        os.replace(path, unfinished)
        shutil.rmtree(unfinished, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove what a process that died has left unfinished."""
    for path in folder.glob(BESIDE + "*"):
        _discard(path)
