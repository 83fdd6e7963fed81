"""One finite batch of wrong scale comes once in each epoch: how does the run end, stock and guarded, beside one without it?

    KERAS_BACKEND=tensorflow python benchmarks/lasting_spikes.py [NAME ...] [--check]

A classifier and a regression on the digits of scikit-learn; the 41st batch of 57 has images, weights or targets times a factor. A run is
brought home if it ends within 2 points of accuracy, or 15% of the loss, of the same run without that batch, on the other data. `--check`
exits with 1 if the guard brings home fewer than 90%.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
import numpy as np
from diverging_programs import digits
from keras import layers, optimizers

from keras_nanguard import NanGuard

BATCH, BAD, EPOCHS = 32, slice(32 * 40, 32 * 41), 6
POINTS, SHARE = 0.02, 1.15

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optimizers.SGD(0.05),
    "momentum": lambda: optimizers.SGD(0.02, momentum=0.9),
    "adam": lambda: optimizers.Adam(1e-3),
    "rmsprop": lambda: optimizers.RMSprop(1e-3),
}
TROUBLES = ("images*100", "images*1e3", "weights*300", "weights*1e4", "targets*1e3", "targets*1e5")


def model(optimizer: Callable[[], Any], classes: bool) -> Any:
    keras.utils.set_random_seed(0)
    hidden = [layers.Dense(64, "relu") for _ in range(2)]
    built = keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10, "softmax") if classes else layers.Dense(1)])
    if classes:
        built.compile(optimizer(), "sparse_categorical_crossentropy", metrics=["accuracy"])
    else:
        built.compile(optimizer(), "mse")
    return built


def run(trouble: str, optimizer: Callable[[], Any]) -> tuple[str, dict[str, float]]:
    """Return what is measured, and its value without the batch, of the stock run and of the guarded one."""
    where, _, factor = trouble.partition("*")
    (x, labels), sound = digits(), None
    x, weights, classes = x.copy(), np.ones(len(x), "float32"), where != "targets"
    y = labels.copy() if classes else (labels / 10).astype("float32")
    sound = np.ones(len(x), bool)
    sound[BAD] = False
    {"images": x, "weights": weights, "targets": y}[where][BAD] *= float(factor)
    figure = "accuracy" if classes else "loss"

    def trained(callbacks: list[Any], kept: Any = slice(None), **options: Any) -> float:
        made = model(optimizer, classes)
        made.fit(x[kept], y[kept], batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks, **options)
        return float(made.evaluate(x[sound], y[sound], batch_size=256, verbose=0, return_dict=True)[figure])

    weighted = {"sample_weight": weights}
    return figure, {
        "without": trained([], sound),
        "stock": trained([], **weighted),
        "NanGuard": trained([NanGuard(verbose=0)], **weighted),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="such as images*100-adam, all by default")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    home = {"stock": 0, "NanGuard": 0}
    cases = [(t, o) for t in TROUBLES for o in OPTIMIZERS if not options.names or f"{t}-{o}" in options.names]
    print(f"{'one batch':14s} {'optimizer':10s} {'':9s} {'without it':>11s} {'stock':>12s} {'NanGuard':>12s}")
    for trouble, name in cases:
        figure, values = run(trouble, OPTIMIZERS[name])
        best = values["without"]
        ends = {way: values[way] >= best - POINTS if figure == "accuracy" else values[way] <= best * SHARE for way in home}
        for way, end in ends.items():
            home[way] += end
        shown = " ".join(f"{values[way]:>10.4g} {'*' if ends[way] else ' '}" for way in home)
        print(f"{trouble:14s} {name:10s} {figure:9s} {best:>11.4g} {shown}", flush=True)
    print(f"{'brought home (*)':34s} {'':>11s} " + " ".join(f"{count:>6d} of {len(cases):2d}" for count in home.values()))
    return int(options.check and home["NanGuard"] < 0.9 * len(cases))


if __name__ == "__main__":
    sys.exit(main())
