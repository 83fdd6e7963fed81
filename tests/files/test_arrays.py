"""The counts agree with NumPy, value by value, for every float dtype."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as hnp

from keras_nanguard._core.atomic_files import save_arrays, typed
from keras_nanguard._files.problems import ArrayStats
from keras_nanguard._files.scan import _PIECE_VALUES, FLOAT16_MAX, statistics
from keras_nanguard._files.stored import float_name, named_dtype, tiles

DTYPES = (
    "float16",
    "float32",
    "float64",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    ">f4",
    "complex64",
)


def oracle(array, limit=math.inf):
    """Count with plain NumPy in float64."""
    parts = array.view(array.real.dtype) if array.dtype.kind == "c" else array
    finfo = ml_dtypes.finfo(
        parts.dtype.newbyteorder("=") if parts.dtype.kind == "f" else parts.dtype
    )
    tiny = float(finfo.smallest_normal)
    values = parts.astype(np.float64).reshape(-1)
    finite = values[np.isfinite(values)]
    return {
        "size": values.size,
        "nan": int(np.isnan(values).sum()),
        "posinf": int(np.isposinf(values).sum()),
        "neginf": int(np.isneginf(values).sum()),
        "zeros": int((values == 0).sum()),
        "denormals": int(((np.abs(finite) < tiny) & (finite != 0)).sum()),
        "beyond_float16": int((np.abs(finite) > FLOAT16_MAX).sum()),
        "beyond_limit": int((np.abs(finite) > limit).sum()),
        "min": finite.min() if finite.size else None,
        "max": finite.max() if finite.size else None,
    }


def agrees(array, limit=None):
    found = statistics([array], limit)
    wanted = oracle(array, math.inf if limit is None else limit)
    assert {name: getattr(found, name) for name in wanted} == wanted
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=40)
def test_counts_agree_with_numpy_on_every_bit_pattern(dtype, data):
    """Any bytes, read as any float dtype, are counted as by NumPy."""
    kind = named_dtype(dtype)
    raw = data.draw(st.binary(min_size=0, max_size=64 * kind.itemsize))
    array = np.frombuffer(raw[: len(raw) // kind.itemsize * kind.itemsize], kind)
    agrees(array, data.draw(st.sampled_from((None, 1.0, 1e-30, 7e4, 1e300))))


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_every_sixteen_bit_float_is_counted(dtype):
    """All 65536 patterns of a 16-bit float are distinguished, denormals and NaN payloads
    included."""
    agrees(np.arange(65536, dtype=np.uint16).view(named_dtype(dtype)), 1.0)


@pytest.mark.parametrize("dtype", ("float16", "float32", "float64", "bfloat16"))
@pytest.mark.parametrize(
    ("bad", "name"), [(np.nan, "nan"), (np.inf, "posinf"), (-np.inf, "neginf")]
)
def test_the_bad_value_is_found_at_any_position(dtype, bad, name):
    """One bad value is found at the first, the last and every inner border of the pieces."""
    size = _PIECE_VALUES * 2 + 3
    for place in (0, 1, _PIECE_VALUES - 1, _PIECE_VALUES, 2 * _PIECE_VALUES, size - 1):
        array = np.ones(size, named_dtype(dtype))
        array[place] = bad
        found = statistics([array])
        assert (getattr(found, name), found.nonfinite) == (1, 1)


def test_large_finite_values_are_not_infinities():
    """A sum that overflows proves nothing: values near the largest float are finite, and their mean
    is right.
    """
    array = np.full(1000, np.finfo(np.float32).max, np.float32)
    found = agrees(array)
    assert found.nonfinite == 0
    assert found.mean == pytest.approx(float(np.finfo(np.float32).max))


@pytest.mark.parametrize("dtype", ("float16", "float32", "float64", "bfloat16"))
def test_the_mean_is_that_of_the_finite_values(dtype):
    """The mean excludes NaN and Inf and agrees with float64 to the precision of float32."""
    array = np.random.default_rng(0).normal(3.0, 1.0, 200_000).astype(named_dtype(dtype))
    array[::1000] = np.nan
    finite = array.astype(np.float64)[np.isfinite(array.astype(np.float64))]
    assert statistics([array]).mean == pytest.approx(finite.mean(), rel=1e-5)


def test_constant_and_all_zero_are_reported():
    """An array of one repeated number is constant; of zeros of either sign it is all zero; one NaN
    makes it neither.
    """
    assert statistics([np.full(5, 2.5)]).constant
    assert statistics([np.array([0.0, -0.0])]).all_zero
    assert not statistics([np.array([1.0, 2.0])]).constant
    assert not statistics([np.array([2.0, 2.0, np.nan])]).constant
    assert not statistics([np.array([3.0])]).constant
    assert statistics([np.zeros(0)]) == ArrayStats()


def test_only_floats_can_be_non_finite():
    """Integers, bools, text and records have no float name; float8 and bfloat16 do, though NumPy
    calls them void."""
    assert [
        float_name(np.dtype(kind)) for kind in ("int32", "bool", "uint8", "S3", "U2", "V2", "M8[s]")
    ] == [None] * 7
    assert float_name(np.dtype([("a", "f4")])) is None
    assert float_name(named_dtype("bfloat16")) == "bfloat16"
    assert named_dtype("float8_nonsense") is None
    assert named_dtype("os.system") is None


@given(st.data(), hnp.array_shapes(min_dims=0, max_dims=4, max_side=7))
@settings(max_examples=100)
def test_tiles_cover_an_array_once(data, shape):
    """Every value is in one tile, for any shape of the tiles."""
    tile = tuple(data.draw(st.integers(1, length + 1)) for length in shape)
    met = np.zeros(shape, int)
    for part in tiles(shape, tile):
        met[part] += 1
        assert met[part].size <= math.prod(tile)
    assert (met == 1).all()


def test_saved_arrays_keep_their_names_and_dtypes(tmp_path):
    """An array may have any name, and nothing else is in the file; NumPy before 2.1 can also read
    it.
    """
    arrays = {"file": np.ones(2), "0": np.ones(3, ml_dtypes.bfloat16), "a/b": np.array("text")}
    save_arrays(tmp_path / "saved.npz", arrays)
    with np.load(tmp_path / "saved.npz", allow_pickle=False) as found:
        assert set(found) == set(arrays)
        for name, array in arrays.items():
            read = typed(found[name], array.dtype.name)
            assert read.dtype == array.dtype and (read == array).all()
