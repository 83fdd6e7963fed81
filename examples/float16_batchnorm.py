"""float16 with BatchNormalization: training looks fine, but the model predicts NaN.

One image that was never rescaled overflows float16. Keras' loss scaling skips that update of the weights, but the moving statistics of
BatchNormalization have taken the Inf in by then, and training never reads them.

    python examples/float16_batchnorm.py
"""

from __future__ import annotations

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

from keras_nanguard import NanGuard, scan

digits = load_digits()
x, y = (digits.data / 16.0).astype("float32"), digits.target
x, y, x_test, y_test = x[:1440], y[:1440], x[1440:], y[1440:]
x[611] *= 65535.0

keras.config.set_dtype_policy("mixed_float16")


def train(callbacks=()):
    """Train on it; return the model and its accuracy on the test images. A prediction of NaN counts as wrong."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(64, name="hidden"),
            layers.BatchNormalization(momentum=0.9, name="norm"),
            layers.ReLU(),
            layers.Dense(10, dtype="float32", name="head"),
        ]
    )
    model.compile(keras.optimizers.Adam(2e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))  # scales its loss
    model.fit(x, y, epochs=4, verbose=0, callbacks=list(callbacks))
    logits = model.predict(x_test, verbose=0)
    right = np.isfinite(logits).all(axis=1) & (logits.argmax(axis=1) == y_test)
    return model, right.mean()


stock, stock_accuracy = train()
guard = NanGuard()
guarded, guarded_accuracy = train([guard])

for name, model, accuracy in (("stock Keras", stock, stock_accuracy), ("NanGuard()", guarded, guarded_accuracy)):
    weights = all(np.isfinite(w.numpy()).all() for w in model.trainable_variables)
    bad = ", ".join(variable.path for variable in scan(model).bad) or "nothing"
    print(f"{name}: accuracy {accuracy:.2f}, weights finite: {weights}, not finite: {bad}")
if guarded_accuracy < stock_accuracy + 0.5:
    raise SystemExit("The guard did not help here.")
