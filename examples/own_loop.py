"""A loop with no Keras trainer, guarded: GradientTape and tf.function.

    python examples/own_loop.py
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

model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
optimizer, loss_of = keras.optimizers.Adam(1e-2), keras.losses.MeanSquaredError()


@tf.function
def train_step(inputs, targets):
    with tf.GradientTape() as tape:
        loss = loss_of(targets, model(inputs, training=True))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


guard = NanGuard()
with guard.watch(model, optimizer):
    step = guard.step(train_step)
    for start in range(0, len(x), 32):
        step(tf.constant(x[start : start + 32]), tf.constant(y[start : start + 32]))
        if guard.stopped:
            break
print(guard.summary())
