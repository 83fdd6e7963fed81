"""What the layers of a model say about its inputs."""

from __future__ import annotations

import keras
import pytest

from keras_nanguard._keras.layers import takes_floats

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
