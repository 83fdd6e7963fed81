"""A metric that is NaN although no step is bad: a line tells of it, and it ends training as in plain Keras."""

import keras
import numpy as np
from keras import layers
from support import zoo

from keras_nanguard import NanGuard

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = (X.sum(axis=1, keepdims=True) > 0).astype("float32")


def rate(y_true, y_pred):
    """0/0 in a batch without positives."""
    return keras.ops.sum(y_true * y_pred) / keras.ops.sum(y_true)


def fit(*callbacks):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1, "sigmoid")])
    model.compile("adam", "binary_crossentropy", metrics=[rate])
    y = Y.copy()
    y[:8] = 0.0
    stops = keras.callbacks.EarlyStopping("rate", mode="max", patience=2)
    history = model.fit(
        X, y, batch_size=8, epochs=6, verbose=0, shuffle=False, callbacks=[*callbacks, stops]
    )
    return history.history["rate"], model.get_weights()


def test_training_ends_as_in_plain_keras():
    """For `EarlyStopping` NaN is no improvement."""
    plain, weights = fit()
    guarded, others = fit(NanGuard(verbose=0))
    assert len(plain) == len(guarded) < 6 and np.isnan(plain).all() and np.isnan(guarded).all()
    zoo.assert_same(weights, others)


def test_told_once(capsys):
    """A line tells of it; it is no incident."""
    guard = NanGuard()
    fit(guard)
    assert not guard.incidents
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("NanGuard: the metric rate of epoch 1 is nan")


class Measures(keras.Model):
    """Has a metric that is 0/0 in each batch, and that an outer model does not list."""

    def __init__(self):
        super().__init__()
        self.dense, self.share = layers.Dense(4), keras.metrics.Mean()

    def call(self, x):
        self.share.update_state(keras.ops.sum(x) * 0.0 / keras.ops.sum(x * 0.0))
        return self.dense(x)


def test_of_a_model_within_a_model():
    """It is no statistic: the steps commit."""
    inputs, guard = keras.Input((4,)), NanGuard(verbose=0)
    model = keras.Model(inputs, layers.Dense(1)(Measures()(inputs)))
    model.compile("adam", "mse")
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=[guard])
    assert not guard.incidents and int(np.asarray(model.optimizer.iterations)) == 8
