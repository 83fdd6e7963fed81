"""Refusals in compiled steps with unusual behaviour."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support import zoo

from keras_nanguard import NanGuard

X = np.random.default_rng(0).standard_normal((64, 8)).astype("float32")
Y = X.sum(1, keepdims=True)
BAD = X.copy()
BAD[16:24, 3] = np.nan
KEPT = np.r_[0:16, 24:64]


def network(cls=keras.Model, optimizer="adam", **compile_):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    x = layers.BatchNormalization()(layers.Dense(8, activation="tanh")(inputs))
    model = cls(inputs, layers.Dense(1, dtype="float32")(layers.Dropout(0.2)(x)))
    model.compile(optimizer, "mse", **compile_)
    return model


def fit(model, x, y, guard=None):
    return model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[guard] if guard else [])


def test_an_update_that_does_not_wait():
    """An optimizer outside of all control dependencies is refused like any other."""

    class Free(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            with tf.control_dependencies(None):
                return super().apply(grads, trainable_variables)

    plain, guarded = network(optimizer=Free(1e-2)), network(optimizer=Free(1e-2))
    fit(plain, X[KEPT], Y[KEPT])
    guard = NanGuard(verbose=0)
    fit(guarded, BAD, Y, guard)
    assert [i.step for i in guard.incidents] == [2]
    ends = [[*model.variables, *model.optimizer.variables] for model in (guarded, plain)]
    zoo.assert_same(*ends)


def test_an_error_of_the_user():
    """An assertion in the user's step reaches the user."""

    class Strict(keras.Model):
        def train_step(self, data):
            with tf.control_dependencies([tf.debugging.assert_less(data[0][0, 0], 100.0, message="too hot")]):
                return super().train_step(data)

    hot = X.copy()
    hot[30] = 1e3
    with pytest.raises(tf.errors.InvalidArgumentError, match="too hot"):
        fit(network(Strict), np.where(np.arange(64)[:, None] >= 24, 1e3, X).astype("float32"), Y, NanGuard(verbose=0))


class Telling(keras.Model):
    """Logs a value without a metric."""

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "first": tf.reduce_mean(data[1])}


def test_logs_that_no_metric_holds():
    """After a refused step they are those of the previous one, or the worst number."""
    bad, seen = BAD.copy(), []
    bad[:8] = np.inf
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["first"]))
    network(Telling).fit(bad, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[NanGuard(verbose=0), note])
    means = [float(Y[i : i + 8].mean()) for i in range(0, 64, 8)]
    means[0], means[2] = float(np.finfo("float32").max), means[1]
    np.testing.assert_allclose(seen, means, rtol=1e-5)


def test_a_trainer_that_is_not_a_model():
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
