"""An LSTM that explodes on long sequences: the guard rolls back and lowers the learning rate, and the run learns.

    python examples/exploding_lstm.py
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers

from keras_nanguard import NanGuard

rng = np.random.default_rng(0)
x = rng.standard_normal((512, 60, 2)).astype("float32")
y = x[:, -5:, 0].sum(axis=1, keepdims=True)


def train(callbacks=()):
    """Train it; return the loss of each epoch."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((60, 2)), layers.LSTM(16, activation="relu"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model.fit(x, y, epochs=8, verbose=0, callbacks=list(callbacks)).history["loss"]


guard = NanGuard()
stock, guarded = train(), train([guard])
print(f"loss of a constant: {y.var():.1f}")
print("stock Keras:", *(f"{loss:.1f}" for loss in stock))
print("NanGuard(): ", *(f"{loss:.1f}" for loss in guarded))
if np.isfinite(stock[-1]) or not guarded[-1] < y.var() / 2:
    raise SystemExit("The guard did not help here.")
