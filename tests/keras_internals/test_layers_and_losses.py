"""What the layers and losses of a model say about its inputs, targets, outputs and logs."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import ml_dtypes
import numpy as np
import pytest

from keras_nanguard._keras.layers import named_outputs, takes_floats
from keras_nanguard._keras.losses import logged_losses, predicted, rejected

L = keras.layers


class Looks(keras.layers.Layer):
    """A custom layer, which may use its inputs as indices."""

    def call(self, x):
        return x


@pytest.mark.parametrize(
    "layers, expected",
    [
        ([keras.Input((3,)), L.Dense(2)], True),
        ([keras.Input((3,)), keras.Sequential([keras.Input((3,)), L.Dense(2)])], True),
        ([keras.Input((3,), dtype="int64"), L.Embedding(9, 2)], False),
        ([keras.Input((3,)), L.Embedding(9, 2)], False),
        ([keras.Input((3,)), keras.Sequential([L.Embedding(9, 2)])], False),
        ([keras.Input((3,)), Looks(), L.Dense(2)], False),
    ],
)
def test_integers_in_the_inputs_are_numbers_if_no_layer_takes_ids(layers, expected):
    """Keras casts token ids to float32 by default, before an `Embedding` casts them back."""
    assert takes_floats(keras.Sequential(layers)) == expected


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float32", "float64"])
def test_mixtures_in_the_dtype_of_the_targets_are_accepted(dtype):
    """Label smoothing and mixup in any dtype, of up to four labels; but nothing beyond a few ulp."""
    loss, shares = keras.losses.BinaryCrossentropy(), np.random.default_rng(0).dirichlet(np.ones(4), 200)
    mixed = shares.astype(dtype).cumsum(axis=1, dtype=dtype)
    assert rejected(loss, np.concatenate([mixed, 1 - mixed]), 4) is None
    ulp = float(ml_dtypes.finfo("float32" if dtype == "float64" else dtype).eps)
    wrong = np.array([[0.0], [1.0], [1.0 + 8 * ulp], [-8 * ulp]], dtype)
    found = rejected(loss, wrong, 1)
    assert found.rows == (2, 3)
    assert np.array_equal(found.valid.ravel(), [0.0, 1.0, 1.0, 0.0])


def test_a_class_index_is_exact():
    found = rejected(keras.losses.SparseCategoricalCrossentropy(), np.array([0, 3, -1, 2]), 3)
    assert found.rows == (1, 2) and found.valid.tolist() == [0, 0, 0, 2]


def test_the_losses_among_the_logs():
    """`loss` alone if there is one, else all names that end in it, else nothing."""
    assert logged_losses({"loss": 1, "d_loss": 2, "accuracy": 3}) == {"loss": 1}
    assert logged_losses({"d_loss": 2, "g_loss": 4, "accuracy": 3, "lossy": 5}) == {"d_loss": 2, "g_loss": 4}
    assert logged_losses({0: 1}) == {} and logged_losses(None) == {} and logged_losses(3.0) == {}


def test_the_prediction_among_the_arguments_of_compute_loss():
    """By position, by name, or missing; Keras passes `None` if there is none."""
    assert predicted(("x", "y", "p", "w"), {}) == "p"
    assert predicted(("x",), {"y_pred": "p", "y": "y"}) == "p"
    assert predicted((), {"x": "x", "y": "y"}) is None


def test_outputs_have_the_names_of_the_model_as_far_as_it_has_some():
    model = SimpleNamespace(output_names=["a", "b"])
    assert named_outputs(model, [1, 2, 3]) == [("a", 1), ("b", 2), ("output_2", 3)]
    assert named_outputs(object(), [1]) == named_outputs(SimpleNamespace(output_names=None), [1]) == [("output_0", 1)]
