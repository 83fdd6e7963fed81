"""The sums of a step on JAX, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_nanguard._backends.jax import reductions
from keras_nanguard._core.finiteness import is_inexact

SHAPES = [(3,), (1024, 1024), (1100, 1000), (1_050_001,), (7, 150_001), (1, 2, 525_000)]
"""Small sizes, large ones that are multiples of XLA's windows of 32, and others."""


@pytest.mark.parametrize("shape", SHAPES)
def test_squares(shape):
    """Each entry counts once; one that is not finite shows anywhere."""
    values = np.random.default_rng(0).standard_normal(shape).astype("float32")
    squares = jax.jit(lambda *arrays: reductions.squares(arrays, jnp.float32))
    expected = 0.5 * np.square(values, dtype="float64").sum()
    np.testing.assert_allclose(squares(values), expected, rtol=1e-5)
    np.testing.assert_allclose(squares(values, np.ones(4, "float32")), expected + 2, rtol=1e-5)
    for place, bad in [(0, np.nan), (-1, np.inf), (values.size // 2, -np.inf)]:
        spoiled = values.copy()
        spoiled.flat[place] = bad
        assert np.isnan(squares(spoiled)) if np.isnan(bad) else np.isposinf(squares(spoiled))


HUGE = {
    "largest numbers": np.full(10, np.finfo("float32").max, "float32"),
    "of both signs": np.array([3e38, -3e38, 3e38], "float32"),
    "1e20 in a large array": np.full(1 << 17, 1e20, "float32"),
    "float16": np.full(9, 65504.0, "float16"),
}


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("numbers", HUGE)
@pytest.mark.parametrize("how", ["total", "add"])
def test_no_sum_overflows_before_its_entries(how, numbers, jit):
    """A sum is finite if and only if all entries are, for entries of any size."""
    sums = lambda array: getattr(reductions, how)([array], jnp.float32)  # noqa: E731
    of = jax.jit(sums) if jit else sums
    values = HUGE[numbers]
    assert np.isfinite(of(jnp.asarray(values)))
    for bad in (np.nan, np.inf, -np.inf):
        spoiled = values.copy()
        spoiled[len(values) // 2] = bad
        assert not np.isfinite(of(jnp.asarray(spoiled)))


@pytest.mark.parametrize("jit", [True, False])
def test_a_total_is_the_sum_up_to_its_bound(jit):
    """It cannot overflow, and is NaN if an entry is not finite."""
    sums = lambda array: reductions.total([array], jnp.float32)  # noqa: E731
    of = jax.jit(sums) if jit else sums
    for entries in ([1.5, -2.0], [1e30, 1e30], [-3e30], [3e38, 3e38], [-3e38, -3e38]):
        expected = np.clip(sum(entries), -reductions.SUM_LIMIT, reductions.SUM_LIMIT)
        assert float(of(jnp.array(entries, jnp.float32))) == pytest.approx(expected, rel=1e-6)
    large = jnp.full(1_000_000, 3e38, jnp.float32)
    assert [float(of(sign * large)) for sign in (1, -1)] == [2.0**126, -(2.0**126)]
    for bad in (np.nan, np.inf, -np.inf):
        assert np.isnan(of(jnp.array([1.0, bad], jnp.float32)))


def test_which_entries_can_be_bad():
    """Those of dtypes that JAX calls inexact; no random keys, gradients of integers and Python numbers."""
    kinds = [kind for kind in vars(jnp).values() if type(kind) is type(jnp.float32)]
    arrays = [np.zeros(1, kind.dtype) for kind in kinds]
    found = [array for array in arrays if is_inexact(array)]
    assert found == [array for array in arrays if jnp.issubdtype(array.dtype, jnp.inexact)] and len(found) > 6
    assert not any(map(is_inexact, [jax.random.key(0), np.zeros(2, jax.dtypes.float0), 1.0, None]))
