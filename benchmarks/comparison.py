"""The results and the cost of other tools: the tables of docs/comparison.md.

A small network learns scikit-learn's digits for 360 steps, under each tool, with one fault at a
time. A cell has the action of the tool and the result of the run: the accuracy on held-out digits,
or NaN if the model or the optimizer has NaN. The last column is the processor time of a healthy
epoch with the tool as a multiple of one without it: the median of paired rounds, each of the median
epoch.

    python benchmarks/comparison.py                              # TerminateOnNaN, enable_check_numerics, LossScaleOptimizer
    KERAS_BACKEND=jax python benchmarks/comparison.py            # optax.apply_if_finite; takes optax
    KERAS_BACKEND=torch python benchmarks/comparison.py          # GradScaler, SpikeDetection, trainscope; takes lightning, trainscope
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import keras
import numpy as np
from sklearn.datasets import load_digits

from keras_nanguard import NanGuard
from keras_nanguard.testing import inject

BATCH, EPOCHS, AT, RATE = 32, 8, 100, 1e-3
FAULTS = ("nothing", "NaN in one image", "Inf in a gradient", "batch 1e6 times too large", "rate 1000 times too high")


CLOCK: list[float] = []
"""Processor time at the start of each epoch of the last run."""


def data() -> tuple[np.ndarray, ...]:
    x, y = load_digits(return_X_y=True)
    x, y = (x / 16).astype("float32"), y.astype("int64")
    return x[:1440], y[:1440], x[1440:], y[1440:]


X, Y, X_TEST, Y_TEST = data()


@dataclass
class Ended:
    """How a run ended."""

    noticed: str
    finite: bool
    accuracy: float

    def __str__(self) -> str:
        return f"{self.noticed or 'unnoticed'}; {f'{self.accuracy:.2f}' if self.finite else 'NaN'}"


Tool = Callable[[str, int], Ended]
"""Trains for a number of epochs with one fault."""


def rate_of(fault: str) -> float:
    return RATE * 1000 if fault == FAULTS[4] else RATE


def batches(fault: str, epochs: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield step and batch for a hand-written loop; the bad batch occurs once."""
    random, step = np.random.default_rng(0), 0
    for _ in range(epochs):
        CLOCK.append(time.process_time())
        order = random.permutation(len(X))
        for start in range(0, len(X), BATCH):
            rows = order[start : start + BATCH]
            x, y = X[rows].copy(), Y[rows]
            if step == AT and fault == FAULTS[1]:
                x[0, 20] = np.nan
            if step == AT and fault == FAULTS[3]:
                x *= 1e6
            yield step, x, y
            step += 1


# Keras, on any backend


def keras_model(fault: str, optimizer: Any = None) -> Any:
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(48, activation="relu"), keras.layers.BatchNormalization(momentum=0.9)]
    model = keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10, dtype="float32")])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.Adam(rate_of(fault)), loss, metrics=["accuracy"], jit_compile=False)
    return model


def broken(model: Any, fault: str) -> Any:
    """Return a context in which one step of a fit has a fault."""
    if fault == FAULTS[1]:
        return inject(model, site="inputs", kind="nan", step=AT)
    if fault == FAULTS[2]:
        return inject(model, site="gradients", kind="inf", step=AT)
    if fault == FAULTS[3]:
        return inject(model, site="inputs", kind="spike", step=AT, rows=None, entries=None, magnitude=1e6)
    return contextlib.nullcontext()


def fitted(fault: str, epochs: int, callbacks: list[Any], float16: bool = False) -> Ended:
    keras.config.set_dtype_policy("mixed_float16" if float16 else "float32")
    model = keras_model(fault)
    noticed, steps = "", epochs * len(X) // BATCH
    try:
        with broken(model, fault):
            clock = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: CLOCK.append(time.process_time()))
            model.fit(X, Y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[clock, *callbacks])
    except Exception as error:  # noqa: BLE001  an exception of a tool is its result
        noticed = f"raises {type(error).__name__} at {int(model.optimizer.iterations)}"
    done = int(model.optimizer.iterations) if not float16 else int(model.optimizer.inner_optimizer.iterations)
    if not noticed and model.stop_training:
        noticed = "stops"
    if not noticed and float16 and done < steps and fault != FAULTS[0]:
        noticed = "skips"
    return Ended(noticed, finite(model), accuracy(model))


def finite(model: Any) -> bool:
    arrays = [keras.ops.convert_to_numpy(v) for v in (*model.variables, *model.optimizer.variables)]
    return all(bool(np.isfinite(a).all()) for a in arrays if a.dtype.kind == "f")


def accuracy(model: Any) -> float:
    return float((np.asarray(model.predict(X_TEST, verbose=0)).argmax(1) == Y_TEST).mean())


def stock(fault: str, epochs: int) -> Ended:
    return fitted(fault, epochs, [])


def terminate_on_nan(fault: str, epochs: int) -> Ended:
    return fitted(fault, epochs, [keras.callbacks.TerminateOnNaN()])


def loss_scale(fault: str, epochs: int) -> Ended:
    return fitted(fault, epochs, [], float16=True)


def check_numerics(fault: str, epochs: int) -> Ended:
    import tensorflow as tf

    tf.debugging.enable_check_numerics()
    try:
        return fitted(fault, epochs, [])
    finally:
        tf.debugging.disable_check_numerics()


def nan_guard(fault: str, epochs: int, float16: bool = False) -> Ended:
    guard = NanGuard(verbose=0)
    ended = fitted(fault, epochs, [guard], float16)
    causes = dict.fromkeys(i.diagnosis.cause for i in guard.incidents if i.diagnosis)
    outcomes = [outcome for incident in guard.incidents for outcome in incident.outcomes]
    done = dict.fromkeys(o.action for o in outcomes if o.status == "done")
    ended.noticed = ": ".join(filter(None, (", ".join(causes), ", ".join(done))))
    return ended


# A hand-written loop on JAX, with optax


def optax_loop(fault: str, epochs: int, guarded: bool = False) -> Ended:
    import jax
    import jax.numpy as jnp
    import optax

    model = keras_model(fault)
    tx = optax.adam(rate_of(fault))
    tx = optax.apply_if_finite(tx, max_consecutive_errors=5) if guarded else tx

    def loss_of(weights: Any, others: Any, x: Any, y: Any) -> Any:
        logits, others = model.stateless_call(weights, others, x, training=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), others

    @jax.jit
    def train_step(weights: Any, others: Any, slots: Any, x: Any, y: Any, extra: Any) -> Any:
        (_, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, others, x, y)
        gradients = [gradients[0] + extra, *gradients[1:]]
        updates, slots = tx.update(gradients, slots, weights)
        return optax.apply_updates(weights, updates), others, slots

    weights, others = ([v.value for v in group] for group in (model.trainable_variables, model.non_trainable_variables))
    slots = tx.init(weights)
    for step, x, y in batches(fault, epochs):
        extra = jnp.inf if fault == FAULTS[2] and step == AT else 0.0
        weights, others, slots = train_step(weights, others, slots, x, y, extra)
    logits, _ = model.stateless_call(weights, others, X_TEST, training=False)
    arrays = [np.asarray(a) for a in jax.tree.leaves((weights, others, slots))]
    whole = all(bool(np.isfinite(a).all()) for a in arrays if a.dtype.kind == "f")
    noticed = f"skips {int(slots.total_notfinite)}" if guarded and int(slots.total_notfinite) else ""
    return Ended(noticed, whole, float((np.asarray(logits).argmax(1) == Y_TEST).mean()))


# A hand-written loop on PyTorch


def torch_loop(fault: str, epochs: int, tool: str = "") -> Ended:
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.BatchNorm1d(48), torch.nn.Linear(48, 10))
    optimizer = torch.optim.Adam(net.parameters(), rate_of(fault))
    scaler = torch.amp.GradScaler("cpu", enabled=tool == "scaler")
    watching = TORCH_TOOLS[tool](net, optimizer)
    noticed = ""
    for step, x, y in batches(fault, epochs):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=tool == "scaler"):
            loss = torch.nn.functional.cross_entropy(net(torch.from_numpy(x)).float(), torch.from_numpy(y))
        scaler.scale(loss).backward()
        if fault == FAULTS[2] and step == AT:
            net[0].weight.grad[0, 0] = torch.inf
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if tool == "scaler" and scaler.get_scale() < before and fault != FAULTS[0]:
            noticed = "skips"
        said = watching(step, loss.detach())
        noticed = noticed or said
        if said.startswith("raises"):
            break
    with torch.no_grad():
        right = (net.eval()(torch.from_numpy(X_TEST)).argmax(1).numpy() == Y_TEST).mean()
    slots = [value for state in optimizer.state.values() for value in state.values()]
    whole = all(bool(torch.isfinite(a).all()) for a in (*net.state_dict().values(), *slots))
    return Ended(noticed, whole, float(right))


def _spike_detection(net: Any, optimizer: Any) -> Callable[[int, Any], str]:
    from lightning.fabric import Fabric
    from lightning.fabric.utilities.spike import SpikeDetection, TrainingSpikeException

    fabric, callback = Fabric(accelerator="cpu"), SpikeDetection(exclude_batches_path=tempfile.mkdtemp())

    def after(step: int, loss: Any) -> str:
        try:
            callback.on_train_batch_end(fabric, loss, None, step)
        except TrainingSpikeException:
            return f"raises at {step}"
        return ""

    return after


def _trainscope(net: Any, optimizer: Any) -> Callable[[int, Any], str]:
    from trainscope import TrainScope, TrainScopeConfig

    logging.getLogger("trainscope").setLevel(logging.ERROR)
    config = TrainScopeConfig(run_dir=tempfile.mkdtemp())
    scope = TrainScope(net, optimizer, config).attach()
    was = scope._writer.append_global
    seen: list[int] = []

    def append(row: dict[str, Any]) -> Any:
        if row["is_spike"] or not np.isfinite(row["loss"]):
            seen.append(row["step"])
        return was(row)

    scope._writer.append_global = append

    def after(step: int, loss: Any) -> str:
        scope.step(loss.item())
        return f"records it at {seen[0]}" if seen else ""

    return after


TORCH_TOOLS: dict[str, Callable[[Any, Any], Callable[[int, Any], str]]] = {
    "": lambda *_: lambda *_: "",
    "scaler": lambda *_: lambda *_: "",
    "spikes": _spike_detection,
    "trainscope": _trainscope,
}


# The table

TOOLS: dict[str, dict[str, tuple[Tool, Tool]]] = {
    "tensorflow": {
        "Keras": (stock, stock),
        "`TerminateOnNaN`": (terminate_on_nan, stock),
        "`tf.debugging.enable_check_numerics`": (check_numerics, stock),
        "`NanGuard()`": (nan_guard, stock),
        "`LossScaleOptimizer` (mixed_float16)": (loss_scale, loss_scale),
        "`NanGuard()` (mixed_float16)": (lambda f, e: nan_guard(f, e, True), loss_scale),
    },
    "jax": {
        "a loop with optax": (optax_loop, optax_loop),
        "`optax.apply_if_finite`": (lambda f, e: optax_loop(f, e, guarded=True), optax_loop),
        "`NanGuard()`": (nan_guard, stock),
    },
    "torch": {
        "a loop of torch": (torch_loop, torch_loop),
        "`GradScaler` (autocast)": (lambda f, e: torch_loop(f, e, "scaler"), torch_loop),
        "Lightning `SpikeDetection`": (lambda f, e: torch_loop(f, e, "spikes"), torch_loop),
        "trainscope": (lambda f, e: torch_loop(f, e, "trainscope"), torch_loop),
        "`NanGuard()`": (nan_guard, stock),
    },
}
"""Each tool, and the same run without it, for comparison."""


def cost(tool: Tool, without: Tool, rounds: int) -> float:
    """Return the time of a healthy epoch with a tool as a multiple of one without it."""

    def seconds(run: Tool) -> float:
        CLOCK.clear()
        run(FAULTS[0], 12)
        return statistics.median(after - before for before, after in pairwise(CLOCK[1:]))  # the first one compiles

    return statistics.median(seconds(tool) / seconds(without) for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="paired rounds for the cost")
    parser.add_argument("--cost", action="store_true", help="only the cost")
    parser.add_argument("--only", default="", help="part of the name of a tool")
    options = parser.parse_args()
    print("| tool | " + " | ".join(FAULTS) + " | cost |")
    print("|---" * (len(FAULTS) + 2) + "|")
    for name, (tool, without) in TOOLS[os.environ["KERAS_BACKEND"]].items():
        if options.only in name:
            cells = ["" if options.cost else str(tool(fault, EPOCHS)) for fault in FAULTS]
            cells.append("" if tool is without else f"{cost(tool, without, options.rounds):.2f}")
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
