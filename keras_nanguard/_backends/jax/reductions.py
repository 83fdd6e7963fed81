"""The sums of `keras_nanguard._core.finiteness` in JAX: one pass over each array, which XLA fuses with what made the array."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from keras_nanguard._backends.shared.proof import reading_of
from keras_nanguard._backends.shared.rules import PART, Operations, SlotReading, bounded_sum, full_read_is_due

__all__ = ["OPERATIONS", "add", "can_be_bad", "counts", "exact", "kind", "squares", "total", "update_sums"]

OPERATIONS = Operations(jnp.isfinite, jnp.logical_not, jnp.where, jnp.minimum, jnp.maximum)
"""What the rules of the transaction need."""

LARGE = 1 << 16
"""Elements from which an array is read where it stands rather than joined with others."""


def can_be_bad(array: Any) -> bool:
    """Whether entries of this array can be NaN or Inf."""
    dtype = getattr(array, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


def kind(arrays: Iterable[Any]) -> Any:
    """Return the dtype of the sums: float64 where the state has some, else float32."""
    wide = any(getattr(a, "dtype", None) == jnp.float64 for a in arrays)
    return jnp.float64 if wide else jnp.float32


def _real(array: Any) -> Any:
    """Return the numbers of an array, none of less than 32 bit, none complex."""
    array = jnp.abs(array) if jnp.issubdtype(array.dtype, jnp.complexfloating) else array
    return array if array.dtype.itemsize >= 4 else array.astype(jnp.float32)


def add(scalars: Sequence[Any], dtype: Any) -> Any:
    """Return the sum of arrays as a scalar of this dtype, 0 where there is none."""
    sums = [jnp.sum(_real(jnp.asarray(scalar))).astype(dtype) for scalar in scalars]
    return functools.reduce(jnp.add, sums) if sums else jnp.zeros((), dtype)


def _grouped(arrays: Iterable[Any]) -> list[Any]:
    """Return the arrays that can be bad, with the small ones joined: reading one is as fast as reading any of them."""
    large: list[Any] = []
    small: list[Any] = []
    for array in map(_real, filter(can_be_bad, arrays)):
        (small if array.size < LARGE else large).append(array)
    if len(small) < 2 or len({array.dtype for array in small}) > 1:
        return [*large, *small]
    joined = jnp.concatenate([jnp.ravel(array) for array in small])
    return [*large, jax.lax.optimization_barrier(joined)]  # or XLA sums up each by itself, and then the sums


def squares(arrays: Iterable[Any], dtype: Any) -> Any:
    """Return half the sum of the squares of all entries."""
    return 0.5 * add([jnp.square(array) for array in _grouped(arrays)], dtype)


def total(arrays: Iterable[Any], dtype: Any) -> Any:
    """Return a number that is finite where all entries are (unless their sum overflows), and is not where one is not."""
    return add(_grouped(arrays), dtype)


def exact(arrays: Iterable[Any], dtype: Any) -> Any:
    """Return their sum, bounded, where all entries are finite, and NaN where one is not: the sum of small parts cannot overflow."""
    part = add([array * PART for array in _grouped(arrays)], dtype)
    return bounded_sum(OPERATIONS, part)


def counts(arrays: Sequence[Any], dtype: Any) -> Any:
    """Return an array `(len(arrays), 2)`: NaN entries and infinite entries of each."""
    if not arrays:
        return jnp.zeros((0, 2), dtype)
    return jnp.stack([_count(array) for array in arrays]).astype(dtype)


def _count(array: Any) -> Any:
    if not can_be_bad(array):
        return jnp.zeros((2,), jnp.int32)
    return jnp.stack([jnp.isnan(array).sum(dtype=jnp.int32), jnp.isinf(array).sum(dtype=jnp.int32)])


def update_sums(
    optimizer: Any, weights: Sequence[Any], slots: Sequence[Any], turn: Any, gradients: Any, dtype: Any, total: Callable[..., Any]
) -> tuple[Any, Any]:
    """Return the sums over updated weights and slots of one optimizer, as `(weights, slots)`; `SlotReading` says when slots are read.

    Args:
        optimizer: the outermost optimizer.
        weights: the updated weights.
        slots: the updated slots that can be bad.
        turn: the number of this update, `None` where it is not known.
        gradients: half the sum of squares of the gradients.
        dtype: of the sums.
        total: how to sum, `total` or `exact`.
    """
    reading = reading_of(optimizer, [(s.size, s.dtype.itemsize) for s in slots], counted=turn is not None)
    if reading is SlotReading.WITH_WEIGHTS:
        return total([*weights, *slots], dtype), jnp.zeros((), dtype)
    if reading is SlotReading.EVERY_STEP:
        return total(weights, dtype), total(slots, dtype)
    due = full_read_is_due(OPERATIONS, turn, gradients)
    return total(weights, dtype), jax.lax.cond(due, lambda: total(slots, dtype), lambda: jnp.zeros((), dtype))
