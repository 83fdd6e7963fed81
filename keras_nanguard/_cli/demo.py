"""The demonstration: one small network on real data with a few corrupted images, trained with and
without the guard.

The data are the 1,797 handwritten digits that ship with scikit-learn, 1,440 of them for training.
Five are corrupted in realistic ways: two have dead pixels (NaN), one comes from a sensor that
overflowed (Inf), and two were never rescaled, so that their gray levels exceed the range of
float16. The network is convolutional, with BatchNormalization, in mixed_float16 with dynamic loss
scaling.
"""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._report import terminal
from keras_nanguard.guard import NanGuard

DEAD, OVERFLOWED, UNSCALED = (217, 905), (611,), (402, 1003)
"""Rows with NaN, with Inf, and with gray levels that were not rescaled."""

EPOCHS = 4

MIN_ACCURACY = 0.9
"""Minimum test accuracy of a successful guarded run."""

RUNS = ("stock Keras", "NanGuard()", "stock Keras,\nclean images only")

ACCURACY, LOSS, BAD = "test accuracy", "loss of the last epoch", "NaN and Inf in the model"

DESCRIPTION = """\
One small convolutional network in mixed_float16, trained three times on 1,440 of
the handwritten digits that ship with scikit-learn. Five of them are corrupted:
two have dead pixels (NaN), one has overflowed (Inf), two were never rescaled.
"""


def digits() -> tuple[Any, Any, Any, Any, Any]:
    """Return training images and labels, five of them corrupted, and test images.

    Returns:
        `(x, y, corrupted, x_test, y_test)`: images float32 `(n, 8, 8, 1)` in [0, 1] except the
        corrupted ones, labels int `(n,)`, and which of the training images are corrupted, bool
        `(n,)`.

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
    corrupted = np.isin(np.arange(len(x)), (*DEAD, *OVERFLOWED, *UNSCALED))
    return x, y, corrupted, x_test, y_test


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


def train(
    data: tuple[Any, Any], test: tuple[Any, Any], callbacks: list[Any], epochs: int
) -> dict[str, Any]:
    """Train once on `(x, y)` and return the results. A prediction of NaN counts as wrong."""
    model = network()
    options = {"batch_size": 32, "epochs": epochs, "verbose": 0}
    history = model.fit(*data, **options, callbacks=callbacks).history
    logits = np.asarray(model.predict(test[0], verbose=0))
    finite = np.isfinite(logits).all(axis=1)
    state = TrainState.of(model)
    values = (keras_variables.view(v) for v in (*state.trainable, *state.statistics))
    refused, batches = sum(history.get("refused_steps", [0])), epochs * -(-len(data[0]) // 32)
    return {
        ACCURACY: float((finite & (logits.argmax(axis=1) == test[1])).mean()),
        "predictions that are NaN": f"{int((~finite).sum())} of {len(logits)}",
        LOSS: float(history["loss"][-1]),
        BAD: sum(sum(finiteness.counts(value)[:2]) for value in values),
        "batches refused": f"{refused} of {batches}",
    }


def wins(stock: dict[str, Any], guarded: dict[str, Any], clean: dict[str, Any]) -> bool:
    """Whether the guarded run is about as good as one without the corrupted images, and stock Keras
    is not."""
    whole = np.isfinite(guarded[LOSS]) and not guarded[BAD]
    good = guarded[ACCURACY] >= max(MIN_ACCURACY, clean[ACCURACY] - 0.03)
    return bool(whole and good and guarded[ACCURACY] > stock[ACCURACY] + 0.1)


def run(epochs: int = EPOCHS) -> int:
    """Train three times and print the results; return 0 if the guarded run wins, 1 if it does not.

    Raises:
        GuardError: if scikit-learn is not installed.
    """
    from rich.console import Console

    screen = Console(highlight=False, markup=False, soft_wrap=True)
    screen.print(DESCRIPTION)
    x, y, corrupted, *test = digits()
    guard = NanGuard(verbose=0)
    clean_data = (x[~corrupted], y[~corrupted])
    runs: list[tuple[Any, list[Any]]] = [((x, y), []), ((x, y), [guard]), (clean_data, [])]
    results = []
    for name, (data, callbacks) in zip(RUNS, runs):
        start = time.perf_counter()
        results.append(train(data, (test[0], test[1]), callbacks, epochs))
        screen.print(f"{' '.join(name.split())}: {time.perf_counter() - start:.0f} s")
    screen.print(_table(results))
    screen.print("NanGuard() reported:")
    screen.print(terminal.table(guard.incidents))
    stock, guarded, clean = results
    won = wins(stock, guarded, clean)
    said = "The guarded run did not win: it classifies"
    if won:
        said = "Five images ruin training with stock Keras. With NanGuard() the network classifies"
    share, without = f"{guarded[ACCURACY]:.1%}", f"{clean[ACCURACY]:.1%}"
    screen.print(f"\n{said} {share} of the test images, and {without} without the five.")
    return 0 if won else 1


def _table(results: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("", *RUNS)
    for row in results[0]:
        values = [result[row] for result in results]
        table.add_row(row, *(f"{v:.3f}" if isinstance(v, float) else str(v) for v in values))
    return table
