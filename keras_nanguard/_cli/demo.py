"""The demonstration: one small network on real data with a few corrupted images, trained with and
without the guard.

The data are the 1,797 handwritten digits that ship with scikit-learn, 1,440 of them for training.
Five are corrupted in realistic ways: two have dead pixels (NaN), one comes from a sensor that
overflowed (Inf), and two were never rescaled, so that their gray levels exceed the range of
float16. The network is convolutional, with BatchNormalization, in mixed_float16 with dynamic loss
scaling.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_nanguard._cli.output import say
from keras_nanguard._core import finiteness
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._report import closing_table
from keras_nanguard.guard import NanGuard

DEAD, OVERFLOWED, UNSCALED = (217, 905), (611,), (402, 1003)
"""Rows with NaN, with Inf, and with gray levels that were not rescaled."""

EPOCHS = 4

MIN_ACCURACY = 0.9
"""Minimum test accuracy of a successful guarded run."""

DESCRIPTION = """\
One small convolutional network in mixed_float16, trained twice on 1,440 of the
handwritten digits that ship with scikit-learn. Five of them are corrupted: two
have dead pixels (NaN), one has overflowed (Inf), two were never rescaled.
"""


def digits() -> tuple[Any, Any, Any, Any]:
    """Return training images and labels, five of them corrupted, and test images and labels.

    Returns:
        `(x, y, x_test, y_test)`: images float32 `(n, 8, 8, 1)` in [0, 1] except the corrupted
        ones, labels int `(n,)`.

    Raises:
        GuardError: if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        wanted = "scikit-learn, which contains the digits"
        remedy = "Run: pip install 'keras-nanguard[demo]'"
        raise GuardError(expected(wanted, "it is not installed", remedy)) from error
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x = (data.data[order] / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    y = data.target[order]
    x, y, x_test, y_test = x[:1440], y[:1440], x[1440:], y[1440:]
    for row in DEAD:
        x[row, 3, 4] = np.nan
    for row in OVERFLOWED:
        x[row, 0, :] = np.inf
    for row in UNSCALED:
        x[row] *= 65535.0
    return x, y, x_test, y_test


def network() -> Any:
    """Return the network, compiled, in mixed_float16 with dynamic loss scaling."""
    keras.utils.set_random_seed(0)
    half = "mixed_float16"
    stack: list[Any] = [keras.Input((8, 8, 1))]
    for number, filters in enumerate((16, 32), 1):
        stack += [
            keras.layers.Conv2D(filters, 3, padding="same", dtype=half, name=f"conv_{number}"),
            keras.layers.BatchNormalization(momentum=0.9, dtype=half, name=f"norm_{number}"),
            keras.layers.ReLU(dtype=half),
        ]
    head = keras.layers.Dense(10, dtype="float32", name="head")
    stack += [keras.layers.Flatten(dtype=half), head]
    model = keras.Sequential(stack, name="digits")
    model.compile(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(2e-3)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def train(data: tuple[Any, ...], callbacks: list[Any]) -> tuple[float, int]:
    """Train once.

    Args:
        data: training images and labels, test images and labels.
        callbacks: callbacks of the fit.

    Returns:
        The test accuracy, for which a prediction of NaN counts as wrong; and the number of NaN and
        Inf in weights and statistics.
    """
    x, y, x_test, y_test = data
    model = network()
    model.fit(x, y, batch_size=32, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    logits = np.asarray(model.predict(x_test, verbose=0))
    right = np.isfinite(logits).all(axis=1) & (logits.argmax(axis=1) == y_test)
    state = TrainState.of(model)
    values = (keras_variables.view(v) for v in (*state.trainable, *state.statistics))
    return float(right.mean()), sum(sum(finiteness.counts(value)[:2]) for value in values)


def run() -> int:
    """Train twice and print the results; return 0 if the guarded network is good, 1 if it is not.

    Raises:
        GuardError: if scikit-learn is not installed.
    """
    say(DESCRIPTION)
    data, guard = digits(), NanGuard(verbose=0)
    for name, callbacks in (("stock Keras", []), ("NanGuard()", [guard])):
        accuracy, bad = train(data, callbacks)
        say(f"{name}: test accuracy {accuracy:.1%}, {bad} NaN and Inf in the model")
    say(closing_table.table_text(guard.incidents, "\nNanGuard() reported:"))
    return 0 if bad == 0 and accuracy >= MIN_ACCURACY else 1
