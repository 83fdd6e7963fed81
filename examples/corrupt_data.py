"""Corrupt data: four broken images among 1,440 ruin a network with stock Keras. With the guard it trains, and the four are listed.

    python examples/corrupt_data.py
"""

from __future__ import annotations

import keras
import numpy as np
from sklearn.datasets import load_digits

from keras_nanguard import NanGuard

BROKEN = [40, 700, 1100, 1200]

digits = load_digits()
x, y = (digits.data / 16.0).astype("float32"), digits.target
x, y, x_test, y_test = x[:1440], y[:1440], x[1440:], y[1440:]
x[BROKEN[:3], 20] = np.nan  # dead pixels
x[BROKEN[3]] = np.inf  # an overflow


def train(callbacks=()):
    """Train a small network; return it and its accuracy on the test images. A prediction of NaN counts as wrong."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])
    model.compile(keras.optimizers.Adam(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, epochs=5, verbose=0, callbacks=list(callbacks))
    logits = model.predict(x_test, verbose=0)
    right = np.isfinite(logits).all(axis=1) & (logits.argmax(axis=1) == y_test)
    return model, right.mean()


stock, stock_accuracy = train()
guard = NanGuard()
guarded, guarded_accuracy = train([guard])
found = sorted(sample.index for sample in guard.bad_samples())

print(f"stock Keras: accuracy {stock_accuracy:.2f}, NaN in its weights: {np.isnan(stock.get_weights()[0]).any()}")
print(f"NanGuard():  accuracy {guarded_accuracy:.2f}, bad rows: {found}")
if found != BROKEN or guarded_accuracy < stock_accuracy + 0.5:
    raise SystemExit("The guard did not help here.")
