"""Reading of Orbax checkpoints, as `keras.callbacks.OrbaxCheckpoint` writes them, with TensorStore
alone.

A checkpoint is a folder `<step>/pytree` with one zarr array per variable, in an OCDBT store or as
plain files, named by the path of the variable in the state tree. TensorStore is installed with
Orbax and is imported only here, for such a folder; neither Orbax nor JAX is imported.
"""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._files.formats.contents import Contents, ModelArray, pieces_of
from keras_nanguard._files.formats.limits import PARSE_ERRORS, declared_too_much


def read_orbax(path: str, tree: str) -> Contents:
    """Return the contents of the last step of an Orbax checkpoint.

    Args:
        path: folder of the checkpoint, of one of its steps, or of the tree within a step.
        tree: the folder with the arrays, from `orbax_tree`.

    Raises:
        FileFormatError: if TensorStore is not installed, or the checkpoint cannot be read.
    """
    try:
        import tensorstore  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        what = f"{plain_text(path)} is an Orbax checkpoint, which requires TensorStore"
        raise FileFormatError(f"{what}: pip install tensorstore.") from None
    folder = os.path.abspath(tree)
    store: dict[str, Any] = {"driver": "file", "path": f"{folder}/"}
    if os.path.exists(f"{tree}/manifest.ocdbt"):
        store = {"driver": "ocdbt", "base": f"file://{folder}/", "path": ""}
    arrays: list[ModelArray] = []
    declared = 0
    size = sum(entry.lstat().st_size for entry in Path(tree).rglob("*"))
    for key in sorted(tensorstore.KvStore.open(store).result().list().result()):
        name, _, marker = key.decode("utf-8", "surrogateescape").rpartition("/")
        driver = {"zarr.json": "zarr3", ".zarray": "zarr"}.get(marker)
        if driver:
            kvstore = {**store, "path": f"{store['path']}{name}/"}
            spec = {"driver": driver, "kvstore": kvstore}
            arrays.append(_stored_array(tensorstore, spec, name, declared, size))
            declared += arrays[-1].nbytes
    if not arrays:
        raise FileFormatError(f"{plain_text(path)} is an Orbax checkpoint without arrays.")
    read = plain_text(os.path.relpath(tree, path))
    notes = [] if os.path.samefile(tree, path) else [f"Read from {read}."]
    return Contents("orbax", arrays, notes=notes)


def orbax_tree(path: str) -> str | None:
    """Return the folder with the arrays of the last step of an Orbax checkpoint, given its root,
    one step or that folder; `None` for anything else."""
    try:
        steps = [name for name in os.listdir(path) if name.isascii() and name.isdigit()]
    except (OSError, ValueError):
        steps = []
    inside = [os.path.join(step, "pytree") for step in sorted(steps, key=int, reverse=True)]
    for folder in (path, *(os.path.join(path, name) for name in ("pytree", *inside))):
        marks = (os.path.join(folder, name) for name in ("_METADATA", "manifest.ocdbt"))
        if any(map(os.path.isfile, marks)):
            return folder
    return None


def _stored_array(
    tensorstore: Any, spec: dict[str, Any], name: str, before: int, file_size: int
) -> ModelArray:
    """Return an array of a checkpoint. For `before` and `file_size` see `declared_too_much`."""
    location = name.replace(".", "/")
    try:
        array = tensorstore.open(spec, open=True, read=True).result()
        shape = tuple(map(int, array.shape))
        chunk = tuple(map(int, array.chunk_layout.read_chunk.shape or shape))
        dtype = np.dtype(array.dtype.numpy_dtype)
    except PARSE_ERRORS as error:
        return ModelArray(location, unread=plain_text(error, 200))
    reason = declared_too_much(shape, chunk, dtype.itemsize, before, file_size)

    def get(part: Any) -> NDArray[Any]:
        return np.asarray(array[part].read().result())

    pieces = partial(pieces_of, get, shape, chunk, dtype.itemsize)
    stored, whole = math.prod(shape) * dtype.itemsize, partial(get, ())
    return ModelArray.found(location, dtype, shape, stored, pieces, whole, reason)
