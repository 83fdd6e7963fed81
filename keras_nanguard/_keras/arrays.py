"""Tensors and arrays of every backend as NumPy arrays: sharded over several processes, sparse or
ragged.

A sparse tensor of TensorFlow or PyTorch, or a sparse array of JAX, has its zeros unless these are
too many.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_nanguard._core.errors import waiting_for

MAX_SPREAD = 1 << 24
"""Entries up to which a sparse tensor is read with its zeros."""

Array = np.ndarray[Any, Any]


def whole(value: Any) -> Any:
    """Return an array that this process can read; all processes gather a sharded one."""
    if getattr(value, "is_fully_addressable", True) or value.is_fully_replicated:
        return value
    import jax
    from jax.experimental import multihost_utils

    with waiting_for("an array that is sharded over them", jax.process_count()):
        return multihost_utils.process_allgather(value, tiled=True)


def as_array(value: Any) -> Array:
    """Return a tensor or array of any backend as a NumPy array, without a copy where possible."""
    if hasattr(value, "detach"):
        # torch: NumPy supports neither its gradients, devices and lazy signs, nor its bfloat16.
        value = value.detach().cpu().resolve_conj().resolve_neg()
        is_known = "bfloat16" not in str(value.dtype)
        return np.asarray(value.numpy() if is_known else keras.ops.convert_to_numpy(value))
    if hasattr(value, "numpy"):
        # TensorFlow: `.numpy()` copies a tensor; neither a mirrored variable nor a scalar of
        # bfloat16 converts to an array.
        value = value.read_value() if hasattr(value, "read_value") else value
        return np.asarray(value if len(value.shape) else value.numpy())
    return np.asarray(whole(value))  # of JAX: `convert_to_numpy` of Keras copies it


def read_tensor(tensor: Any) -> Array:
    """Return a tensor's value as a new NumPy array."""
    return np.array(as_array(tensor))


def named_arrays(data: Any, path: str = "") -> Iterator[tuple[str, Array]]:
    """Yield `(path, array)` for each tensor of nested data: `0`, `0/1`, `0/name`; no strings."""
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(data, dict):
        children = data.items()
    elif isinstance(data, (list, tuple)):
        children = enumerate(data)
    elif data is not None:
        array = dense(data)
        if array.dtype.kind not in "OSU":
            yield path, array
    for key, value in children:
        yield from named_arrays(value, f"{path}/{key}" if path else str(key))


def rows_by_process(value: Any, rows: Sequence[int], here: int) -> dict[int, list[int]]:
    """Return rows of a batch by the rank of the process that has them, as indices into its own
    part.

    Args:
        value: an array of the batch, which may be sharded over processes.
        rows: indices into the first dimension of the whole array.
        here: the rank of this process, to which an array belongs that is not sharded.
    """
    if getattr(value, "is_fully_addressable", True):
        return {here: list(rows)}
    owners = np.full(value.shape[0], np.iinfo(int).max)
    for device, index in value.sharding.devices_indices_map(value.shape).items():
        owners[index[0]] = np.minimum(owners[index[0]], device.process_index)
    found: dict[int, list[int]] = {}
    for row in rows:
        own = np.flatnonzero(owners == owners[row])
        found.setdefault(int(owners[row]), []).append(int(np.searchsorted(own, row)))
    return dict(sorted(found.items()))


# Sparse and ragged tensors


def is_ragged(value: Any) -> bool:
    """Whether it is a ragged tensor of TensorFlow."""
    return hasattr(value, "nested_row_splits")


def is_sparse(value: Any) -> bool:
    """Whether it is a sparse tensor of TensorFlow or PyTorch, or a sparse array of JAX."""
    return hasattr(value, "dense_shape") or is_convertible(value)


def is_convertible(value: Any) -> bool:
    """Whether it is a sparse array of JAX or PyTorch, which has a method for its zeros."""
    of_torch = hasattr(value, "to_dense") and "sparse" in str(value.layout)
    return of_torch or hasattr(value, "todense")


def _fits(value: Any) -> bool:
    """Whether a sparse tensor may be read with its zeros."""
    return math.prod(_shape(value)) <= MAX_SPREAD


def _shape(value: Any) -> tuple[int, ...]:
    shape = value.dense_shape if hasattr(value, "dense_shape") else np.asarray(value.shape)
    return tuple(int(n) for n in as_array(shape))


def coordinates(value: Any) -> tuple[Array, Array, tuple[int, ...]]:
    """Return the place of each stored value, the values, and the shape; a JAX array may be padded
    with places outside of it.
    """
    shape = _shape(value)
    indices = as_array(value.indices)
    values = as_array(value.values if hasattr(value, "dense_shape") else value.data)
    inside = (indices < np.asarray(shape)).all(axis=-1)
    return indices[inside], values[inside], shape


def dense(value: Any) -> Array:
    """Return the values of a tensor as a NumPy array: the `values` of a sparse tensor, the
    `flat_values` of a ragged one.

    A sparse array of JAX or PyTorch has its zeros, too, unless these are too many.
    """
    if is_convertible(value):
        value = _converted(value)
    for name in ("flat_values", "values"):
        inner_values = getattr(value, name, None)
        if inner_values is not None and not callable(inner_values):
            return dense(inner_values)
    return as_array(value)


def _converted(value: Any) -> Any:
    """Return a sparse array with its zeros, or its stored values if there are too many zeros."""
    if hasattr(value, "todense"):
        return value.todense() if _fits(value) else value.data
    value = value.detach()
    if _fits(value):
        return value.to_dense()
    return (value.coalesce() if value.is_sparse else value).values()


def by_rows(value: Any) -> Array:
    """Return a tensor as an array with one row for each sample.

    If a sparse one is too large with its zeros, each row has only its stored values, padded with
    zeros. If that is too large as well, all stored values are in a single row.
    """
    if not is_sparse(value) or (is_convertible(value) and _fits(value)):
        return dense(value)
    if not has_coordinates(value):
        return dense(value).reshape(1, -1)
    indices, values, shape = coordinates(value)
    if _fits(value):
        places = tuple(indices.T)
    else:
        counts = np.bincount(indices[:, 0], minlength=shape[0])
        shape = (shape[0], int(counts.max(initial=0)))
        if math.prod(shape) > MAX_SPREAD:
            return values.reshape(1, -1)
        order = np.argsort(indices[:, 0], kind="stable")
        values, rows = values[order], indices[order, 0]
        places = (rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts))
    array = np.zeros(shape, values.dtype)
    array[places] = values
    return array


def has_coordinates(value: Any) -> bool:
    """Whether each stored value is one number with all of its indices, as Keras creates them."""
    whole = getattr(value, "n_batch", None) == 0 and value.n_dense == 0
    return hasattr(value, "dense_shape") or (whole and not hasattr(value, "indptr"))


def gathered(value: Any, rows: Array) -> tuple[Array, Array, tuple[int, ...]]:
    """Return places, values and shape of the sparse tensor that has these rows of `value`, in the
    order of `rows`. A row may occur more than once.
    """
    indices, values, shape = coordinates(value)
    order = np.argsort(indices[:, 0], kind="stable")
    held = indices[order, 0]
    first, end = np.searchsorted(held, rows, "left"), np.searchsorted(held, rows, "right")
    counts = end - first
    taken = order[np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())]
    places = indices[taken].copy()
    places[:, 0] = np.repeat(np.arange(len(rows)), counts)
    return places, values[taken], (len(rows), *shape[1:])
