"""One line guards a run: a small network on scikit-learn's digits with a few dead pixels in the data.

    python examples/digits.py
"""

from __future__ import annotations

import keras
import numpy as np
from sklearn.datasets import load_digits

from keras_nanguard import NanGuard

digits = load_digits()
x, y = (digits.data / 16.0).astype("float32"), digits.target
x[[40, 700, 1200], 20] = np.nan

keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

guard = NanGuard()
history = model.fit(x, y, epochs=3, validation_split=0.1, verbose=0, callbacks=[guard])
print(guard.summary())
print("accuracy", history.history["accuracy"][-1], "refused", history.history["refused_steps"])
