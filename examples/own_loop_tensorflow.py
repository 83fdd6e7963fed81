"""Your own loop on TensorFlow: GradientTape in a tf.function, no Keras trainer, one Inf in the data.

    python examples/own_loop_tensorflow.py
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from keras_nanguard import NanGuard

rng = np.random.default_rng(0)
x = rng.standard_normal((640, 8)).astype("float32")
y = x[:, :1] ** 2
x[200, 3] = np.inf
batches = [(tf.constant(x[i : i + 32]), tf.constant(y[i : i + 32])) for i in range(0, len(x), 32)] * 5


def build():
    """Return a model, its optimizer, and their train step."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
    optimizer, loss_of = keras.optimizers.Adam(1e-2), keras.losses.MeanSquaredError()

    @tf.function
    def train_step(inputs, targets):
        with tf.GradientTape() as tape:
            loss = loss_of(targets, model(inputs, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return model, optimizer, train_step


def error(model):
    """Return the mean squared error on the clean rows."""
    kept = np.isfinite(x).all(axis=1)
    return float(np.mean((model.predict(x[kept], verbose=0) - y[kept]) ** 2))


stock, optimizer, train_step = build()
for inputs, targets in batches:
    train_step(inputs, targets)

guarded, optimizer, train_step = build()
guard = NanGuard()
with guard.watch(guarded, optimizer):
    step = guard.step(train_step)
    for inputs, targets in batches:
        step(inputs, targets)
        if guard.stopped:
            break

print(f"steps skipped: {sum(i.refused for i in guard.incidents)} of {len(batches)}")
print(f"mean squared error: {error(stock):.2f} without a guard, {error(guarded):.2f} with it")
if np.isfinite(error(stock)) or not error(guarded) < 1.0:
    raise SystemExit("The guard did not help here.")
