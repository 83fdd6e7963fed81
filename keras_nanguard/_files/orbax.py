"""Reading of Orbax checkpoints, as `keras.callbacks.OrbaxCheckpoint` writes them, with TensorStore alone.

A checkpoint is a folder `<step>/pytree` with one zarr array per variable, in an OCDBT store or as plain files, named by
the path of the variable in the state tree. TensorStore is installed with Orbax and is imported only here, for such a
folder; neither Orbax nor JAX is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._files.arrays import blocks, float_name
from keras_nanguard._files.stored import READ_FAULTS, Contents, StoredArray, plain_text

__all__ = ["is_orbax", "read_orbax"]

_READ_VALUES = 1 << 20

_MAX_METADATA = 64 << 20


def is_orbax(path: str) -> bool:
    """Return whether a folder is an Orbax checkpoint: its root, one step, or the tree within a step."""
    return _tree(path) is not None


def read_orbax(path: str) -> Contents:
    """Read the last step of an Orbax checkpoint.

    Args:
        path: folder of the checkpoint, of one of its steps, or of the tree within a step.

    Returns:
        Its contents.

    Raises:
        FileFormatError: if TensorStore is not installed, or the checkpoint cannot be read.
    """
    try:
        import tensorstore  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise FileFormatError(
            f"{plain_text(path)} is an Orbax checkpoint, which requires TensorStore: pip install tensorstore."
        ) from None
    tree = _tree(path)
    if tree is None:
        raise FileFormatError(f"{plain_text(path)} is not a finished Orbax checkpoint.")
    metadata = _metadata(tree)
    base = f"file://{os.path.abspath(tree)}/"
    packed = bool(metadata.get("use_ocdbt", os.path.exists(os.path.join(tree, "manifest.ocdbt"))))
    store: dict[str, Any] = {"driver": "ocdbt", "base": base} if packed else {"driver": "file", "path": f"{tree}/"}
    arrays = []
    for key in sorted(tensorstore.KvStore.open(store).result().list().result()):
        for marker, driver in ((b"/zarr.json", "zarr3"), (b"/.zarray", "zarr")):
            if key.endswith(marker):
                name = key[: -len(marker)].decode("utf-8", "surrogateescape")
                spec = {"driver": driver, "kvstore": _within(store, name)}
                arrays.append(_stored_array(tensorstore, spec, name))
    if not arrays:
        raise FileFormatError(f"{plain_text(path)} is an Orbax checkpoint without arrays.")
    notes = [] if os.path.samefile(tree, path) else [f"Read from {plain_text(os.path.relpath(tree, path))}."]
    return Contents("orbax", arrays, notes=notes)


def _tree(path: str) -> str | None:
    steps = sorted((name for name in _listed(path) if name.isascii() and name.isdigit()), key=int, reverse=True)
    for folder in (path, os.path.join(path, "pytree"), *(os.path.join(path, step, "pytree") for step in steps)):
        if os.path.isfile(os.path.join(folder, "_METADATA")) or os.path.isfile(os.path.join(folder, "manifest.ocdbt")):
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


def _stored_array(tensorstore: Any, spec: dict[str, Any], name: str) -> StoredArray:
    location = plain_text(name.replace(".", "/"))
    try:
        array = tensorstore.open(spec, open=True, read=True).result()
        shape, dtype = tuple(int(length) for length in array.shape), np.dtype(array.dtype.numpy_dtype)
    except READ_FAULTS as error:
        return StoredArray(location, "?", (), 0, False, plain_text(error, 200), key=name)
    kind = float_name(dtype)

    def pieces() -> Iterator[NDArray[Any]]:
        for block in blocks(shape, _READ_VALUES):
            yield np.asarray(array[block].read().result()) if shape else np.asarray(array.read().result()).reshape(1)

    size = int(np.prod(shape, dtype=object)) * dtype.itemsize
    return StoredArray(location, kind or str(dtype), shape, size, kind is not None, "", pieces, key=name)
