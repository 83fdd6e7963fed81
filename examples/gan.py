"""A GAN with two optimizers and its own train step: one bad batch changes neither network.

Each network trains on the updated other one, so the guard refuses both updates or none.

    python examples/gan.py
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from keras_nanguard import NanGuard

BATCH, BATCHES, BAD = 64, 40, 17


class GAN(keras.Model):
    """Learns to draw points from the distribution of its data."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((4,)), layers.Dense(32, activation="relu"), layers.Dense(2)])
        self.discriminator = keras.Sequential([keras.Input((2,)), layers.Dense(32, activation="relu"), layers.Dense(1)])
        self.seeds = keras.random.SeedGenerator(1)
        self.built = True

    def compile(self):
        super().compile()
        self.generator_optimizer, self.discriminator_optimizer = keras.optimizers.Adam(5e-3), keras.optimizers.Adam(5e-3)
        self.cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def draw(self, number):
        return self.generator(keras.random.normal((number, 4), seed=self.seeds))

    def train_step(self, real):
        number = ops.shape(real)[0]
        yes, no = ops.ones((number, 1)), ops.zeros((number, 1))
        with tf.GradientTape() as tape:
            wrong = self.cross_entropy(yes, self.discriminator(real)) + self.cross_entropy(no, self.discriminator(self.draw(number)))
        weights = self.discriminator.trainable_variables
        self.discriminator_optimizer.apply(tape.gradient(wrong, weights), weights)
        with tf.GradientTape() as tape:
            caught = self.cross_entropy(yes, self.discriminator(self.draw(number)))
        weights = self.generator.trainable_variables
        self.generator_optimizer.apply(tape.gradient(caught, weights), weights)
        return {"discriminator_loss": wrong, "generator_loss": caught}


points = np.random.default_rng(0).normal((2.0, -1.0), 0.3, (BATCHES, BATCH, 2)).astype("float32")
broken = points.copy()
broken[BAD, 5, 0] = np.nan


def train(batches, callbacks=()):
    """Train on these batches, in their order."""
    keras.utils.set_random_seed(0)
    model = GAN()
    model.compile()
    model.fit(batches.reshape(-1, 2), batch_size=BATCH, epochs=12, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model


guard = NanGuard()
stock, guarded, clean = train(broken), train(broken, [guard]), train(np.delete(points, BAD, axis=0))
same = all(np.array_equal(a, b) for a, b in zip(guarded.get_weights(), clean.get_weights()))

print("mean of the data:       ", points.mean((0, 1)).round(1))
print("mean after stock Keras: ", ops.convert_to_numpy(stock.draw(1000)).mean(0).round(1))
print("mean after NanGuard():  ", ops.convert_to_numpy(guarded.draw(1000)).mean(0).round(1))
print("the same weights as without the bad batch, bit for bit:", same)
if not same or np.isfinite(stock.get_weights()[0]).all():
    raise SystemExit("The guard did not help here.")
