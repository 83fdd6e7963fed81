"""Rewriting of a model file with some of its arrays replaced: to a temporary file, synced to disk, then renamed.

Everything else in the file is copied unchanged. A partially written file never has the final name.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import h5py
import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from keras_nanguard._core import atomic_files
from keras_nanguard._core.errors import FileFormatError, GuardError, expected
from keras_nanguard._files.archives import WEIGHTS, refuse_bomb
from keras_nanguard._files.arrays import blocks, chunk_blocks
from keras_nanguard._files.isolated import isolated
from keras_nanguard._files.opening import shard_names, size_on_disk
from keras_nanguard._files.stored import BOMB_FLOOR, readable

__all__ = ["backed_up", "repaired_path", "rewritten"]

Replacements = Mapping[str, Callable[[], NDArray[Any]]]
"""New values of an array, by its key in the file."""

_COPY_BYTES = 4 << 20

_WRITE_VALUES = 1 << 20


def repaired_path(path: str) -> str:
    """Return the name of the repaired copy of a file: `model.keras` gives `model.repaired.keras`."""
    folder, name = os.path.split(os.path.abspath(path))
    for ending in (".weights.h5", ".weights.json", ".keras", ".h5", ".npz", ".hdf5"):
        if name.endswith(ending):
            return os.path.join(folder, f"{name.removesuffix(ending)}.repaired{ending}")
    return os.path.join(folder, f"{name}.repaired")


def backed_up(path: str, kind: str) -> str:
    """Back up the old file as `<path>.bak`, or with the next free number, and return that path.

    Args:
        path: the file, the folder, or the index of sharded weights, whose shards are backed up, too.
        kind: kind of the file, as in `Contents`.

    Returns:
        The path of the backup.
    """
    if kind == "sharded":
        for name in shard_names(path):
            _backup(os.path.join(os.path.dirname(path), name))
    return _backup(path)


def _backup(path: str) -> str:
    number, backup = 0, f"{path}.bak"
    while os.path.lexists(backup):
        number += 1
        backup = f"{path}.bak{number}"
    if os.path.isdir(path):
        shutil.copytree(path, backup, symlinks=True)
        return backup
    try:
        os.link(path, backup)
    except OSError:
        shutil.copy2(path, backup)
    return backup


@contextmanager
def rewritten(path: str, output: str, kind: str, replacements: Replacements) -> Iterator[str]:
    """Rewrite a file under a temporary name, and rename it when the context ends without an error.

    Args:
        path: the old file.
        output: the final path of the new file.
        kind: kind of the file, as in `Contents`.
        replacements: the new arrays.

    Returns:
        Context manager of the temporary path, so that the new file can be checked first.

    Raises:
        FileFormatError: if the kind cannot be rewritten.
        GuardError: if the folder of `output` does not exist.
    """
    folder = os.path.dirname(os.path.abspath(output))
    if not os.path.isdir(folder):
        raise GuardError(expected("an existing folder", f"output={output!r}", f"Create the folder {folder} first."))
    writers = {
        "keras": _archive,
        "npz": _archive,
        "weights.h5": _hdf5,
        "h5": _hdf5,
        "folder": _folder,
        "sharded": _shards,
    }
    if kind not in writers:
        raise FileFormatError(f"{path} is of the kind {kind!r}, which cannot be rewritten: load it and repair the model.")
    scratch = tempfile.mkdtemp(prefix=".nanguard-", dir=folder)
    try:
        target = os.path.join(scratch, os.path.basename(output))
        isolated(partial(_written, writers[kind], path, target, replacements), None, path, size_on_disk(path))
        _flush(scratch)
        yield target
        for name in sorted(os.listdir(scratch), key=lambda name: name == os.path.basename(output)):
            _publish(os.path.join(scratch, name), os.path.join(folder, name))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _written(
    write: Callable[[str, str, Replacements], None], path: str, target: str, replacements: Replacements, _: Any
) -> Iterator[dict[str, Any]]:
    """Write in a child process: the HDF5 library may crash on a damaged file that it could read."""
    with readable(path):
        write(path, target, replacements)
    yield {}


def _publish(new: str, final: str) -> None:
    links = os.path.islink(new) or os.path.islink(final)  # what they lead to is not of this model, and not ours to move
    if os.path.isdir(final) and os.path.isdir(new) and not links:
        for name in os.listdir(new):
            _publish(os.path.join(new, name), os.path.join(final, name))
    else:
        atomic_files.put(Path(new), Path(final))


def _flush(folder: str) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            if not os.path.islink(path := os.path.join(root, name)):
                atomic_files.flush_to_disk(Path(path))


def _hdf5(path: str, target: str, replacements: Replacements) -> None:
    shutil.copyfile(path, target)
    with h5py.File(target, "r+", locking=False) as file:
        for key, values in replacements.items():
            _write(file[key], values())


def _write(dataset: Any, values: NDArray[Any]) -> None:
    """Write values in pieces; bfloat16 is written as unnamed bytes, as Keras does."""
    unnamed = dataset.dtype.kind == "V"
    plain = np.ascontiguousarray(values).view(dataset.dtype) if unnamed else np.ascontiguousarray(values)
    kind = dataset.id.get_type() if unnamed else None
    if dataset.shape == ():
        dataset.id.write(h5py.h5s.ALL, h5py.h5s.ALL, plain, kind)
        return
    chunk = dataset.chunks
    for block in blocks(dataset.shape, _WRITE_VALUES) if chunk is None else chunk_blocks(dataset.shape, chunk, _WRITE_VALUES):
        start, count = tuple(part.start for part in block), tuple(part.stop - part.start for part in block)
        space = dataset.id.get_space()
        space.select_hyperslab(start, count)
        dataset.id.write(h5py.h5s.create_simple(count), space, np.ascontiguousarray(plain[block]), kind)


def _folder(path: str, target: str, replacements: Replacements) -> None:
    shutil.copytree(path, target, symlinks=True)
    os.unlink(os.path.join(target, WEIGHTS))
    _hdf5(os.path.join(path, WEIGHTS), os.path.join(target, WEIGHTS), replacements)


def _shards(path: str, target: str, replacements: Replacements) -> None:
    """Rewrite every shard under the new base name: the loader of Keras derives the name of the first from the index."""
    old, new = _base_name(path), _base_name(target)
    index = json.loads(Path(path).read_bytes())
    renamed = {name: f"{new}{name.removeprefix(old)}" if name.startswith(old) else f"{new}_{name}" for name in shard_names(path)}
    renamed = renamed if new != old else {name: name for name in renamed}
    for name, new_name in renamed.items():
        shard = os.path.join(os.path.dirname(target), new_name)
        shutil.copyfile(os.path.join(os.path.dirname(path), name), shard)
        with h5py.File(shard, "r+", locking=False) as file:
            for key, values in replacements.items():
                if key in file:
                    _write(file[key], values())
    listed = index["weight_map"]
    for group, names in listed.items():
        listed[group] = [renamed[name] for name in names] if isinstance(names, list) else renamed[names]
    Path(target).write_text(json.dumps(index, indent=4))


def _base_name(path: str) -> str:
    return Path(path).stem.replace(".weights", "")


def _archive(path: str, target: str, replacements: Replacements) -> None:
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        declared, stored = sum(info.file_size for info in old.infolist()), os.path.getsize(path)
        if declared > BOMB_FLOOR and declared > 100 * stored:
            raise FileFormatError(f"{path} declares {declared} bytes and stores {stored}: a zip bomb.")
        for info in old.infolist():
            with tempfile.TemporaryDirectory(dir=os.path.dirname(target)) as folder:
                _member(old, info, new, replacements, folder)


def _member(old: zipfile.ZipFile, info: zipfile.ZipInfo, new: zipfile.ZipFile, replacements: Replacements, folder: str) -> None:
    refuse_bomb(info)
    copy = zipfile.ZipInfo(info.filename, info.date_time)
    copy.compress_type, copy.external_attr = info.compress_type, info.external_attr
    if info.filename == WEIGHTS:
        unpacked, repaired = os.path.join(folder, "old"), os.path.join(folder, "new")
        with old.open(info) as member, open(unpacked, "wb") as file:
            shutil.copyfileobj(member, file, _COPY_BYTES)
        _hdf5(unpacked, repaired, replacements)
        with open(repaired, "rb") as file:
            _store(new, copy, file, os.path.getsize(repaired))
    elif info.filename in replacements:
        values = replacements[info.filename]()
        with new.open(copy, "w", force_zip64=values.nbytes > zipfile.ZIP64_LIMIT // 2) as target:
            npy.write_array(target, values, allow_pickle=False)
    else:
        with old.open(info) as member:
            _store(new, copy, member, info.file_size)


def _store(new: zipfile.ZipFile, info: zipfile.ZipInfo, source: IO[bytes], size: int) -> None:
    with new.open(info, "w", force_zip64=size > zipfile.ZIP64_LIMIT // 2) as target:
        shutil.copyfileobj(source, target, _COPY_BYTES)
