"""The cost of the guard as a ratio to plain `fit`, measured in paired rounds in one process.

    python benchmarks/overhead.py [--models mlp wide ...] [--rounds 15] [--json out.json] [--xla] [--replicas 2]

Every round times one epoch of each variant on the same data, in an order that changes from round to
round, and takes ratios within the round. The median over the rounds is reported with its quartiles.
Absolute times are shown for reference only. `--check` checks these limits:

    cnn, transformer, resnet50    NanGuard at most 1.03 x plain fit
    mlp (dispatch-bound), wide    NanGuard at most 1.10 x plain fit
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from keras_nanguard import NanGuard

LIMITS = {"mlp": 1.10, "wide": 1.10, "cnn": 1.03, "transformer": 1.03, "resnet50": 1.03}
LOSS = keras.losses.SparseCategoricalCrossentropy


class NumpyChecks(keras.callbacks.Callback):
    """A common hand-written callback: converts every weight to NumPy after every batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        for weight in self.model.get_weights():
            if not np.isfinite(weight).all():
                self.model.stop_training = True


class CheckNumerics(keras.callbacks.Callback):
    """TensorFlow's check of every operation, in the thread of `fit` and in everything that it
    traces.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        tf.debugging.enable_check_numerics()


def mlp() -> tuple[Any, tuple[int, ...], int, int]:
    model = keras.Sequential([keras.Input((16,)), layers.Dense(32, "relu"), layers.Dense(32, "relu"), layers.Dense(10)])
    return model, (16,), 32, 400


def wide() -> tuple[Any, tuple[int, ...], int, int]:
    sizes = (2048, 2048, 2048, 1024)
    model = keras.Sequential([keras.Input((1024,)), *(layers.Dense(n, "relu") for n in sizes), layers.Dense(10)])
    return model, (1024,), 128, 12


def cnn() -> tuple[Any, tuple[int, ...], int, int]:
    stack: list[Any] = [keras.Input((32, 32, 3))]
    for filters in (16, 32, 64):
        stack += [layers.Conv2D(filters, 3, padding="same"), layers.BatchNormalization(), layers.ReLU()]
        stack += [layers.MaxPooling2D()]
    return keras.Sequential([*stack, layers.GlobalAveragePooling2D(), layers.Dense(10)]), (32, 32, 3), 32, 40


def transformer() -> tuple[Any, tuple[int, ...], int, int]:
    tokens = keras.Input((64,), dtype="int32")
    x = layers.Embedding(1000, 64)(tokens)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16)(x, x))
        hidden = layers.Dense(64)(layers.Dense(256, "relu")(x))
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(hidden))
    return keras.Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x))), (64,), 32, 25


def resnet50() -> tuple[Any, tuple[int, ...], int, int]:
    model = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10, classifier_activation=None)
    return model, (64, 64, 3), 32, 3


MODELS: dict[str, Callable[[], tuple[Any, tuple[int, ...], int, int]]] = {
    f.__name__: f for f in (mlp, wide, cnn, transformer, resnet50)
}
VARIANTS: dict[str, Callable[[], list[Any]]] = {
    "plain": list,
    "NanGuard": lambda: [NanGuard(verbose=0)],
    "TerminateOnNaN": lambda: [keras.callbacks.TerminateOnNaN()],
    "NumPy checks": lambda: [NumpyChecks()],
}


REPLICAS: list[str] = []


@functools.cache
def strategy() -> Any:
    """Return the one strategy that all models train under."""
    return tf.distribute.MirroredStrategy(REPLICAS) if REPLICAS else tf.distribute.get_strategy()


class Variant:
    """One model under one set of callbacks, its functions compiled once and kept between epochs."""

    def __init__(self, name: str, build: Callable[[], Any], xla: bool):
        keras.utils.set_random_seed(0)
        with strategy().scope():
            self.model, shape, batch, self.steps = build()
            self.model.compile("adam", LOSS(from_logits=True), jit_compile=xla)
        rng = np.random.default_rng(0)
        size = (batch * self.steps, *shape)
        tokens = len(shape) == 1 and shape[0] == 64
        x = rng.integers(0, 1000, size) if tokens else rng.standard_normal(size).astype("float32")
        data = tf.data.Dataset.from_tensor_slices((x, rng.integers(0, 10, len(x)))).batch(batch, drop_remainder=True)
        self.data = data.prefetch(2)
        self.epochs = _Epochs()
        self.callbacks = VARIANTS[name]()
        start = time.perf_counter()
        self.train = _Trainer(self)
        self.train.epoch()
        self.first = time.perf_counter() - start

    def epoch(self) -> float:
        start = time.perf_counter()
        self.train.epoch()
        return (time.perf_counter() - start) / self.steps


class _Epochs:
    pass


class _Trainer:
    """Runs `fit` one epoch at a time in a separate thread, so that nothing is compiled again
    between rounds.
    """

    def __init__(self, variant: Variant):
        import threading

        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        outer = self

        class Gate(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                outer.go.acquire()

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                outer.done.release()

        callbacks = [*variant.callbacks, Gate()]
        self.thread = threading.Thread(
            target=lambda: variant.model.fit(variant.data, epochs=10**6, verbose=0, callbacks=callbacks), daemon=True
        )
        self.thread.start()

    def epoch(self) -> None:
        self.go.release()
        while not self.done.acquire(timeout=5):
            if not self.thread.is_alive():
                sys.exit("a fit ended by an exception, see above")


def measure(name: str, rounds: int, xla: bool) -> dict[str, Any]:
    """Return medians and quartiles of the ratios of every variant for one model."""
    variants = {v: Variant(v, MODELS[name], xla) for v in VARIANTS}
    times: dict[str, list[float]] = {v: [] for v in VARIANTS}
    for v in variants.values():
        v.epoch()
    for _ in range(rounds):
        for v in random.sample(list(VARIANTS), len(VARIANTS)):
            times[v].append(variants[v].epoch())
    result: dict[str, Any] = {"model": name, "plain_ms": 1e3 * statistics.median(times["plain"]), "ratios": {}}
    for v in VARIANTS:
        ratios = sorted(t / p for t, p in zip(times[v], times["plain"]))
        low, high = np.percentile(ratios, [25, 75])
        result["ratios"][v] = [statistics.median(ratios), float(low), float(high)]
    result["first_epoch"] = variants["NanGuard"].first / variants["plain"].first
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--xla", action="store_true")
    parser.add_argument("--numerics", action="store_true", help="also measure tf.debugging.enable_check_numerics")
    parser.add_argument("--replicas", type=int, default=0, help="number of logical CPUs for MirroredStrategy")
    parser.add_argument("--json")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a limit is exceeded")
    a = parser.parse_args()
    random.seed(0)
    results, broken = [], []
    if a.replicas:
        cpus = [tf.config.LogicalDeviceConfiguration()] * a.replicas
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], cpus)
        REPLICAS.extend(f"CPU:{n}" for n in range(a.replicas))
    if a.numerics:
        VARIANTS["check_numerics"] = lambda: [CheckNumerics()]
    print(f"keras {keras.__version__}, tensorflow {tf.__version__}, {os.cpu_count()} cores, {a.rounds} rounds")
    for name in a.models:
        r = measure(name, a.rounds, a.xla)
        results.append(r)
        cells = "  ".join(f"{v} x{m:.3f} [{lo:.3f}, {hi:.3f}]" for v, (m, lo, hi) in r["ratios"].items() if v != "plain")
        print(f"{name:12s} plain {r['plain_ms']:8.2f} ms/step   {cells}   first epoch x{r['first_epoch']:.2f}", flush=True)
        if r["ratios"]["NanGuard"][0] > LIMITS[name]:
            broken.append(name)
    if a.json:
        with open(a.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)
    if a.check and broken:
        sys.exit(f"over the limit: {', '.join(broken)}")


if __name__ == "__main__":
    main()
