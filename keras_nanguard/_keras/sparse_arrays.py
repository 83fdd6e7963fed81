"""Sparse tensors of TensorFlow and sparse arrays of JAX as NumPy arrays: with their zeros unless
these are too many.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from keras_nanguard._keras import spread_arrays

MAX_SPREAD = 1 << 24
"""Entries up to which a sparse tensor is read with its zeros."""

Array = np.ndarray[Any, Any]


def is_sparse(value: Any) -> bool:
    """Whether it is a sparse tensor of TensorFlow or a sparse array of JAX."""
    return hasattr(value, "dense_shape") or hasattr(value, "todense")


def fits(value: Any) -> bool:
    """Whether a sparse tensor may be read with its zeros."""
    return math.prod(_shape(value)) <= MAX_SPREAD


def _shape(value: Any) -> tuple[int, ...]:
    shape = value.dense_shape if hasattr(value, "dense_shape") else np.asarray(value.shape)
    return tuple(int(n) for n in spread_arrays.as_array(shape))


def coordinates(value: Any) -> tuple[Array, Array, tuple[int, ...]]:
    """Return the place of each stored value, the values, and the shape; a JAX array may be padded
    with places outside of it.
    """
    shape = _shape(value)
    indices = spread_arrays.as_array(value.indices)
    values = spread_arrays.as_array(value.values if hasattr(value, "dense_shape") else value.data)
    inside = (indices < np.asarray(shape)).all(axis=-1)
    return indices[inside], values[inside], shape


def dense(value: Any) -> Any:
    """Return a sparse array of JAX with its zeros, or its stored values if they are too many."""
    return value.todense() if fits(value) else value.data


def by_rows(value: Any) -> Array:
    """Return a sparse array as a dense one with one row for each sample.

    If it is too large with its zeros, each row has only its stored values, padded with zeros. If
    that is too large as well, all stored values are in a single row.
    """
    if fits(value) and hasattr(value, "todense"):
        return spread_arrays.as_array(value.todense())
    if not has_coordinates(value):
        return spread_arrays.as_array(value.data).reshape(1, -1)
    indices, values, shape = coordinates(value)
    if fits(value):
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
    """Whether each stored value is one number with all of its indices, as in every batch that Keras
    creates.
    """
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
