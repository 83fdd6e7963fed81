"""What the layers and losses of a model say about its inputs and outputs."""

from __future__ import annotations

from types import SimpleNamespace

import keras
import pytest

from keras_nanguard._keras.layers import named_outputs, takes_floats
from keras_nanguard._keras.losses import predicted

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


def test_the_prediction_among_the_arguments_of_compute_loss():
    """By position, by name, or missing; Keras passes `None` if there is none."""
    assert predicted(("x", "y", "p", "w"), {}) == "p"
    assert predicted(("x",), {"y_pred": "p", "y": "y"}) == "p"
    assert predicted((), {"x": "x", "y": "y"}) is None


def test_outputs_have_the_names_of_the_model_as_far_as_it_has_some():
    model = SimpleNamespace(output_names=["a", "b"])
    assert named_outputs(model, [1, 2, 3]) == [("a", 1), ("b", 2), ("output_2", 3)]
    assert named_outputs(object(), [1]) == named_outputs(SimpleNamespace(output_names=None), [1]) == [("output_0", 1)]
