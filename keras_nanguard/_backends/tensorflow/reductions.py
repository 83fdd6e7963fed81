"""The sums of `keras_nanguard._core.finiteness` as TensorFlow operations: one pass over each tensor.

`tf.nn.l2_loss` and `tf.reduce_sum` run near memory bandwidth (17 and 22 GB/s on two cores, where comparing each entry
with `tf.math.is_finite` reaches 13).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from keras_nanguard._backends.shared.proof import reading_of
from keras_nanguard._backends.shared.rules import PART, Operations, SlotReading, bounded_sum, full_read_is_due
from keras_nanguard._backends.tensorflow import graph
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.train_state import TrainState

__all__ = ["OPERATIONS", "add", "can_be_bad", "counts", "exact", "kind", "squares", "total", "update_sums"]

OPERATIONS = Operations(tf.math.is_finite, tf.logical_not, tf.where, tf.minimum, tf.maximum)
"""What the rules of the transaction need."""

LARGE = 1 << 16
"""Elements from which a tensor is read where it stands rather than added up with others of its shape."""


def can_be_bad(tensor: Any) -> bool:
    """Whether entries of this tensor or variable can be NaN or Inf."""
    dtype = tf.as_dtype(tensor.dtype)
    return bool(dtype.is_floating or dtype.is_complex)


def kind(variables: Iterable[Any]) -> Any:
    """Return the dtype of the sums: float64 where the state has some, else float32."""
    return tf.float64 if any(str(v.dtype) == "float64" for v in variables) else tf.float32


def _dense(tensor: Any) -> Any:
    """Return the numbers of a tensor, of `IndexedSlices`, of a sparse or a ragged tensor; none of less than 32 bit."""
    if isinstance(tensor, graph.Untracked):
        tensor = tensor.read_value()
    if isinstance(tensor, (tf.IndexedSlices, tf.SparseTensor)):
        tensor = tensor.values
    elif isinstance(tensor, tf.RaggedTensor):
        tensor = tensor.flat_values
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype.is_complex:
        return tf.abs(tensor)
    return tensor if tensor.dtype.size >= 4 else tf.cast(tensor, tf.float32)


def add(scalars: Sequence[Any], dtype: Any) -> Any:
    """Return the sum of scalars of this dtype, 0 where there is none."""
    if not scalars:
        return tf.zeros((), dtype)
    scalars = [s if s.shape.rank == 0 else tf.reduce_sum(s) for s in scalars]
    return tf.add_n(scalars) if len(scalars) > 1 else scalars[0]


def squares(tensors: Iterable[Any], dtype: Any) -> Any:
    """Return half the sum of the squares of all entries."""
    return add([tf.cast(tf.nn.l2_loss(_dense(t)), dtype) for t in tensors if can_be_bad(t)], dtype)


def total(tensors: Iterable[Any], dtype: Any) -> Any:
    """Return a number that is finite where all entries are, and is not where one entry is not.

    Small tensors of one shape (a weight and its moments) are added up first: an addition of finite numbers is as finite
    as their sum, and one operation fewer for each is what a step of under a millisecond can feel.
    """
    sums = []
    small: dict[Any, list[Any]] = {}
    for tensor in tensors:
        if can_be_bad(tensor):
            tensor = _dense(tensor)
            size = tensor.shape.num_elements()
            if size is None or size >= LARGE:
                sums.append(tf.cast(tf.reduce_sum(tensor), dtype))
            else:
                small.setdefault((tensor.dtype, tuple(tensor.shape)), []).append(tensor)
    for group in small.values():
        sums.append(tf.cast(tf.reduce_sum(tf.add_n(group) if len(group) > 1 else group[0]), dtype))
    return add(sums, dtype)


def exact(tensors: Iterable[Any], dtype: Any) -> Any:
    """Return their sum, bounded, where all entries are finite, and NaN where one is not: the sum of small parts cannot overflow.

    Costs a temporary for each tensor, which a step that keeps copies anyway does not feel.
    """
    parts = [tf.reduce_sum(d * tf.constant(PART, d.dtype)) for d in map(_dense, filter(can_be_bad, tensors))]
    part = add([tf.cast(p, dtype) for p in parts], dtype)
    return bounded_sum(OPERATIONS, part)


def counts(tensors: Sequence[Any]) -> Any:
    """Return an int64 tensor `(len(tensors), 3)`: NaN entries, infinite entries, all entries."""
    if not tensors:
        return tf.zeros((0, 3), tf.int64)
    return tf.stack([_count(tensor) for tensor in tensors])


def _count(tensor: Any) -> Any:
    tensor = _dense(tensor)
    size = tf.size(tensor, tf.int64)
    if not tensor.dtype.is_floating:
        return tf.stack([tf.zeros_like(size), tf.zeros_like(size), size])
    nan = tf.math.count_nonzero(tf.math.is_nan(tensor))
    return tf.stack([nan, tf.math.count_nonzero(tf.math.is_inf(tensor)), size])


def update_sums(train_state: TrainState, records: Sequence[Any], gradients: Any, dtype: Any) -> tuple[Any, Any]:
    """Return the sums over the updated weights and the slots, after the update; which slots are read is in `SlotReading`."""
    together = list({id(v): keras_variables.native(v) for record in records for v in record.variables}.values())
    sums = []
    listed = {id(v) for v in train_state.slots}
    for optimizer in {id(r.optimizer): r.optimizer for r in records}.values():
        slots = [v.value for v in optimizer.variables if id(v) in listed and can_be_bad(v.value)]
        reading = reading_of(optimizer, [(v.shape.num_elements(), v.dtype.size) for v in slots])
        if reading is SlotReading.WITH_WEIGHTS:
            together += slots
        elif reading is SlotReading.EVERY_STEP:
            sums.append(total(slots, dtype))
        else:
            due = full_read_is_due(OPERATIONS, keras_optimizers.inner(optimizer).iterations.value, gradients)
            sums.append(tf.cond(due, lambda v=slots: total(v, dtype), lambda: tf.zeros((), dtype)))
    return total(together, dtype), add(sums, dtype)
