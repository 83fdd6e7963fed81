"""The main job on real data: one small network, trained twice on the same troubled data, with and without the guard.

The data are the 1,797 handwritten digits that ship with scikit-learn, with three kinds of real trouble in them: images
with dead pixels (NaN), an image whose sensor overflowed (Inf), and images that nobody rescaled, whose grey levels leave
the range of float16. The network is a convolutional one with BatchNormalization in mixed_float16.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_nanguard import _probes, _state
from keras_nanguard._guard import NanGuard

__all__ = ["run"]

DEAD, OVERFLOWN, UNSCALED = (217, 905), (611,), (402, 1003)
"""Rows with NaN, with Inf, and with grey levels that nobody rescaled."""

EPOCHS = 4


def troubled_digits() -> tuple[Any, Any, Any, Any]:
    """Return training images and labels with trouble in them, and clean ones to test on.

    Returns:
        `(x, y, x_test, y_test)`: images float32 `(n, 8, 8, 1)` in [0, 1] but for the troubled ones, labels int.

    Raises:
        ImportError: if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "Expected scikit-learn, which brings the digits. Received: it is not installed. "
            "Run: pip install 'keras-nanguard[demo]'"
        ) from error
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x = (digits.data[order] / 16.0).astype("float32").reshape(-1, 8, 8, 1)
    y = digits.target[order]
    x, y, x_test, y_test = x[:1440], y[:1440], x[1440:], y[1440:]
    for row in DEAD:
        x[row, 3, 4] = np.nan
    for row in OVERFLOWN:
        x[row, 0, :] = np.inf
    for row in UNSCALED:
        x[row] *= 65535.0
    return x, y, x_test, y_test


def network() -> Any:
    """Return the network, compiled, in mixed_float16 with dynamic loss scaling."""
    keras.utils.set_random_seed(0)
    half = "mixed_float16"
    stack: list[Any] = [keras.Input((8, 8, 1))]
    for filters in (16, 32):
        stack += [
            keras.layers.Conv2D(filters, 3, padding="same", dtype=half),
            keras.layers.BatchNormalization(dtype=half),
            keras.layers.ReLU(dtype=half),
        ]
    stack += [keras.layers.GlobalAveragePooling2D(dtype=half), keras.layers.Dense(10, dtype="float32")]
    model = keras.Sequential(stack)
    model.compile(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(callbacks: list[Any]) -> dict[str, Any]:
    """Train once and return what became of it."""
    x, y, x_test, y_test = troubled_digits()
    model = network()
    history = model.fit(x, y, batch_size=32, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    logits = np.asarray(model.predict(x_test, verbose=0))
    anatomy = _state.Anatomy.of(model)
    bad = {
        name: sum(sum(_probes.counts(_state.view(v))[:2]) for v in group)
        for name, group in (("weights", anatomy.trainable), ("statistics", anatomy.statistics))
    }
    return {
        "last loss": float(history.history["loss"][-1]),
        "predictions that are NaN": f"{int(np.isnan(logits).any(axis=1).sum())} of {len(logits)}",
        "test accuracy": float((logits.argmax(axis=1) == y_test).mean()),
        "bad weights": bad["weights"],
        "bad statistics": bad["statistics"],
    }


def run() -> int:
    """Train twice, print both side by side and what was refused; returns 0 if the guarded run came out healthy."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(__doc__, highlight=False)
    console.print("Training with stock Keras ...")
    stock = train([])
    console.print("Training again, with callbacks=\\[NanGuard()] ...")
    guard = NanGuard(verbose=0)
    guarded = train([guard])
    table = Table("", "stock Keras", "with NanGuard()")
    for row in stock:
        table.add_row(row, *(f"{r[row]:.4g}" if isinstance(r[row], float) else str(r[row]) for r in (stock, guarded)))
    console.print(table)
    for incident in guard.incidents:
        diagnosis = incident.diagnosis
        first = incident.first
        site = first.site if first is not None else ""
        cause = diagnosis.cause if diagnosis is not None else "not diagnosed"
        rows = diagnosis.samples if diagnosis is not None else ()
        console.print(
            f"step {incident.step:3d} (epoch {incident.epoch + 1}, batch {incident.batch:2d}) refused: "
            f"first seen in {site}, cause {cause}, rows {list(rows)} of the batch",
            highlight=False,
        )
    console.print(guard.summary(), highlight=False)
    healthy = not (guarded["bad weights"] or guarded["bad statistics"]) and np.isfinite(guarded["last loss"])
    return 0 if healthy else 1
