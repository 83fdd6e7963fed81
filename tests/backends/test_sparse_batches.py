"""Sparse batches are read with their zeros if these are few enough."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard
from keras_nanguard._backends import current
from keras_nanguard._keras import arrays as keras_arrays

pytestmark = pytest.mark.requires_backend("tensorflow", "jax", reason="Keras has no sparse tensors on PyTorch")

DENSE = np.float32([[0, 3, 0, 1], [0, 0, 0, 0], [5, 0, 0, 0], [0, 2, 7, 4]])


def sparse(array, padding=0):
    """Return an array as a sparse one; on JAX with places outside of it, as Keras pads."""
    places, values = np.argwhere(array), array[array != 0]
    if zoo.BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.SparseTensor(places, values, array.shape)
    from jax.experimental.sparse import BCOO

    places = np.concatenate([places, np.tile([array.shape], (padding, 1))])
    return BCOO((np.concatenate([values, np.zeros(padding, values.dtype)]), places), shape=array.shape)


@pytest.fixture
def unspread(monkeypatch, set_limit):
    """`unspread(limit)`: how many entries may be read with zeros; more are an error."""

    def refuse(*given, **named):
        raise AssertionError("a sparse batch was read with its zeros")

    def limited(size):
        set_limit("entries of a sparse batch made dense", size)
        if zoo.BACKEND == "jax":
            from jax.experimental.sparse import BCOO

            monkeypatch.setattr(BCOO, "todense", refuse)
        else:
            import tensorflow as tf

            monkeypatch.setattr(tf.sparse, "to_dense", refuse)

    return limited


def test_with_zeros():
    """A small one is read completely."""
    np.testing.assert_array_equal(keras_arrays.by_rows(sparse(DENSE, padding=3)), DENSE)


@pytest.mark.parametrize(("most", "expected"), [(12, [[3, 1, 0], [0, 0, 0], [5, 0, 0], [2, 7, 4]]), (3, [[3, 1, 5, 2, 7, 4]])])
def test_without_zeros(unspread, most, expected):
    """The stored values of a row are side by side; too many of them are in one row."""
    unspread(most)
    value = sparse(DENSE, padding=3)
    assert keras_arrays.by_rows(value).tolist() == expected
    assert keras_arrays.dense(value).ravel()[:6].tolist() == [3, 1, 5, 2, 7, 4]


@pytest.mark.parametrize("kept", [[0, 3], [2], [1], []])
def test_rows_left_out(unspread, kept):
    """Without writing a zero; on JAX other rows replace them, to keep the shape."""
    taken = np.resize(kept, 4) if zoo.BACKEND == "jax" and kept else np.array(kept, int)
    value = sparse(DENSE, padding=3)
    unspread(0)
    found = current.replay().without_rows(value, np.array(kept, int))
    places, values, shape = keras_arrays.coordinates(found)
    array = np.zeros(shape, "float32")
    array[tuple(places.T)] = values
    np.testing.assert_array_equal(array, DENSE[taken])


@pytest.mark.parametrize("most", [1, pytest.param(320, marks=pytest.mark.slow)])
def test_a_bad_value(unspread, most):
    """NaN in a batch that is not read with its zeros is refused and found, with its row."""
    scipy = pytest.importorskip("scipy.sparse", reason="SciPy is not installed")
    wide = np.zeros((zoo.BATCH * zoo.BATCHES, 60), "float32")
    wide[:, ::20] = np.abs(zoo.draw()[:, :3]) + 0.1
    wide[5 * zoo.BATCH + 2, 20] = np.nan
    model = keras.Sequential([keras.Input((60,), sparse=True), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    unspread(most)
    guard = NanGuard(verbose=0)
    settings = {"batch_size": zoo.BATCH, "shuffle": False, "verbose": 0}
    model.fit(scipy.csr_matrix(wide), np.ones((len(wide), 1), "float32"), callbacks=[guard], **settings)
    (incident,) = guard.incidents
    assert incident.diagnosis.cause == "input_nonfinite" and incident.batch == 5 and incident.diagnosis.samples == (2,)


@pytest.mark.requires_backend("tensorflow", reason="only TensorFlow has ragged tensors")
def test_rows_of_a_ragged_tensor():
    """A bad number, nested or not, belongs to a row, which can be removed."""
    import tensorflow as tf

    from keras_nanguard._backends.shared import batches

    for rows in ([[1.0], [], [2.0, np.nan]], [[[1.0], []], [], [[3.0], [4.0, np.nan]]]):
        batch = ((tf.ragged.constant(rows), tf.zeros((3, 1))),)
        assert [found.rows for found in batches.bad(batch, ("inputs",))] == [(2,)]
        rest = batches.without(batch, [2])
        assert batches.row_count(rest) == 2 and batches.bad(rest, ("inputs",)) == ()
