"""Bad batches on disk, for the action `quarantine`: plain arrays without pickle, written
atomically.

A file is named `step-00000123.npz`. Its arrays are named `x`, `y` and `sample_weight`, followed by
`/name` or `/number` if the data are nested. Sparse and ragged tensors are stored by their parts
(`x/values`, `x/indices`). The entry `incident` has the incident as JSON text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from keras_nanguard._core import atomic_files
from keras_nanguard._core.incident import Incident
from keras_nanguard._keras import arrays as keras_arrays

FOLDER = "quarantine"

_SPARSE, _RAGGED = ("indices", "values", "dense_shape"), ("flat_values", "nested_row_splits")
"""Parts of sparse and ragged tensors."""

_NAMES = ("x", "y", "sample_weight")


def save(
    directory: str, batch: Any, incident: Incident, max_batches: int, max_mb: float
) -> tuple[Path | None, str]:
    """Write a batch; return its file, and why none was written.

    Args:
        directory: the directory of the run.
        batch: the arguments of the step.
        incident: the incident of the step.
        max_batches: maximum number of batches in the folder.
        max_mb: their maximum size in MB.
    """
    folder = Path(directory) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    atomic_files.sweep(folder)
    kept = sorted(folder.glob("step-*.npz"))
    if len(kept) >= max_batches:
        there = f"{folder} already has {len(kept)} batches"
        return None, f"{there}, and max_batches is {max_batches}"
    arrays = arrays_of(batch)
    arrays["incident"] = np.array(incident.to_json())
    size = sum(array.nbytes for array in arrays.values())
    size += sum(path.stat().st_size for path in kept)
    if size > max_mb * 1e6:
        return None, f"{folder} would have {size / 1e6:.3g} MB, and max_mb is {max_mb:g}"
    name, number = f"step-{incident.step:08d}", 1
    path = folder / f"{name}.npz"
    while path.exists():  # an earlier run may have the same step
        number += 1
        path = folder / f"{name}-{number}.npz"
    with atomic_files.beside(path) as unfinished:
        atomic_files.save_arrays(unfinished, arrays)
    return path, ""


def arrays_of(batch: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Return every array of a batch by its name, in dtypes that NumPy can write without pickle."""
    data = batch[0] if len(batch) == 1 else batch
    is_usual = isinstance(data, (tuple, list)) and len(data) <= len(_NAMES)
    parts = dict(zip(_NAMES, data)) if is_usual else {"x": data}
    leaves = (leaf for name, part in parts.items() for leaf in _leaves(name, part))
    return {path: _plain(value) for path, value in leaves}


def _leaves(path: str, data: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(data, dict):
        children = [(str(key), value) for key, value in data.items()]
    elif isinstance(data, (list, tuple)):
        children = [(str(number), value) for number, value in enumerate(data)]
    else:
        too_large = keras_arrays.has_coordinates(data) and not keras_arrays.fits(data)
        if hasattr(data, "todense") and not too_large:
            data = data.todense()
        children = []
        if hasattr(data, "flat_values"):
            children = [(name, getattr(data, name)) for name in _RAGGED]
        elif keras_arrays.is_sparse(data):
            children = list(zip(_SPARSE, map(np.asarray, keras_arrays.coordinates(data))))
        if not children and data is not None:
            yield path, data
    for name, child in children:
        yield from _leaves(f"{path}/{name}", child)


def _plain(value: Any) -> np.ndarray[Any, Any]:
    array = keras_arrays.as_array(value)
    if array.dtype.kind == "O":  # text, as TensorFlow hands it out
        texts = [
            i.decode("utf-8", "replace") if isinstance(i, bytes) else str(i) for i in array.flat
        ]
        return np.array(texts).reshape(array.shape)
    if array.dtype.kind == "V" or array.dtype.isbuiltin != 1:  # bfloat16, float8
        return array.astype(np.float32)
    return array
