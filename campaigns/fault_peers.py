"""The same faults under other tools: whether each run ends finite, and within a point of accuracy.

Tools for Keras train with `fit`. `optax.apply_if_finite`, `GradScaler`, stabilityguard and
trainscope are made for hand-written loops, so they run in one, with the same network. The same loop
also runs without a tool. Tools that are not installed are omitted.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import json
import logging
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from campaigns import fault_models, fault_runs
from campaigns.fault_models import BATCH, Configuration
from campaigns.fault_plan import NONFINITE, Fault
from keras_nanguard import NanGuard
from keras_nanguard.testing import inject

__all__ = ["run"]

STEPS, RATE = 24, 1e-3

COMBINATIONS = {
    "inputs": NONFINITE,
    "targets": NONFINITE,
    "loss": ("nan", "inf"),
    "gradients": NONFINITE,
    "weights": NONFINITE,
    "statistics": ("nan", "inf"),
    "slots": ("nan", "inf"),
}

TIMES = 1
"""Steps at which each combination of site and kind is injected."""

VALUES = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}

Ended = tuple[bool, float]
"""Whether every number of the state is finite, and the accuracy."""

Runs = Callable[[Fault | None], Ended]
"""Trains with one fault, or without a fault."""


def faults() -> list[Fault]:
    """Return the faults, the same for each tool."""
    draw = random.Random(7)
    pairs = [(site, kind) for site, kinds in COMBINATIONS.items() for kind in kinds] * TIMES
    return [Fault(n, "inject", *pair, draw.randrange(1, STEPS - 4), draw.randrange(BATCH)) for n, pair in enumerate(pairs)]


class ReloadBest(keras.callbacks.Callback):
    """A common hand-written callback: keeps the weights while the loss is finite, and restores them
    if it is not.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        self.weights = self.model.get_weights()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch % 4 != 3:
            return
        if np.isfinite((logs or {}).get("loss", np.nan)):
            self.weights = self.model.get_weights()
        else:
            self.model.set_weights(self.weights)


IN_FIT: dict[str, Callable[[], list[Any]]] = {
    "Keras": list,
    "`TerminateOnNaN`": lambda: [keras.callbacks.TerminateOnNaN()],
    "reload the last good weights, by hand": lambda: [ReloadBest()],
    "`NanGuard()`": lambda: [NanGuard(verbose=0)],
}


def in_fit(bench: fault_runs.Bench, callbacks: Callable[[], list[Any]]) -> Iterator[Runs]:
    """Yield a function that trains with `fit` and these callbacks: the same compiled step for every
    fault.
    """
    with contextlib.ExitStack() as stack:
        hooks = {}
        for fault in faults():
            at = fault_runs.SLOT * (fault.number + 1) + fault.step
            given = {"site": fault.site, "kind": fault.kind, "step": at, "rows": fault.row, "require_fired": False}
            hooks[fault.number] = stack.enter_context(inject(bench.model, **given))

        def run(fault: Fault | None) -> Ended:
            bench.put_back()
            fault_runs.begin(hooks, 0 if fault is None else fault_runs.SLOT * (fault.number + 1))
            bench.fit(*bench.batches(), *callbacks())
            state, accuracy = bench.end()
            return fault_runs.finite(state), accuracy

        yield run


def batches(bench: fault_runs.Bench, fault: Fault | None) -> Iterator[tuple[bool, Any, Any]]:
    """Yield whether the fault occurs in this step, and its batch, for a hand-written loop."""
    for step in range(STEPS):
        x, y = (np.array(a[step * BATCH : (step + 1) * BATCH]) for a in (bench.x, bench.y))
        now = fault is not None and fault.step == step
        if now and fault is not None and fault.site in ("inputs", "targets"):
            (x if fault.site == "inputs" else y)[fault.row, 0] = VALUES[fault.kind]
        yield now, x, y


# JAX


def optax_loop(bench: fault_runs.Bench, guarded: bool) -> Iterator[Runs]:
    """Yield a function that trains in a loop with optax."""
    import jax
    import jax.numpy as jnp
    import optax

    model, tx = bench.model, optax.adam(RATE)
    tx = optax.apply_if_finite(tx, max_consecutive_errors=5) if guarded else tx
    statistics = [n for n, v in enumerate(model.non_trainable_variables) if "moving_" in v.path]

    @jax.jit
    def train_step(weights: Any, others: Any, slots: Any, x: Any, y: Any, of_loss: Any, of_gradient: Any) -> Any:
        def loss_of(weights: Any) -> Any:
            logits, new = model.stateless_call(weights, others, x, training=True)
            return optax.softmax_cross_entropy(logits, y).mean() * of_loss, new

        (_, new), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
        updates, slots = tx.update([g * of_gradient for g in gradients], slots, weights)
        return optax.apply_updates(weights, updates), new, slots

    def run(fault: Fault | None) -> Ended:
        bench.put_back()
        weights, others = ([v.value for v in group] for group in (model.trainable_variables, model.non_trainable_variables))
        slots = tx.init(weights)
        for now, x, y in batches(bench, fault):
            value = VALUES[fault.kind] if now and fault is not None else 1.0
            site = fault.site if now and fault is not None else ""
            if site == "weights":
                weights = [_first_entry(w, value) for w in weights]
            if site == "statistics":
                others = [_first_entry(o, value) if n in statistics else o for n, o in enumerate(others)]
            if site == "slots":
                slots = jax.tree.map(functools.partial(_first_entry, value=value), slots)
            factors = (jnp.float32(value if site == name else 1.0) for name in ("loss", "gradients"))
            weights, others, slots = train_step(weights, others, slots, x, y, *factors)
        logits, _ = model.stateless_call(weights, others, bench.held_out, training=False)
        whole = fault_runs.finite([np.asarray(a) for a in jax.tree.leaves((weights, others, slots))])
        return whole, float((np.asarray(logits).argmax(1) == bench.labels.argmax(1)).mean())

    yield run


def _first_entry(array: Any, value: float) -> Any:
    """Return an array with another first entry; a scalar is returned unchanged."""
    return array.at[(0,) * array.ndim].set(value) if array.ndim else array


# PyTorch


def torch_loop(bench: fault_runs.Bench, tool: str) -> Iterator[Runs]:
    """Yield a function that trains in a loop of PyTorch."""
    yield functools.partial(_in_torch, bench, tool)


def _in_torch(bench: fault_runs.Bench, tool: str, fault: Fault | None) -> Ended:
    import torch

    bench.put_back()
    net = bench.model
    inner = torch.optim.Adam(net.parameters(), RATE)
    optimizer, scaler, after = TORCH[tool](net, inner)
    statistics = [v.value for v in net.non_trainable_variables if "moving_" in v.path]
    for now, x, y in batches(bench, fault):
        site = fault.site if now and fault is not None else ""
        value = VALUES[fault.kind] if now and fault is not None else 1.0
        slots = [v for state in inner.state.values() for v in state.values() if torch.is_tensor(v) and v.ndim]
        groups = {"weights": [v.value.data for v in net.trainable_variables], "statistics": statistics, "slots": slots}
        with torch.no_grad():
            for tensor in groups.get(site, ()):
                tensor.view(-1)[0] = value
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(torch.from_numpy(x), training=True), torch.from_numpy(y))
        loss = loss * value if site == "loss" else loss
        (scaler.scale(loss) if scaler is not None else loss).backward()
        if site == "gradients":
            for weight in net.parameters():
                if weight.grad is not None:
                    weight.grad *= value
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        after(loss.detach())
    state = [v.value.detach().numpy() for v in (*net.trainable_variables, *net.non_trainable_variables)]
    slots = [v.numpy() for known in inner.state.values() for v in known.values() if torch.is_tensor(v)]
    return fault_runs.finite([*state, *slots]), fault_models.accuracy(net, bench.held_out, bench.labels)


Tooled = tuple[Any, Any, Callable[[Any], Any]]
"""The optimizer, the scaler if there is one, and a function that is called with each loss."""


def _grad_scaler(net: Any, optimizer: Any) -> Tooled:
    import torch

    return optimizer, torch.amp.GradScaler("cpu", init_scale=2.0**8), lambda loss: None


def _stabilityguard(net: Any, optimizer: Any) -> Tooled:
    from stabilityguard import GuardedOptimizer

    logging.getLogger("stabilityguard").setLevel(logging.CRITICAL)
    guarded = GuardedOptimizer(optimizer, net, nan_action="skip", log_dir=tempfile.mkdtemp(), verbose=False)
    return guarded, None, lambda loss: None


def _trainscope(net: Any, optimizer: Any) -> Tooled:
    from trainscope import TrainScope, TrainScopeConfig

    logging.getLogger("trainscope").setLevel(logging.CRITICAL)
    scope = TrainScope(net, optimizer, TrainScopeConfig(run_dir=tempfile.mkdtemp())).attach()
    return optimizer, None, lambda loss: scope.step(loss.item())


TORCH: dict[str, Callable[[Any, Any], Tooled]] = {
    "": lambda net, optimizer: (optimizer, None, lambda loss: None),
    "torch": _grad_scaler,
    "stabilityguard": _stabilityguard,
    "trainscope": _trainscope,
}

TOOLS: dict[str, dict[str, Callable[[fault_runs.Bench], Iterator[Runs]]]] = {
    "tensorflow": {name: functools.partial(in_fit, callbacks=made) for name, made in IN_FIT.items()},
    "jax": {
        "a loop with optax": functools.partial(optax_loop, guarded=False),
        "`optax.apply_if_finite`": functools.partial(optax_loop, guarded=True),
        "`NanGuard()`": functools.partial(in_fit, callbacks=IN_FIT["`NanGuard()`"]),
    },
    "torch": {
        "a loop of PyTorch": functools.partial(torch_loop, tool=""),
        "`GradScaler`": functools.partial(torch_loop, tool="torch"),
        "stabilityguard": functools.partial(torch_loop, tool="stabilityguard"),
        "trainscope": functools.partial(torch_loop, tool="trainscope"),
        "`NanGuard()`": functools.partial(in_fit, callbacks=IN_FIT["`NanGuard()`"]),
    },
}

NEEDS = {"a loop with optax": "optax", "`optax.apply_if_finite`": "optax", "stabilityguard": "stabilityguard", "trainscope": "trainscope"}


def run(backend: str, results: Path, only: str = "", count: int | None = None) -> None:
    """Run every fault under every tool of a backend, and write a line for each."""
    mode = {"tensorflow": "graph", "jax": "XLA", "torch": "eager"}[backend]
    bench = fault_runs.Bench(Configuration(backend, "CNN+BN", mode, "float32", "Adam"), STEPS)
    bench.warm_up()
    chosen = list(itertools.islice(faults(), count))
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("w", encoding="utf-8") as file:
        for name, tool in TOOLS[backend].items():
            if only not in name or importlib.util.find_spec(NEEDS.get(name, "keras")) is None:
                print(f"{name}: left out", flush=True)
                continue
            with contextlib.contextmanager(tool)(bench) as ends:
                undisturbed = ends(None)[1]
                for fault in chosen:
                    error = ""
                    try:
                        finite, accuracy = ends(fault)
                    except Exception as caught:  # noqa: BLE001  an exception of a tool is the result of its run
                        finite, accuracy, error = False, 0.0, f"{type(caught).__name__}: {caught}"[:200]
                    end = {"finite": finite, "accuracy": accuracy, "undisturbed": undisturbed, "error": error}
                    row = {"backend": backend, "tool": name, "site": fault.site, "kind": fault.kind, "step": fault.step, **end}
                    file.write(json.dumps(row) + "\n")
                    file.flush()
            print(f"{name}: {len(chosen)} faults", flush=True)
