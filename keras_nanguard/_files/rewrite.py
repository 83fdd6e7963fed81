"""Rewriting of a model file with some of its arrays replaced, into a folder for files that are not
finished.

Everything else in the file is copied unchanged, with its permissions.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from keras_nanguard._core import atomic_files
from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._files.archives import WEIGHTS, refuse_bomb
from keras_nanguard._files.stored import BOMB_FLOOR, MAX_EXPANSION, READ_BYTES

__all__ = ["Replacements", "Unwritable", "rewrite"]

Replacements = dict[str, Callable[[], NDArray[Any]]]
"""New values of an array, by its key in the file."""


class Unwritable(Exception):
    """A file cannot be written: error number, reason, path."""


def rewrite(path: str, scratch: str, output: str, kind: str, new: Replacements) -> None:
    """Write the new file into a folder, and sync it to the disk.

    Args:
        path: the old file.
        scratch: the folder, which is made.
        output: final path of the new file, whose name it gets in the folder.
        kind, new: kind of the file, as in `Contents`, and the new arrays.

    Raises:
        FileFormatError: if the kind cannot be rewritten, or the old file is damaged.
        Unwritable: if the new file cannot be written.
    """
    writers = {"keras": _archive, "npz": _archive, "weights.h5": _hdf5, "h5": _hdf5}
    if kind not in writers:
        instead = {
            "folder": f"repair its {WEIGHTS}",
            "sharded": "repair each shard, in place",
        }.get(kind, "load it and repair the model")
        raise FileFormatError(f"A file of the kind {kind!r} cannot be rewritten: {instead}.")
    target = os.path.join(scratch, os.path.basename(output))
    try:
        os.mkdir(scratch)
        writers[kind](path, target, new)
        shutil.copymode(path, target)
        atomic_files.flush_to_disk(Path(target))
    except OSError as error:
        if error.errno is None:  # of HDF5, about the old file
            raise
        raise Unwritable(error.errno, error.strerror or str(error), output) from error


def _hdf5(path: str, target: str, new: Replacements) -> None:
    """Write a copy of an HDF5 file with its arrays replaced."""
    shutil.copyfile(path, target)
    _replace(target, new)


def _replace(path: str, new: Replacements) -> None:
    """Replace the arrays of an HDF5 file."""
    with h5py.File(path, "r+", locking=False) as file:
        for key, values in new.items():
            _write(file[key.encode("utf-8", "surrogateescape")], values())


def _write(dataset: h5py.Dataset, values: NDArray[Any]) -> None:
    """Write values into a dataset; bfloat16 as unnamed bytes, as Keras does."""
    plain = np.require(values, requirements="C")
    if dataset.dtype.kind != "V":
        dataset[...] = plain
        return
    kind = dataset.id.get_type()
    dataset.id.write(h5py.h5s.ALL, h5py.h5s.ALL, plain.view(dataset.dtype), kind)


def _archive(path: str, target: str, new: Replacements) -> None:
    """Write a copy of a zip archive with its weights or arrays replaced, each compressed as
    before."""
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as copy:
        declared = sum(info.file_size for info in source.infolist())
        if declared > max(BOMB_FLOOR, MAX_EXPANSION * os.path.getsize(path)):
            raise FileFormatError(f"{path} declares {declared} bytes in all: a zip bomb.")
        for info in source.infolist():
            refuse_bomb(info)
            member = zipfile.ZipInfo(info.filename, info.date_time)
            member.compress_type, member.external_attr = info.compress_type, info.external_attr
            with copy.open(member, "w", force_zip64=True) as written, source.open(info) as old:
                _member(old, written, info.filename, new, os.path.dirname(target))


def _member(old: IO[bytes], written: IO[bytes], name: str, new: Replacements, folder: str) -> None:
    if name == WEIGHTS:
        unpacked = os.path.join(folder, f".{name}")
        with open(unpacked, "wb") as file:
            shutil.copyfileobj(old, file, READ_BYTES)
        _replace(unpacked, new)
        with open(unpacked, "rb") as file:
            shutil.copyfileobj(file, written, READ_BYTES)
        os.unlink(unpacked)
    elif name in new:
        npy.write_array(written, new[name](), allow_pickle=False)
    else:
        shutil.copyfileobj(old, written, READ_BYTES)
