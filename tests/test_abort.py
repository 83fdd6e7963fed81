"""A refusal that ends its execution with an error: used where one execution is one step, and seen by nobody."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

from keras_nanguard import NanGuard, NanGuardModel

if keras.backend.backend() != "tensorflow":
    pytest.skip("an error ends a refused step on TensorFlow alone", allow_module_level=True)

import tensorflow as tf

from keras_nanguard._step import _abort

X = np.random.default_rng(0).standard_normal((64, 8)).astype("float32")
Y = X.sum(1, keepdims=True)
BAD = X.copy()
BAD[16:24, 3] = np.nan
KEPT = np.r_[0:16, 24:64]


@pytest.fixture
def gates(monkeypatch):
    """Note each gate that is made."""
    made, real = [], _abort.gate
    monkeypatch.setattr(_abort, "gate", lambda fine: made.append(fine) or real(fine))
    return made


def network(cls=keras.Model, optimizer="adam", **compile_):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    x = layers.BatchNormalization()(layers.Dense(8, activation="tanh")(inputs))
    model = cls(inputs, layers.Dense(1, dtype="float32")(layers.Dropout(0.2)(x)))
    model.compile(optimizer, "mse", **compile_)
    return model


def values(model):
    return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]


def fit(model, x, y, guard=None):
    return model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[guard] if guard else [])


def same(one, other):
    for a, b in zip(values(one), values(other)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("compile_", "used"),
    [
        ({}, True),
        ({"steps_per_execution": 4}, False),
        ({"run_eagerly": True}, False),
        ({"jit_compile": True}, False),
    ],
)
def test_where_it_is_used(gates, compile_, used):
    guard = NanGuard(verbose=0)
    fit(network(**compile_), BAD, Y, guard)
    assert bool(gates) is used
    assert [i.step for i in guard.incidents] == [2]


@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_the_refusal_is_one_operation(gates, monkeypatch, device):
    """What a refusal does stays one operation, which a healthy step passes by; only with other devices it is taken apart."""
    devices = [*tf.config.list_logical_devices(), tf.config.LogicalDevice("/device:GPU:0", device)]
    monkeypatch.setattr(_abort.tf.config, "list_logical_devices", lambda: devices)
    guard = NanGuard(verbose=0)
    fit(network(), BAD, Y, guard)
    assert [(i.step, i.refused) for i in guard.incidents] == [(2, True)]
    operation = gates[-1].op if gates[-1].op.type == "If" else gates[-1].op.inputs[0].op
    taken_apart = operation.node_def.attr["_lower_using_switch_merge"].b
    assert operation.type == "If" and taken_apart is (device == "GPU")


def test_not_with_a_loss_scale(gates):
    """A refusal writes the loss scale, so there the conditional stays."""
    keras.config.set_dtype_policy("mixed_float16")
    fit(network(), BAD, Y, NanGuard(verbose=0))
    assert not gates


def test_not_where_assertions_are_stripped(gates):
    """TensorFlow can be told to leave assertions out of its graphs."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"debug_stripper": True})
    try:
        guard, model = NanGuard(verbose=0), network()
        fit(model, BAD, Y, guard)
    finally:
        tf.config.optimizer.set_experimental_options({"debug_stripper": False, **before})
    assert not gates
    assert [i.refused for i in guard.incidents] == [True]


def test_an_update_that_does_not_wait(gates):
    """An optimizer that steps out of the control dependencies is seen while it is traced; the conditional takes over."""

    class Free(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            with tf.control_dependencies(None):
                return super().apply(grads, trainable_variables)

    plain, guarded = network(optimizer=Free(1e-2)), network(optimizer=Free(1e-2))
    fit(plain, X[KEPT], Y[KEPT])
    guard = NanGuard(verbose=0)
    fit(guarded, BAD, Y, guard)
    assert len(gates) == 1, "tried once, and not again"
    assert [i.step for i in guard.incidents] == [2]
    same(guarded, plain)


def test_a_step_called_from_elsewhere(gates):
    """Nobody stands by to catch an error where a loop calls the train step itself: it gets none."""
    model = network(NanGuardModel)
    fit(model, X[:8], Y[:8])
    assert gates
    before = values(model)
    step = tf.function(lambda x, y: model.train_step((x, y)))
    step(tf.constant(BAD[16:24]), tf.constant(Y[16:24]))
    for a, b in zip(values(model), before):
        np.testing.assert_array_equal(a, b)


def test_an_error_of_ones_own():
    """What the user's step asserts reaches the user."""

    class Strict(keras.Model):
        def train_step(self, data):
            with tf.control_dependencies([tf.debugging.assert_less(data[0][0, 0], 100.0, message="too hot")]):
                return super().train_step(data)

    hot = X.copy()
    hot[30] = 1e3
    with pytest.raises(tf.errors.InvalidArgumentError, match="too hot"):
        fit(network(Strict), np.where(np.arange(64)[:, None] >= 24, 1e3, X).astype("float32"), Y, NanGuard(verbose=0))


class Telling(keras.Model):
    """Logs something that no metric holds."""

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "first": tf.reduce_mean(data[1])}


@pytest.mark.parametrize("first", [0, 2])
def test_logs_that_no_metric_holds(first):
    """Of a refused step they are those of the step before, and 0 where there was none."""
    bad, seen = X.copy(), []
    bad[first * 8 : first * 8 + 8] = np.inf
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["first"]))
    network(Telling).fit(bad, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[NanGuard(verbose=0), note])
    means = [float(Y[i : i + 8].mean()) for i in range(0, 64, 8)]
    means[first] = means[first - 1] if first else 0.0
    np.testing.assert_allclose(seen, means, rtol=1e-5)


def test_a_trainer_that_is_no_model(gates):
    """Keras' `Trainer` can be mixed into a layer, which has no `save`."""

    class Bare(keras.src.backend.tensorflow.trainer.TensorFlowTrainer, layers.Dense):
        def __init__(self, units):
            layers.Dense.__init__(self, units)
            keras.src.backend.tensorflow.trainer.TensorFlowTrainer.__init__(self)

    model = Bare(1)
    model.compile(keras.optimizers.SGD(1e-2), "mse")
    guard = NanGuard(verbose=0)
    fit(model, BAD, Y, guard)
    assert [i.step for i in guard.incidents] == [2]
    assert all(np.isfinite(np.asarray(v)).all() for v in model.variables)
