"""How many runs recover from a fault? One hundred seeded faults, with and without a guard.

Each scenario trains a small network on scikit-learn's digits, with one bad value at one site in one
step. A run has recovered if every variable is finite at the end, and the accuracy on held-out
digits is at most one point below that of the run without the fault. Claim: `NanGuard()` with its
defaults always recovers.

    python benchmarks/recovers.py            # 100 scenarios, about ten minutes on one core
    python benchmarks/recovers.py --quick    # 10 of them; exit code 1 if the claim fails
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

from keras_nanguard import NanGuard
from keras_nanguard.testing import inject

BATCH, EPOCHS, TRAIN = 32, 8, 1280
STEPS = TRAIN // BATCH * EPOCHS
POINT = 0.01

KINDS = {
    "inputs": ("nan", "inf", "-inf", "overflow"),
    "targets": ("nan", "inf", "-inf"),
    "loss": ("nan", "inf"),
    "gradients": ("nan", "inf", "-inf", "overflow"),
    "weights": ("nan", "inf", "-inf", "overflow"),
    "statistics": ("nan", "inf", "overflow"),
    "slots": ("nan", "inf", "overflow"),
    "loss_scale": ("nan", "inf", "zero"),
}
"""Every kind of fault for each site."""


def dense() -> Any:
    """Return a dense network with BatchNormalization and Dropout, under Adam."""
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(48),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Dropout(0.1),
            layers.Dense(10, dtype="float32"),
        ]
    )


def convolutional() -> Any:
    """Return a small convolutional network with BatchNormalization."""
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Reshape((8, 8, 1)),
            layers.Conv2D(8, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(10, dtype="float32"),
        ]
    )


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "dense, Adam": (dense, lambda: keras.optimizers.Adam(3e-3), "float32"),
    "dense, SGD under CosineDecay": (
        dense,
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, STEPS), momentum=0.9),
        "float32",
    ),
    "convolutional, Adam": (convolutional, lambda: keras.optimizers.Adam(5e-3), "float32"),
    "dense, mixed_float16": (dense, lambda: keras.optimizers.Adam(3e-3), "mixed_float16"),
}


@dataclass(frozen=True)
class Scenario:
    """One fault."""

    number: int
    model: str
    site: str
    kind: str
    step: int
    seed: int


def scenarios(count: int) -> list[Scenario]:
    """Return the first scenarios of a fixed list that mixes sites, kinds, models and steps evenly.
    """
    draw = random.Random(20240229)
    pairs = [(site, kind) for site, kinds in KINDS.items() for kind in kinds]
    draw.shuffle(pairs)
    reported = []
    for number in range(count):
        site, kind = pairs[number % len(pairs)]
        fits = [name for name in MODELS if site != "loss_scale" or name.endswith("float16")]
        reported.append(Scenario(number, draw.choice(fits), site, kind, draw.randrange(5, STEPS * 2 // 3), number % 3))
    return reported


def digits() -> tuple[Any, Any, Any, Any]:
    """Return training and held-out digits, the classes one-hot."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x, y = (data.data[order] / 16).astype("float32"), np.eye(10, dtype="float32")[data.target[order]]
    return x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:]


DATA = digits()


class ReloadBest(keras.callbacks.Callback):
    """A common hand-written callback: keeps the weights of the best epoch, and restores them if the
    loss is NaN.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        self.best, self.weights = float("inf"), self.model.get_weights()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        loss = (logs or {}).get("loss", float("nan"))
        if loss < self.best:
            self.best, self.weights = loss, self.model.get_weights()
        elif not np.isfinite(loss):
            self.model.set_weights(self.weights)


WAYS: dict[str, Callable[[], list[Any]]] = {
    "stock Keras": list,
    "TerminateOnNaN": lambda: [keras.callbacks.TerminateOnNaN()],
    "reload best, by hand": lambda: [ReloadBest()],
    "NanGuard()": lambda: [NanGuard(verbose=0)],
}


def build(name: str, seed: int) -> Any:
    """Return a compiled model with seeded weights."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    make, optimizer, precision = MODELS[name]
    keras.config.set_dtype_policy(precision)
    model = make()
    keras.config.set_dtype_policy("float32")
    chosen = optimizer()
    scaled = keras.optimizers.LossScaleOptimizer(chosen) if precision == "mixed_float16" else chosen
    model.compile(scaled, keras.losses.CategoricalCrossentropy(from_logits=True))
    return model


def run(name: str, seed: int, callbacks: list[Any], fault: Scenario | None = None) -> tuple[bool, float]:
    """Train one network; return whether it ends finite, and its accuracy on held-out digits."""
    model = build(name, seed)
    x, y, held_out, labels = DATA

    def fit() -> None:
        model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks)

    if fault is None:
        fit()
    else:
        with inject(model, site=fault.site, kind=fault.kind, step=fault.step):
            fit()
    state = [*model.variables, *model.optimizer.variables]
    finite = all(np.isfinite(np.asarray(v.numpy(), "float64")).all() for v in state)
    predicted = keras.ops.convert_to_numpy(model(held_out, training=False))
    return finite, float(np.mean(predicted.argmax(1) == labels.argmax(1)))


def measure(chosen: list[Scenario], ways: list[str]) -> list[dict[str, Any]]:
    """Run every scenario in every variant; return one row for each scenario."""
    clean: dict[tuple[str, int], float] = {}
    rows = []
    for scenario in chosen:
        key = (scenario.model, scenario.seed)
        if key not in clean:
            clean[key] = run(*key, [])[1]
        row: dict[str, Any] = {**asdict(scenario), "clean": clean[key]}
        for way in ways:
            finite, accuracy = run(*key, WAYS[way](), scenario)
            row[way] = {"finite": finite, "accuracy": accuracy, "recovered": finite and accuracy >= clean[key] - POINT}
        rows.append(row)
        marks = " ".join("+" if row[way]["recovered"] else "-" for way in ways)
        where = f"{scenario.number:3d} {scenario.model}, {scenario.site} {scenario.kind} at step {scenario.step}"
        print(f"{marks}  {where}", file=sys.stderr, flush=True)
    return rows


def table(rows: list[dict[str, Any]], ways: list[str]) -> str:
    """Return the number of recovered runs, in all and for each site, as Markdown."""
    lines = [f"| site | runs | {' | '.join(ways)} |", "|---|---|" + "---|" * len(ways)]
    sites = [site for site in KINDS if any(row["site"] == site for row in rows)]
    for title, part in [*((site, [r for r in rows if r["site"] == site]) for site in sites), ("**all**", rows)]:
        counts = [str(sum(row[way]["recovered"] for row in part)) for way in ways]
        lines.append(f"| {title} | {len(part)} | {' | '.join(counts)} |")
    finite = [str(sum(row[way]["finite"] for row in rows)) for way in ways]
    lines.append(f"| ends finite | {len(rows)} | {' | '.join(finite)} |")
    return "\n".join(lines)


def main() -> int:
    """Print the table; return 1 if the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 scenarios instead of 100")
    parser.add_argument("--count", type=int, default=100, help="number of scenarios (100)")
    parser.add_argument("--only", choices=WAYS, help="one variant instead of all four")
    parser.add_argument("--json", type=Path, help="write each result to this file")
    given = parser.parse_args()
    start, cpu = time.perf_counter(), time.process_time()
    ways = [given.only] if given.only else list(WAYS)
    rows = measure(scenarios(10 if given.quick else given.count), ways)
    print(table(rows, ways))
    spent = f"{time.perf_counter() - start:.0f} s, {time.process_time() - cpu:.0f} s of it on a processor"
    print(f"\n{len(rows)} scenarios, {STEPS} steps each: {spent}")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    ours = ways[-1]
    failed = [row for row in rows if not row[ours]["recovered"]]
    for row in failed:
        print(f"{ours} did not recover: {row}", file=sys.stderr)
    return 1 if failed and ours == "NanGuard()" else 0


if __name__ == "__main__":
    raise SystemExit(main())
