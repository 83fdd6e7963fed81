"""The sums of a verdict in JAX: one pass over each array, which XLA fuses with the computation of
the array.

No sum but that of squares overflows before its entries do: it is not finite if and only if one of
its entries is NaN or infinite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from keras_nanguard._backends.shared.rules import Operations
from keras_nanguard._core.finiteness import is_inexact

try:
    from jax import shard_map

    _UNCHECKED = {"check_vma": False}
except ImportError:  # before JAX 0.6
    from jax.experimental.shard_map import shard_map

    _UNCHECKED = {"check_rep": False}

OPERATIONS = Operations(jnp.isfinite, jnp.logical_not, jnp.where, jnp.minimum, jnp.maximum)
"""The operations for the rules of the transaction."""

LARGE = 1 << 12
"""Elements above which an array is summed separately: copying it to join it with others takes
longer than another reduction.
"""

SCALE_DOWN, SUM_LIMIT = 2.0**-100, 2.0**126
"""Factor for entries before they are summed, and bound of the sum: far below the largest float32,
3.4e38, and far above every weight.
"""


def cond(condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Return the result of one of two functions; only this one runs.

    In an eager step this is plain Python, because `jax.lax.cond` would compile both branches in
    each step.
    """
    if isinstance(condition, jax.core.Tracer):
        return jax.lax.cond(condition, then, otherwise)
    return then() if bool(condition) else otherwise()


def select(condition: Any, one: Any, other: Any) -> Any:
    """Return one of two arrays of the same dtype; in an eager step without computing a new one."""
    if isinstance(condition, jax.core.Tracer):
        return jnp.where(condition, one, other)
    return one if bool(condition) else other


def sum_dtype(arrays: Iterable[Any]) -> Any:
    """Return the dtype of the sums: float64 if the state has float64, else float32."""
    wide = any(getattr(a, "dtype", None) == jnp.float64 for a in arrays)
    return jnp.float64 if wide else jnp.float32


def _real(array: Any) -> Any:
    """Return the numbers of an array as real numbers of at least 32 bits."""
    array = jnp.abs(array) if jnp.issubdtype(array.dtype, jnp.complexfloating) else array
    return array if array.dtype.itemsize >= 4 else array.astype(jnp.float32)


def all_finite(arrays: Iterable[Any]) -> Any:
    """Return whether every entry of these arrays is finite."""
    finite = [jnp.all(jnp.isfinite(array)) for array in arrays if is_inexact(array)]
    return jnp.all(jnp.stack(finite)) if finite else jnp.ones((), bool)


def _sum(arrays: Iterable[Any], dtype: Any) -> Any:
    sums = [jnp.sum(array).astype(dtype) for array in arrays]
    return functools.reduce(jnp.add, sums) if sums else jnp.zeros((), dtype)


def add(scalars: Sequence[Any], dtype: Any) -> Any:
    """Return the sum of a few small arrays (losses), 0 for none; a sum that overflows is
    `finfo.max`.
    """
    arrays = [_real(jnp.asarray(scalar)) for scalar in scalars]
    number, largest = _sum(arrays, dtype), jnp.finfo(dtype).max
    return jnp.where(all_finite(arrays), jnp.clip(number, -largest, largest), number)


def _grouped(arrays: Iterable[Any]) -> list[Any]:
    """Return the arrays that can be bad; the small ones are joined, because one pass is faster."""
    large: list[Any] = []
    small: list[Any] = []
    for array in map(_real, filter(is_inexact, arrays)):
        (small if array.size < LARGE else large).append(array)
    if len(small) < 2 or len({array.dtype for array in small}) > 1:
        return [*large, *small]
    joined = jnp.concatenate([jnp.ravel(array) for array in small])
    return [*large, jax.lax.optimization_barrier(joined)]  # or XLA sums up each separately


def squares(arrays: Iterable[Any], dtype: Any) -> Any:
    """Return half the sum of the squares of all entries.

    The square of a finite entry can overflow: that of 1e20 does in float32.
    """
    # Adam squares its gradients, too. Without the barrier XLA shares these squares and stores them:
    # with 15M parameters a tenth of the time of a step on a CPU.
    read = jax.lax.optimization_barrier(_grouped(arrays))
    return 0.5 * _sum([jnp.square(array) for array in read], dtype)


def total(arrays: Iterable[Any], dtype: Any) -> Any:
    """Return the sum of all entries, at most `SUM_LIMIT` in magnitude; NaN if one is not
    finite.
    """
    part, limit = _sum(map(_parts, _grouped(arrays)), dtype), SUM_LIMIT * SCALE_DOWN
    return jnp.minimum(jnp.maximum(part, -limit), limit) / SCALE_DOWN + part * 0


def _parts(array: Any) -> Any:
    """Return `SCALE_DOWN` of the sums over the last axis of an array.

    As a product with a constant vector, which XLA computes on a CPU in the time of a plain sum; for
    `array * SCALE_DOWN` it stores a constant of the size of the array.
    """
    if array.ndim < 2:
        return array * SCALE_DOWN
    part = jnp.full(array.shape[-1:], SCALE_DOWN, array.dtype)
    # A lower precision, as of TF32, rounds the largest finite numbers to infinity.
    return jnp.dot(array, part, precision=jax.lax.Precision.HIGHEST)


def mesh_of(state: Any) -> Any:
    """Return the mesh over which several processes share a state; `None` for one process."""
    if jax.process_count() == 1:
        return None
    places = (getattr(leaf, "sharding", None) for leaf in jax.tree_util.tree_leaves(state))
    meshes = (getattr(place, "mesh", None) for place in places)
    return next((mesh for mesh in meshes if mesh is not None), None)


def of_all(number: Any, mesh: Any) -> Any:
    """Return the mean of a number over all devices, each of which has computed it from its own copy
    of an array.

    So NaN in the copy of one process is NaN in the mean of all of them. It takes one message.

    Args:
        number: a scalar.
        mesh: the result of `mesh_of`; `None` returns the number unchanged.
    """
    if mesh is None:
        return number
    whole = jax.sharding.PartitionSpec()
    mean = shard_map(
        lambda own: jax.lax.psum(own / mesh.size, mesh.axis_names),
        mesh=mesh,
        in_specs=whole,
        out_specs=whole,
        **_UNCHECKED,
    )
    return mean(number)


def counts(arrays: Sequence[Any]) -> Any:
    """Return an int32 array `(arrays, 2)`: how many entries of each are NaN, and infinite.

    Both numbers come from one reduction. XLA would store the operand of a sum of its own, which is
    as large as the array.
    """
    numbers = [_bad_entries(jnp.atleast_1d(array)) for array in arrays]
    return jnp.stack(numbers) if numbers else jnp.zeros((0, 2), jnp.int32)


def _bad_entries(array: Any) -> Any:
    bad = jnp.isnan(array).astype(jnp.int32), jnp.isinf(array).astype(jnp.int32)
    none = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    dimensions = tuple(range(array.ndim))
    return jnp.stack(jax.lax.reduce(bad, none, _added, dimensions))


def _added(one: Any, other: Any) -> Any:
    return one[0] + other[0], one[1] + other[1]
