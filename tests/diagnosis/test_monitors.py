"""Finite faults are reported by checks that no healthy run can trigger."""

import keras
import numpy as np
from keras import layers

from keras_nanguard import NanGuard


def test_frozen_and_pretrained_statistics_may_be_constant():
    keras.utils.set_random_seed(0)
    base = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.BatchNormalization()], name="base")
    base.layers[-1].moving_mean.assign([0.1] * 4)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(base(inputs, training=False)))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.random.default_rng(0).standard_normal((800, 4)).astype("float32")
    guard = NanGuard(verbose=0)
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[guard])
    assert guard.incidents == []
