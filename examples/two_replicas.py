"""MirroredStrategy over two replicas (two virtual CPUs): a bad row on one of them, and both skip the step.

    python examples/two_replicas.py
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from keras_nanguard import NanGuard

BATCH, BAD, ROW = 32, 7, 20  # the second half of a batch goes to replica 1

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

rng = np.random.default_rng(0)
x = rng.standard_normal((30 * BATCH, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)
broken = x.copy()
broken[BAD * BATCH + ROW, 2] = np.inf
kept = np.arange(len(x)) // BATCH != BAD


def train(inputs, targets, callbacks=()):
    """Train on this data, in its order, on both replicas."""
    keras.utils.set_random_seed(0)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(16), layers.BatchNormalization(), layers.ReLU(), layers.Dense(1)])
        model.compile(keras.optimizers.Adam(1e-2), "mse")
    model.fit(inputs, targets, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


guard = NanGuard()
stock, guarded, clean = train(broken, y), train(broken, y, [guard]), train(x[kept], y[kept])
same = all(np.array_equal(a, b) for a, b in zip(guarded.get_weights(), clean.get_weights()))

print("replica with the bad row:", *guard.incidents[0].replicas)
print("weights after stock Keras:", "finite" if np.isfinite(stock.get_weights()[0]).all() else "NaN")
print("the same weights as without the bad batch, bit for bit:", same)
if not same or guard.incidents[0].replicas != (1,):
    raise SystemExit("The guard did not help here.")
