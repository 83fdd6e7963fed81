"""Transfer learning with frozen BatchNormalization: the new data has a broken row, and the pretrained part keeps its bits.

    python examples/transfer_learning.py
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

from keras_nanguard import NanGuard

digits = load_digits()
x, y = (digits.data / 16.0).astype("float32").reshape(-1, 8, 8, 1), digits.target
small, large = y < 5, y >= 5
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

keras.utils.set_random_seed(0)
base = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, strides=2, use_bias=False),
        layers.BatchNormalization(momentum=0.9),
        layers.ReLU(),
        layers.Flatten(),
        layers.Dense(32, activation="relu"),
    ],
    name="base",
)
pretraining = keras.Sequential([base, layers.Dense(5)])
pretraining.compile(keras.optimizers.Adam(5e-3), cross_entropy)
pretraining.fit(x[small], y[small], epochs=4, verbose=0)

base.trainable = False  # BatchNormalization runs with its moving statistics from here on, and does not change them
before = base.get_weights()
x_new, y_new = x[large].copy(), y[large] - 5
x_new[100, 3, 3] = np.inf


def transfer(callbacks=()):
    """Train a new head for the other digits; return its accuracy on the last 200. A prediction of NaN counts as wrong."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([base, layers.Dense(5, name="head")])
    model.compile(keras.optimizers.Adam(1e-2), cross_entropy)
    model.fit(x_new[:-200], y_new[:-200], epochs=6, verbose=0, callbacks=list(callbacks))
    logits = model.predict(x_new[-200:], verbose=0)
    return (np.isfinite(logits).all(axis=1) & (logits.argmax(axis=1) == y_new[-200:])).mean()


guard = NanGuard(statistics={"stuck_after": 0})  # frozen statistics are intended
stock, guarded = transfer(), transfer([guard])
untouched = all(np.array_equal(a, b) for a, b in zip(before, base.get_weights()))
print(f"accuracy on the new classes: stock Keras {stock:.2f}, NanGuard {guarded:.2f}")
print(f"the pretrained weights are unchanged, bit for bit: {untouched}")
if not untouched or guarded < stock + 0.5:
    raise SystemExit("The guard did not help here.")
