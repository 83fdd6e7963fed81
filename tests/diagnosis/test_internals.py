"""What the diagnosis uses of Keras and TensorFlow beyond their public names is still there."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops
from support import zoo

from keras_nanguard._keras import (
    layers as keras_layers,
    losses as keras_losses,
    optimizers as keras_optimizers,
)

tf = pytest.importorskip("tensorflow", reason="observes operations of TensorFlow; tests/backends/jax and /torch have their own")
from keras_nanguard._backends.tensorflow.origins import Origins  # noqa: E402


def model():
    inputs = keras.Input((4,), dtype="float16")
    h = layers.Dense(3, dtype="float16", name="low")(inputs)
    built = keras.Model(inputs, {"a": layers.Dense(1, name="a")(ops.log(h)), "b": layers.Dense(1, name="b")(h)})
    built.compile("sgd", {"a": "mse", "b": "mae"}, auto_scale_loss=False)
    return built


def test_operations_losses_and_inputs_are_found():
    built = model()
    y = np.zeros((2, 1), "float32")
    built.train_on_batch(np.ones((2, 4), "float16"), {"a": y, "b": y})
    found = [op.name.split("_")[0] for op in keras_layers.operations_of(built)]
    assert found == ["log", *["cast"] * 2 * zoo.OLD]  # the lowest Keras casts inputs by operations
    assert [loss.name for loss in keras_losses.losses_of(built)][1:] in (
        ["mse", "mae"],
        ["mean_squared_error", "mean_absolute_error"],
    )
    assert [name for name, _ in keras_losses.losses_by_output(built)] == ["a", "b"]
    assert [str(t.dtype) for t in keras_layers.symbolic_inputs(built)] == ["float16"]
    assert keras_layers.output_shapes(built) == [(None, 1), (None, 1)]


def test_a_policy_is_exchanged_and_put_back():
    layer, undo = layers.Dense(2, dtype="mixed_float16"), []
    keras_layers.replace_policy(layer, keras.DTypePolicy("float32"), ("float16",), undo)
    assert layer.compute_dtype == "float32"
    for target, name, value in reversed(undo):
        object.__setattr__(target, name, value)
    assert layer.compute_dtype == "float16"


def test_the_rate_of_the_last_step_is_reported_under_a_schedule():
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.5]))
    variable = keras.Variable([1.0])
    optimizer.apply([ops.ones(1)], [variable])
    assert (keras_optimizers.rate_before(optimizer), keras_optimizers.learning_rate(optimizer)) == (1.0, 0.5)


def test_tensorflow_tells_of_its_operations():
    assert Origins.available
    with Origins() as origins:
        bad = tf.math.log(tf.zeros(3)) + 1.0
    origin = origins.of(bad)
    assert (origin.op, origin.inf, origin.operands[0].zero) == ("Log", 3, True)
    assert "test_internals.py" in origin.line
    before = origins.count
    tf.math.log(tf.zeros(3))
    assert origins.count == before


def test_what_is_masked_away_is_not_blamed():
    x = tf.constant([0.0, 1.0])
    with Origins() as origins:
        fine = tf.where(x > 0, tf.math.log(x), 0.0)
        bad = tf.math.sqrt(fine - 1.0)
    assert origins.of(fine) is None
    assert origins.of(bad).op == "Sqrt"


def test_an_infinite_constant_is_deliberate():
    with Origins() as origins:
        masked = tf.where([True, True], tf.constant([-np.inf, -np.inf]), 0.0)
        bad = tf.nn.softmax(masked)
    assert origins.of(masked).source == "constant"
    assert origins.of(bad).op == "Softmax"
