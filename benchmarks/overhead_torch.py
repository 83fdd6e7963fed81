"""What the guard costs on PyTorch: guarded and plain `fit` in paired rounds, in processor time of one thread.

    KERAS_BACKEND=torch python benchmarks/overhead_torch.py [CASE ...]

Processor time does not see what else the machine does. Prints, for each case, the median time of a plain step, and the
median and the range of the ratio over the rounds. Snapshots are part of it, the first step of each fit is not.
"""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
import torch
from keras import layers

from keras_nanguard import NanGuard

ROUNDS, EPOCHS = 5, 3


def mlp(width, depth, norm=False):
    hidden = [layer for _ in range(depth) for layer in (layers.Dense(width, "relu"), *([layers.BatchNormalization()] * norm))]
    return keras.Sequential([keras.Input((32,)), *hidden, layers.Dense(1)])


def cnn():
    body = [keras.Input((32, 32, 3))]
    for width in (32, 64, 64):
        body += [layers.Conv2D(width, 3, padding="same", use_bias=False), layers.BatchNormalization()]
        body += [layers.ReLU(), layers.MaxPooling2D()]
    return keras.Sequential([*body, layers.Flatten(), layers.Dense(1)])


CASES = {
    "mlp-small": (lambda: mlp(64, 2), (32,), 32, 50),
    "mlp-batchnorm": (lambda: mlp(64, 2, norm=True), (32,), 32, 50),
    "mlp-13M": (lambda: mlp(2048, 4), (32,), 128, 6),
    "cnn": (cnn, (32, 32, 3), 32, 8),
}


class Clock(keras.callbacks.Callback):
    async_safe = True

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.process_time()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds = [*getattr(self, "seconds", []), time.process_time() - self.start]


def measured(model, data, batch, steps, guarded):
    clock = Clock()
    callbacks = [clock, *([NanGuard(verbose=0)] if guarded else [])]
    model.fit(*data, batch_size=batch, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=callbacks)
    return min(clock.seconds[1:]) / steps


def main(names):
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, keras {keras.__version__}, one thread, processor time")
    for name in names or CASES:
        build, shape, batch, steps = CASES[name]
        rng = np.random.default_rng(0)
        x = rng.standard_normal((batch * steps, *shape)).astype("float32")
        data = (x, x.reshape(len(x), -1)[:, :1].copy())
        models = []
        for _ in range(2):
            model = build()
            model.compile("adam", "mse")
            models.append(model)
        ratios, plain = [], []
        for turn in range(ROUNDS):
            pair = [None, None]
            for guarded in (turn % 2, 1 - turn % 2):
                pair[guarded] = measured(models[guarded], data, batch, steps, bool(guarded))
            plain.append(pair[0])
            ratios.append(pair[1] / pair[0])
        told = f"{np.median(plain) * 1e3:8.2f} ms   x{np.median(ratios):.3f}  ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"{name:16s}{told}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
