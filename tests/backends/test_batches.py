"""The arrays of a batch by their roles, the replay of a step on them, and the losses in its logs."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.replay import ReplayableStep

ONE, OTHER = np.ones((2, 3), "float32"), np.zeros((2, 3), "float32")


def test_an_array_that_is_passed_twice_has_the_role_of_each_place():
    """As in an autoencoder, `step(x, x)`."""
    seen = []
    changed = batches.mapped(((ONE, ONE), {"mask": ONE}), lambda role, v: seen.append(role) or v)
    assert sorted(seen) == ["inputs", "inputs", "targets"] and changed == ((ONE, ONE), {"mask": ONE})
    (data,) = batches.mapped([(ONE, ONE)], lambda role, v: OTHER if role == "targets" else v)
    assert data[0] is ONE and data[1] is OTHER


def test_arrays_and_tensors_stay_what_they_are():
    """A step that takes arrays receives arrays; strings and gaps are left alone."""
    tensor = keras.ops.convert_to_tensor(ONE)
    given = [{"a": ONE, "b": tensor, "c": "text", "d": None}]
    changed = batches.mapped(given, lambda role, v: keras.ops.multiply(v, 2.0))[0]
    assert isinstance(changed["a"], np.ndarray) and keras.ops.is_tensor(changed["b"])
    assert float(changed["a"][0, 0]) == float(changed["b"][0, 0]) == 2.0
    assert (changed["c"], changed["d"]) == ("text", None)


@pytest.mark.requires_backend("tensorflow", "torch", reason="JAX has no float64 by default")
@pytest.mark.parametrize("dtype, explodes", [("float32", True), ("float64", False)])
def test_the_sum_of_squares_overflows_in_its_own_dtype(dtype, explodes):
    """A replay without its update reports gradients of 1e20 in float32 only."""
    model = keras.Sequential([keras.Input((4,), dtype=dtype), layers.Dense(1, dtype=dtype)])
    model.compile("sgd", lambda y, prediction: 1e20 * (prediction - y))
    x = keras.ops.convert_to_tensor(np.ones((8, 4)), dtype)
    run = ReplayableStep.of(model, [model.optimizer]).run([(x, x[:, :1])])
    assert (run.first, run.finite) == (("gradients", False) if explodes else ("", True))


def test_the_losses_among_the_logs():
    """`loss` alone if there is one, else all names that end in it, else nothing."""
    logs = {"d_loss": 2.0, "accuracy": 3.0, "g_loss": 4.0, "lossy": 5.0, 0: 6.0}
    assert list(map(float, batches.losses_in_logs({"loss": 1.0, **logs}))) == [1.0]
    assert list(map(float, batches.losses_in_logs(logs))) == [2.0, 4.0]
    assert [batches.losses_in_logs(none) for none in ({0: 1.0}, None, 3.0)] == [[], [], []]
