"""Scan and repair: a saved model predicts NaN. Find the cause, repair the file, and re-estimate the statistics from data.

    python examples/scan_and_repair.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

from keras_nanguard import recalibrate, repair, scan

digits = load_digits()
x, y = (digits.data / 16.0).astype("float32"), digits.target
x, y, x_test, y_test = x[:1440], y[:1440], x[1440:], y[1440:]


def accuracy(model):
    """Return the accuracy on the test images. A prediction of NaN counts as wrong."""
    logits = model.predict(x_test, verbose=0)
    return (np.isfinite(logits).all(axis=1) & (logits.argmax(axis=1) == y_test)).mean()


keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((64,)),
        layers.Dense(64, name="hidden"),
        layers.BatchNormalization(momentum=0.9, name="norm"),
        layers.ReLU(),
        layers.Dense(10, name="head"),
    ]
)
model.compile(keras.optimizers.Adam(2e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, y, epochs=4, verbose=0)
healthy = accuracy(model)
variance = model.get_layer("norm").moving_variance
variance.assign(np.where(np.arange(64) < 40, np.nan, keras.ops.convert_to_numpy(variance)))  # as after a float16 overflow

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.keras"
    model.save(path)
    before = scan(path)
    fixed = repair(path)  # writes model.repaired.keras and keeps the old file
    after = scan(fixed.output)
    ruined, repaired = keras.models.load_model(path), keras.models.load_model(fixed.output)

found = [f"{variable.path} ({', '.join(problem.code for problem in variable.problems)})" for variable in before.bad]
print("found in the file:", *found)
print("changed in the new file:", *(f"{change.path}: {change.status}, {change.detail}" for change in fixed.changes))
first, second = accuracy(ruined), accuracy(repaired)
recalibrate(repaired, x, steps=40)
third = accuracy(repaired)
print(f"accuracy: healthy {healthy:.2f}, ruined {first:.2f}, repaired {second:.2f}, recalibrated {third:.2f}")
if before.ok or not after.ok or third < healthy - 0.03:
    raise SystemExit("The repair did not help here.")
