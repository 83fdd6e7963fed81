"""Rewriting of a model file with some of its arrays replaced, into a folder for files that are not
finished.

Everything else in the file is copied unchanged, with its permissions.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
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
from keras_nanguard._files.arrays import blocks, chunk_blocks
from keras_nanguard._files.opening import shard_names
from keras_nanguard._files.stored import BOMB_FLOOR, Alive

__all__ = ["Replacements", "Unwritable", "rewrite"]

Replacements = dict[str, Callable[[], NDArray[Any]]]
"""New values of an array, by its key in the file."""

_COPY_BYTES = 4 << 20

_WRITE_VALUES = 1 << 20


class Unwritable(Exception):
    """A file cannot be written: error number, reason, path."""


def rewrite(
    path: str, scratch: str, output: str, kind: str, replacements: Replacements, alive: Alive
) -> None:
    """Write the new file into a folder, and sync it to the disk.

    Args:
        path: the old file.
        scratch: the folder, which is made.
        output: final path of the new file, whose name it gets in the folder.
        kind: kind of the file, as in `Contents`.
        replacements: the new arrays.
        alive: called between two writes.

    Raises:
        FileFormatError: if the kind cannot be rewritten, or the old file is damaged.
        Unwritable: if the new file cannot be written.
    """
    writer = _Writer(replacements, alive)
    writers = {
        **dict.fromkeys(("keras", "npz"), writer.archive),
        **dict.fromkeys(("weights.h5", "h5"), writer.hdf5),
        "folder": writer.folder,
        "sharded": writer.shards,
    }
    if kind not in writers:
        raise FileFormatError(
            f"A file of the kind {kind!r} cannot be rewritten: load it and repair the model."
        )
    try:
        os.mkdir(scratch)
        writers[kind](path, os.path.join(scratch, os.path.basename(output)))
        for root, _, names in os.walk(scratch):
            for name in names:
                if not os.path.islink(new := os.path.join(root, name)):
                    atomic_files.flush_to_disk(Path(new))
    except OSError as error:
        if error.errno is None:  # of HDF5, about the old file
            raise
        raise Unwritable(error.errno, error.strerror or str(error), output) from error


class _Writer:
    """Writes files with some arrays replaced."""

    def __init__(self, replacements: Replacements, alive: Alive):
        self._replacements, self._alive = replacements, alive

    def hdf5(self, path: str, target: str) -> None:
        """Write a copy of an HDF5 file with those arrays replaced that it contains."""
        with open(path, "rb") as source, open(target, "wb") as copy:
            self._copy(source, copy)
        with h5py.File(target, "r+", locking=False) as file:
            for key, values in self._replacements.items():
                if key in file:
                    self._write(file[key], values())
        shutil.copymode(path, target)

    def _copy(self, source: IO[bytes], target: IO[bytes]) -> None:
        while block := source.read(_COPY_BYTES):
            target.write(block)
            self._alive()

    def _write(self, dataset: Any, values: NDArray[Any]) -> None:
        """Write values in pieces; bfloat16 is written as unnamed bytes, as Keras does."""
        unnamed = dataset.dtype.kind == "V"
        plain = (
            np.ascontiguousarray(values).view(dataset.dtype)
            if unnamed
            else np.ascontiguousarray(values)
        )
        kind = dataset.id.get_type() if unnamed else None
        if dataset.shape == ():
            dataset.id.write(h5py.h5s.ALL, h5py.h5s.ALL, plain, kind)
            return
        shape, chunk = dataset.shape, dataset.chunks
        parts = (
            blocks(shape, _WRITE_VALUES)
            if chunk is None
            else chunk_blocks(shape, chunk, _WRITE_VALUES)
        )
        for block in parts:
            start, count = (
                tuple(part.start for part in block),
                tuple(part.stop - part.start for part in block),
            )
            space = dataset.id.get_space()
            space.select_hyperslab(start, count)
            dataset.id.write(
                h5py.h5s.create_simple(count), space, np.ascontiguousarray(plain[block]), kind
            )
            self._alive()

    def folder(self, path: str, target: str) -> None:
        """Write a copy of the folder of an unzipped model; links in it are copied, not followed."""
        shutil.copytree(path, target, symlinks=True)
        os.unlink(os.path.join(target, WEIGHTS))
        self.hdf5(os.path.join(path, WEIGHTS), os.path.join(target, WEIGHTS))

    def shards(self, path: str, target: str) -> None:
        """Write every shard under the new base name, from which Keras derives the name of the
        first."""
        old, new = _base_name(path), _base_name(target)
        renamed = {name: name for name in shard_names(path)}
        if new != old:
            renamed = {
                n: f"{new}{n.removeprefix(old)}" if n.startswith(old) else f"{new}_{n}"
                for n in renamed
            }
        for name, new_name in renamed.items():
            self.hdf5(
                os.path.join(os.path.dirname(path), name),
                os.path.join(os.path.dirname(target), new_name),
            )
        index = json.loads(Path(path).read_bytes())
        listed = index["weight_map"]
        for group, names in listed.items():
            listed[group] = (
                [renamed[name] for name in names] if isinstance(names, list) else renamed[names]
            )
        Path(target).write_text(json.dumps(index, indent=4))
        shutil.copymode(path, target)

    def archive(self, path: str, target: str) -> None:
        """Write a copy of a zip archive with its weights or arrays replaced, each compressed as
        before."""
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
            declared, stored = sum(info.file_size for info in old.infolist()), os.path.getsize(path)
            if declared > BOMB_FLOOR and declared > 100 * stored:
                raise FileFormatError(
                    f"{path} declares {declared} bytes and stores {stored}: a zip bomb."
                )
            for info in old.infolist():
                with tempfile.TemporaryDirectory(dir=os.path.dirname(target)) as folder:
                    self._member(old, info, new, folder)
        shutil.copymode(path, target)

    def _member(
        self, old: zipfile.ZipFile, info: zipfile.ZipInfo, new: zipfile.ZipFile, folder: str
    ) -> None:
        refuse_bomb(info)
        copy = zipfile.ZipInfo(info.filename, info.date_time)
        copy.compress_type, copy.external_attr = info.compress_type, info.external_attr
        if info.filename == WEIGHTS:
            unpacked, repaired = os.path.join(folder, "old"), os.path.join(folder, "new")
            with old.open(info) as member, open(unpacked, "wb") as file:
                self._copy(member, file)
            self.hdf5(unpacked, repaired)
            with open(repaired, "rb") as file, new.open(copy, "w", force_zip64=True) as target:
                self._copy(file, target)
        elif info.filename in self._replacements:
            with new.open(copy, "w", force_zip64=True) as target:
                npy.write_array(target, self._replacements[info.filename](), allow_pickle=False)
        else:
            with old.open(info) as member, new.open(copy, "w", force_zip64=True) as target:
                self._copy(member, target)


def _base_name(path: str) -> str:
    return Path(path).stem.replace(".weights", "")
