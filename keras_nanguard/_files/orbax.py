"""Reading of Orbax checkpoints, as `keras.callbacks.OrbaxCheckpoint` writes them, with TensorStore
alone.

A checkpoint is a folder `<step>/pytree` with one zarr array per variable, in an OCDBT store or as
plain files, named by the path of the variable in the state tree. TensorStore is installed with
Orbax and is imported only here, for such a folder; neither Orbax nor JAX is imported. It is read in
this process, so an array that declares far more than the checkpoint stores is not read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._files.arrays import chunk_blocks, float_name
from keras_nanguard._files.hdf5 import MAX_CHUNK, MAX_CHUNKS, MAX_EXPANSION
from keras_nanguard._files.stored import (
    BOMB_FLOOR,
    PARSE_ERRORS,
    Alive,
    Contents,
    StoredArray,
    plain_text,
)

__all__ = ["is_orbax", "read_orbax"]

_READ_VALUES = 1 << 20

_MAX_METADATA = 64 << 20


def is_orbax(path: str) -> bool:
    """Return whether a folder is an Orbax checkpoint: its root, one step, or the tree within a
    step."""
    return _tree(path) is not None


def read_orbax(path: str, alive: Alive = lambda: None) -> Contents:
    """Read the last step of an Orbax checkpoint.

    Args:
        path: folder of the checkpoint, of one of its steps, or of the tree within a step.
        alive: called for each array that is found.

    Returns:
        Its contents.

    Raises:
        FileFormatError: if TensorStore is not installed, or the checkpoint cannot be read.
    """
    try:
        import tensorstore  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise FileFormatError(
            f"{plain_text(path)} is an Orbax checkpoint, which requires TensorStore: pip install "
            "tensorstore."
        ) from None
    tree = _tree(path)
    if tree is None:
        raise FileFormatError(f"{plain_text(path)} is not a finished Orbax checkpoint.")
    metadata = _metadata(tree)
    base = f"file://{os.path.abspath(tree)}/"
    packed = bool(metadata.get("use_ocdbt", os.path.exists(os.path.join(tree, "manifest.ocdbt"))))
    store: dict[str, Any] = (
        {"driver": "ocdbt", "base": base} if packed else {"driver": "file", "path": f"{tree}/"}
    )
    arrays: list[StoredArray] = []
    stored = _size(tree)
    for key in sorted(tensorstore.KvStore.open(store).result().list().result()):
        alive()
        for marker, driver in ((b"/zarr.json", "zarr3"), (b"/.zarray", "zarr")):
            if key.endswith(marker):
                name = key[: -len(marker)].decode("utf-8", "surrogateescape")
                spec = {"driver": driver, "kvstore": _within(store, name)}
                left = max(BOMB_FLOOR, MAX_EXPANSION * stored) - sum(
                    array.nbytes for array in arrays
                )
                arrays.append(_stored_array(tensorstore, spec, name, stored, left))
    if not arrays:
        raise FileFormatError(f"{plain_text(path)} is an Orbax checkpoint without arrays.")
    notes = (
        []
        if os.path.samefile(tree, path)
        else [f"Read from {plain_text(os.path.relpath(tree, path))}."]
    )
    return Contents("orbax", arrays, notes=notes)


def _tree(path: str) -> str | None:
    steps = sorted(
        (name for name in _listed(path) if name.isascii() and name.isdigit()), key=int, reverse=True
    )
    for folder in (
        path,
        os.path.join(path, "pytree"),
        *(os.path.join(path, step, "pytree") for step in steps),
    ):
        if os.path.isfile(os.path.join(folder, "_METADATA")) or os.path.isfile(
            os.path.join(folder, "manifest.ocdbt")
        ):
            return folder
    return None


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except (OSError, ValueError):
        return []


def _metadata(tree: str) -> dict[str, Any]:
    file = Path(tree, "_METADATA")
    if not file.is_file() or file.stat().st_size > _MAX_METADATA:
        return {}
    parsed = json.loads(file.read_bytes())
    return parsed if isinstance(parsed, dict) else {}


def _within(store: dict[str, Any], name: str) -> dict[str, Any]:
    return {**store, "path": f"{store.get('path', '')}{name}/"}


def _size(tree: str) -> int:
    """Return the size of all files of a checkpoint."""
    return sum(
        os.lstat(os.path.join(root, name)).st_size
        for root, _, names in os.walk(tree)
        for name in names
    )


def _stored_array(
    tensorstore: Any, spec: dict[str, Any], name: str, stored: int, left: int
) -> StoredArray:
    """Return an array of a checkpoint whose files have `stored` bytes, and whose arrays may declare
    `left` bytes more."""
    location = plain_text(name.replace(".", "/"))
    try:
        array = tensorstore.open(spec, open=True, read=True).result()
        shape, dtype = (
            tuple(int(length) for length in array.shape),
            np.dtype(array.dtype.numpy_dtype),
        )
        chunk = tuple(int(length) for length in array.chunk_layout.read_chunk.shape or shape)
    except PARSE_ERRORS as error:
        return StoredArray(location, "?", (), 0, False, plain_text(error, 200), key=name)
    kind, size = float_name(dtype), math.prod(shape) * dtype.itemsize
    reason = _refusal(shape, chunk, dtype.itemsize, stored, left)
    if reason:
        return StoredArray(location, kind or str(dtype), shape, 0, False, reason, key=name)

    def pieces() -> Iterator[NDArray[Any]]:
        for block in chunk_blocks(shape, chunk, _READ_VALUES):  # a chunk is unpacked as a whole
            yield (
                np.asarray(array[block].read().result())
                if shape
                else np.asarray(array.read().result()).reshape(1)
            )

    def whole() -> NDArray[Any]:
        return np.asarray(array.read().result())

    return StoredArray(
        location,
        kind or str(dtype),
        shape,
        size,
        kind is not None,
        "",
        pieces,
        key=name,
        stored=size,
        whole=whole,
    )


def _refusal(
    shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int, stored: int, left: int
) -> str:
    """Return why an array is not read, `""` if it is: the limits are those of HDF5 files."""
    if math.prod(shape) * itemsize > left:
        return (
            f"it declares {math.prod(shape) * itemsize} bytes, and all files together have {stored}"
        )
    if math.prod(chunk) * itemsize > max(MAX_CHUNK, 4 * stored):
        return f"one chunk declares {math.prod(chunk) * itemsize} bytes"
    count = math.prod(-(-length // max(1, part)) for length, part in zip(shape, chunk))
    return f"it declares {count} chunks in {stored} bytes" if count > MAX_CHUNKS + stored else ""
