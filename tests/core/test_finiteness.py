"""The one definition of "finite", compared with NumPy entry by entry."""

import tracemalloc
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st

from keras_nanguard._core import finiteness

FLOATS = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128")
OTHERS = ("int8", "uint8", "int32", "int64", "bool", "string")
SIZES = (1, 7, 4095, 4096, 4097, 9000)
"""Sizes below and above the one from which a dot product is used."""


def array(dtype, values):
    return np.asarray(values).astype(getattr(ml_dtypes, dtype, dtype))


@pytest.mark.parametrize("dtype", [*FLOATS, *OTHERS])
def test_the_limits_are_those_of_the_dtype(dtype):
    """The smallest normal and the largest number; nothing is small or large in another dtype."""
    real = dtype in FLOATS[:6]
    info = (np if dtype in ("float32", "float64") else ml_dtypes).finfo(dtype) if real else None
    known = (float(info.smallest_normal), float(info.max)) if real else (0.0, np.inf)
    assert finiteness.float_limits(dtype) == known and finiteness.is_real(dtype) is real
    if dtype != "string":
        given = np.dtype(getattr(ml_dtypes, dtype, dtype))
        assert finiteness.dtype_name(given) == finiteness.dtype_name(f"torch.{dtype}") == dtype


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_dtype_that_can_be_bad_is_found_bad(dtype):
    bad = array(dtype, [1.0, np.nan, 2.0])
    assert not finiteness.is_finite(bad) and finiteness.counts(bad) == (1, 0, 3)
    assert finiteness.is_finite(array(dtype, [1.0, 0.5])) and finiteness.counts(array(dtype, [1.0, 0.5])) == (0, 0, 2)
    if dtype != "float8_e4m3fn":
        assert finiteness.counts(array(dtype, [np.inf, -np.inf, 1.0, 2.0])) == (0, 2, 4)


@given(
    st.sampled_from(SIZES),
    st.sampled_from([np.nan, np.inf, -np.inf, complex(0, np.inf), complex(np.nan, 0)]),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from(["float32", "float64", "complex64"]),
)
def test_one_bad_entry_is_found_at_any_position(size, bad, place, dtype):
    """Arrays of either size, the first and the last entry, the real and the imaginary part."""
    values = np.random.default_rng(0).normal(size=size).astype(dtype)
    assert finiteness.is_finite(values)
    values[int(place * size)] = bad if dtype == "complex64" else np.real(bad) + np.imag(bad)
    assert not finiteness.is_finite(values)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "complex64", "int32", "float16"])
def test_large_finite_entries_are_finite_and_say_nothing(size, dtype):
    """A sum of squares that overflows decides nothing, and NumPy's warnings are suppressed."""
    largest = np.iinfo(dtype).max if dtype == "int32" else float(np.finfo(dtype).max)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert finiteness.is_finite(np.full(size, largest, dtype))


@given(st.lists(st.sampled_from([0.0, 1.5, -3.0, np.nan, np.inf, -np.inf]), max_size=12), st.sampled_from(["float32", "complex64"]))
def test_counts_are_those_of_numpy(values, dtype):
    given = np.asarray(values, dtype)
    assert finiteness.counts(given) == (int(np.isnan(given).sum()), int(np.isinf(given).sum()), given.size)
    assert finiteness.is_finite(given) is bool(np.isfinite(given).all())


LAYOUTS = {
    "rows": lambda values: values,
    "columns": lambda values: np.asfortranarray(values),
    "transposed": lambda values: values.T,
    "every other column": lambda values: np.repeat(values, 2, axis=1)[:, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_large_arrays_are_read_in_pieces(dtype, layout):
    """All of three million entries count, in any order, with less than a byte for each."""
    values = np.zeros((3000, 1000), "float32")
    values[0, 0], values[1500, 7], values[-1, -1] = 2.0, -9.0, 3.0
    whole = LAYOUTS[layout](array(dtype, values))
    values[0, 1], values[1501, :3], values[-1, -2] = np.nan, np.inf, np.nan
    bad = LAYOUTS[layout](array(dtype, values))
    tracemalloc.start()
    try:
        assert finiteness.counts(bad) == (2, 3, 3_000_000) and not finiteness.is_finite(bad)
        assert finiteness.counts(whole) == (0, 0, 3_000_000) and finiteness.is_finite(whole) and finiteness.largest(whole) == 9.0
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()
