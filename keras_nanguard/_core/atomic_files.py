"""Atomic files: written under a temporary name, synced, renamed, and checked against a checksum
when read. Arrays in files that any program with NumPy reads: `.npz` without compression and without
pickle.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from keras_nanguard._core import finiteness, plain_values
from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._core.finiteness import Array
from keras_nanguard._core.plain_values import plain_text

MAX_JSON = 64 << 20
"""Maximum size of a JSON file that is read."""

_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)
"""Errors of a file system that cannot sync a folder."""

BESIDE = ".unfinished-"
"""Prefix of the names of files and folders that are being written or removed."""


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def flush_to_disk(path: Path) -> None:
    """Sync the contents of a file, or the entries of a folder, to the disk. Windows cannot sync a
    folder, nor a file that is read-only."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(finished: Path, path: Path) -> None:
    """Move a finished file or folder to its final path, and sync the folder that contains it, if
    its file system can: some network file systems cannot.
    """
    os.replace(finished, path)
    try:
        flush_to_disk(path.parent)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


@functools.lru_cache(64)
def _unfinished(name: str, process: int) -> str:
    """Return the name of a file while it is written; the same string each time.

    pathlib interns each name, and Python's table of interned strings grows by megabytes if the
    names keep changing.
    """
    return f"{BESIDE}{process}-{name}"


@contextmanager
def beside(path: Path, name: str = "") -> Iterator[Path]:
    """Yield a temporary path next to the final one. It is renamed when the block ends, and removed
    on an error.

    Args:
        path: the final path.
        name: base of the temporary name; by default the final name.

    Raises:
        OSError: if the file cannot be written; the error names the final path.
    """
    unfinished = path.with_name(_unfinished(name or path.name, os.getpid()))
    _discard(unfinished)
    try:
        yield unfinished
        publish(unfinished, path)
    except BaseException as error:
        with suppress(OSError):
            _discard(unfinished)
        ours = str(getattr(error, "filename", "")) in ("None", str(unfinished))
        if isinstance(error, OSError) and error.errno and ours:
            raise type(error)(error.errno, error.strerror, str(path)) from error
        raise


def _discard(path: Path) -> None:
    is_folder = path.is_dir() and not path.is_symlink()
    shutil.rmtree(path, ignore_errors=True) if is_folder else path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text atomically, in UTF-8."""
    with beside(path) as unfinished:
        unfinished.write_bytes(text.encode("utf-8", "replace"))
        flush_to_disk(unfinished)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object with its checksum, atomically."""
    data = {**data, "sha256": _checksum(data)}
    write_text(path, json.dumps(data, indent=1, allow_nan=False))


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object that `write_json` has written.

    Raises:
        FileFormatError: if it is missing, truncated or modified.
    """
    try:
        if not path.is_file():
            raise ValueError("there is no such file")
        if path.stat().st_size > MAX_JSON:
            raise ValueError("it is too large")
        data = plain_values.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{path} cannot be read: {plain_text(error)}") from error
    if not isinstance(data, dict) or data.pop("sha256", None) != _checksum(data):
        raise FileFormatError(f"{path} was modified or damaged: its checksum does not match")
    return data


def _checksum(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def remove(path: Path) -> None:
    """Remove a folder atomically, by renaming it first; if it is a symbolic link, only the link."""
    unfinished = path.with_name(_unfinished("removed", os.getpid()))
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        if unfinished.exists():  # something of it cannot be removed
            unfinished = path.with_name(BESIDE + path.name)
            shutil.rmtree(unfinished, ignore_errors=True)
        os.replace(path, unfinished)
        shutil.rmtree(unfinished, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Remove the unfinished files and folders of a process that died."""
    for path in folder.glob(BESIDE + "*"):
        _discard(path)


def save_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays by name, and sync the file to disk. Arrays of a dtype that NumPy cannot name
    (bfloat16, float8) are written as unsigned integers of their bytes; see `typed`.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            named = array.dtype.kind in "biufcSU"
            plain = array if named else array.view(f"u{array.dtype.itemsize}")
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                npy.write_array(member, plain, allow_pickle=False)
    flush_to_disk(path)


def typed(array: Array, dtype: str) -> Array:
    """Return an array from a file in its original dtype, which is given by name."""
    if array.dtype.name == dtype or not finiteness.is_float(dtype):
        return array
    import ml_dtypes

    return array.view(np.dtype(getattr(ml_dtypes, dtype)))
