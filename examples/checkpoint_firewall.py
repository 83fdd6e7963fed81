"""The checkpoint firewall: a callback damages the weights just before ModelCheckpoint saves them, and no bad file is written.

    python examples/checkpoint_firewall.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
from keras import layers

from keras_nanguard import NanGuard, scan

rng = np.random.default_rng(0)
x = rng.standard_normal((640, 8)).astype("float32")
y = x.sum(axis=1, keepdims=True)


class Normalize(keras.callbacks.Callback):
    """Scales each column of a kernel to length 1 after an epoch. It divides by 0 if a unit has died."""

    def on_epoch_end(self, epoch, logs=None):
        kernel = self.model.get_layer("hidden").kernel
        columns = keras.ops.convert_to_numpy(kernel).copy()
        if epoch == 2:
            columns[:, 3] = 0.0  # a dead unit
        with np.errstate(invalid="ignore"):
            kernel.assign(columns / np.linalg.norm(columns, axis=0))


def train(path, callbacks=()):
    """Train, save the model after each epoch, and return the saved model."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="tanh", name="hidden"), layers.Dense(1, name="last")])
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    saver = keras.callbacks.ModelCheckpoint(path)
    model.fit(x, y, epochs=5, verbose=0, callbacks=[Normalize(), saver, *callbacks])
    return keras.models.load_model(path)


with tempfile.TemporaryDirectory() as folder:
    stock_file, guarded_file = Path(folder) / "stock.keras", Path(folder) / "guarded.keras"
    stock, guarded = train(stock_file), train(guarded_file, [NanGuard()])
    stock_report, guarded_report = scan(stock_file), scan(guarded_file)

for name, report in (("stock Keras", stock_report), ("NanGuard()", guarded_report)):
    print(f"bad variables in the file saved with {name}: {len(report.bad)}")
print(f"losses of the saved models: {stock.evaluate(x, y, verbose=0):.2f} and {guarded.evaluate(x, y, verbose=0):.2f}")
if stock_report.ok or not guarded_report.ok:
    raise SystemExit("The guard did not help here.")
