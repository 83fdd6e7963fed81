"""Make the first picture of the README: one network on broken data, with the guard and without it.

    python docs/picture.py

Takes the extras `demo` and `plot`. The data are those of `keras-nanguard demo`: 1,440 digits, five of them broken.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
import matplotlib
import numpy as np

from keras_nanguard import NanGuard
from keras_nanguard._cli import demo

PICTURE = Path(__file__).parent / "pictures" / "with_and_without.png"
EPOCHS, EVERY = 3, 3
STYLES = {
    "without the five images": {"color": "#8a8f98", "linestyle": "--", "linewidth": 2},
    "with NanGuard()": {"color": "#1a7f37", "linewidth": 2.5},
    "stock Keras": {"color": "#cf222e", "linewidth": 2.5},
}


class Accuracy(keras.callbacks.Callback):
    """Records the accuracy on held-out digits every few steps."""

    def __init__(self, x: Any, y: Any):
        super().__init__()
        self.x, self.y, self.found = x, y, []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch % EVERY:
            return
        logits = np.asarray(self.model(self.x, training=False))
        right = np.isfinite(logits).all(axis=1) & (logits.argmax(axis=1) == self.y)
        self.found.append(100 * right.mean())


def accuracies(x: Any, y: Any, test: tuple[Any, Any], callbacks: list[Any]) -> list[float]:
    model, accuracy = demo.network(), Accuracy(*test)
    model.fit(x, y, batch_size=32, epochs=EPOCHS, verbose=0, callbacks=[*callbacks, accuracy])
    return accuracy.found


def main() -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    x, y, broken, *test = demo.digits()
    curves = {
        "without the five images": accuracies(x[~broken], y[~broken], tuple(test), []),
        "with NanGuard()": accuracies(x, y, tuple(test), [NanGuard(verbose=0)]),
        "stock Keras": accuracies(x, y, tuple(test), []),
    }
    figure, axes = plt.subplots(figsize=(8, 3.2), dpi=150)
    for name, curve in curves.items():
        axes.plot(np.linspace(0, EPOCHS, len(curve)), curve, label=name, **STYLES[name])
    axes.set(xlabel="epoch", xlim=(0, EPOCHS), xticks=range(EPOCHS + 1), ylabel="accuracy on new digits, %", ylim=(0, 103))
    axes.set_title("Five broken images among 1,440, mixed_float16", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center right")
    figure.tight_layout()
    figure.savefig(PICTURE)
    print(PICTURE.relative_to(Path.cwd()) if PICTURE.is_relative_to(Path.cwd()) else PICTURE, {k: round(v[-1]) for k, v in curves.items()})


if __name__ == "__main__":
    main()
