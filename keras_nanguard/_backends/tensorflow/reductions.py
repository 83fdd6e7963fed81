"""The sums of `keras_nanguard._core.finiteness` in TensorFlow: one pass over each tensor.

`tf.nn.l2_loss` and `tf.reduce_sum` run near memory bandwidth (17 and 22 GB/s on two cores;
comparing each entry with `tf.math.is_finite` reaches 13). A sum may overflow although every entry
is finite. So if a sum is not finite, the entries are read one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_nanguard._backends.shared.rules import Operations
from keras_nanguard._core.finiteness import is_inexact

OPERATIONS = Operations(tf.math.is_finite, tf.logical_not, tf.where, tf.minimum, tf.maximum)
"""The operations for the rules of the transaction."""

JOINED, LARGE = 1 << 12, 1 << 16
"""Elements from which a tensor is not joined with others of its shape, and not added to them."""


def sum_dtype(variables: Iterable[Any]) -> Any:
    """Return the dtype of the sums: float64 if the state has float64, else float32."""
    return tf.float64 if any(str(v.dtype) == "float64" for v in variables) else tf.float32


def _numbers(tensor: Any) -> Any:
    """Return the entries of a tensor, variable, `IndexedSlices`, sparse or ragged tensor."""
    if hasattr(tensor, "read_value"):
        tensor = tensor.read_value()
    if isinstance(tensor, (tf.IndexedSlices, tf.SparseTensor)):
        tensor = tensor.values
    elif isinstance(tensor, tf.RaggedTensor):
        tensor = tensor.flat_values
    return tf.convert_to_tensor(tensor)


def _wide(tensor: Any) -> Any:
    """Return the same entries, real and with at least 32 bits."""
    tensor = _numbers(tensor)
    if tensor.dtype.is_complex:
        return tf.abs(tensor)
    return tensor if tensor.dtype.size >= 4 else tf.cast(tensor, tf.float32)


def add(scalars: Sequence[Any], dtype: Any) -> Any:
    """Return the sum of scalars of this dtype, 0 if there is none."""
    if not scalars:
        return tf.zeros((), dtype)
    scalars = [s if s.shape.rank == 0 else tf.reduce_sum(s) for s in scalars]
    return tf.add_n(scalars) if len(scalars) > 1 else scalars[0]


class Reading:
    """Tensors that are summed, and read one by one if a sum is not finite.

    Args:
        tensors: tensors and variables; those that cannot be bad are left out.
        joins: whether small ones of one dtype and shape are joined: to trace and to run, a copy
            takes less time than an operation for each. Not before an update: how gradients and
            statistics are read together changes what TensorFlow's graph optimizer combines, and
            with that the last bit of a step.
    """

    def __init__(self, tensors: Iterable[Any], joins: bool = False):
        groups = _alike(map(_numbers, filter(is_inexact, tensors)), JOINED if joins else 0)
        self._parts = {p: tf.stack(group) if p[1:] else group[0] for p, group in groups.items()}
        """The tensors at some places, joined along a new first axis; at one place the tensor."""

    def squares(self, dtype: Any) -> Any:
        """Return half the sum of the squares of all entries."""
        return add([tf.cast(tf.nn.l2_loss(_wide(t)), dtype) for t in self._parts.values()], dtype)

    def total(self, dtype: Any) -> Any:
        """Return the sum of all entries; it is not finite if one entry is not.

        Small tensors of one shape are added first.
        """
        groups = _alike(map(_wide, self._parts.values()), LARGE).values()
        summed = (tf.add_n(group) if len(group) > 1 else group[0] for group in groups)
        return add([tf.cast(tf.reduce_sum(tensor), dtype) for tensor in summed], dtype)

    def all_finite(self) -> Any:
        """Return whether all entries are finite, a scalar bool."""
        groups = _alike(self._parts.values(), LARGE).values()
        parts = [part for group in groups for part in _real_parts(tf.stack(group))]
        return tf.reduce_all([True, *(tf.reduce_all(tf.math.is_finite(part)) for part in parts)])

    def counts(self) -> Any:
        """Return an int64 tensor `(tensors, 3)`: NaN entries, infinite entries, all entries."""
        if not self._parts:
            return tf.zeros((0, 3), tf.int64)
        joined = {places: tensor for places, tensor in self._parts.items() if places[1:]}
        single = [(place, t) for (place, *more), t in self._parts.items() if not more]
        for numbers, group in _alike((t for _, t in single), LARGE).items():
            joined[tuple(single[number][0] for number in numbers)] = tf.stack(group)
        order = np.argsort([place for places in joined for place in places])
        return tf.gather(tf.concat(list(map(_counts, joined.values())), 0), order)


def settled(sum_: Any, finite: Any) -> Any:
    """Return a sum, or a sixteenth of its dtype's largest number if it overflowed although
    `finite`.

    The host adds the sums of one verdict, which cannot overflow with a sixteenth of each.
    """
    overflowed = finite & ~tf.math.is_finite(sum_)
    return tf.where(overflowed, tf.constant(sum_.dtype.max / 16, sum_.dtype), sum_)


def all_finite(tensors: Iterable[Any]) -> Any:
    """Return whether all entries are finite, a scalar bool."""
    return Reading(tensors).all_finite()


def _counts(group: Any) -> Any:
    """Return the rows of `Reading.counts` for each entry of the first axis."""
    number = group.shape[0]

    def count(test: Callable[[Any], Any]) -> Any:
        bad = functools.reduce(tf.logical_or, map(test, _real_parts(group)))
        return tf.reduce_sum(tf.reshape(tf.cast(bad, tf.int64), (number, -1)), 1)

    size = tf.fill([number], tf.size(group, tf.int64) // number)
    return tf.stack([count(tf.math.is_nan), count(tf.math.is_inf), size], 1)


def _alike(tensors: Iterable[Any], large: int) -> dict[tuple[int, ...], list[Any]]:
    """Return tensors of one dtype and shape together, by their places; a `large` one alone."""
    found: dict[Any, tuple[list[int], list[Any]]] = {}
    for place, tensor in enumerate(tensors):
        size = tensor.shape.num_elements()
        small = size is not None and size < large
        key = (tensor.dtype, tuple(tensor.shape)) if small else place
        places, group = found.setdefault(key, ([], []))
        places.append(place)
        group.append(tensor)
    return {tuple(places): group for places, group in found.values()}


def _real_parts(tensor: Any) -> list[Any]:
    """Return a real tensor, or the real and the imaginary part of a complex one."""
    return [tf.math.real(tensor), tf.math.imag(tensor)] if tensor.dtype.is_complex else [tensor]
