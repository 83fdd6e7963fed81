"""Runs under `tf.distribute.MirroredStrategy` on two logical CPUs, in separate processes.

Devices can be set up once per process, and TensorFlow 2.21 confuses the collectives of two
strategies if their models have other shapes, or if one of them runs eagerly. `python
mirrored_runs.py NAME...` runs these cases and prints a line of JSON for each, which
`tests/backends/tensorflow/test_mirrored.py` checks. A number before the names is the number of
replicas, by default 2.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import conftest  # noqa: F401  (sets the environment)
import keras
import numpy as np
import tensorflow as tf
from keras import ops

from keras_nanguard import NanGuard
from support import programs, zoo

REPLICAS = int(sys.argv.pop(1)) if sys.argv[1].isdigit() else 2
LAST = REPLICAS - 1
ROWS = {0: 1, LAST: 6}
"""A row of the batch on the first replica, and one on the last."""

Case = Callable[[], dict[str, Any]]

CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Add a case to the table."""
    CASES[function.__name__] = function
    return function


def state_of(model: Any) -> list[tuple[str, np.ndarray]]:
    """Return the copy of each replica of every variable of the train state."""
    held = [v for v in vars(model).values() if isinstance(v, keras.optimizers.Optimizer)]
    optimizers = {id(o): o for o in (model.optimizer, *held) if o is not None}.values()
    found = [*model.variables, *model.metrics_variables, *(v for o in optimizers for v in o.variables)]
    natives = [(variable.path, variable.value) for variable in {id(v): v for v in found}.values()]
    natives += [(variable.name, variable) for variable in getattr(model, "hidden", [])]
    return [
        (f"{path} on replica {number}", copy.numpy())
        for path, native in natives
        for number, copy in enumerate(model.distribute_strategy.experimental_local_results(native))
    ]


def run(build: Callable[[], Any], data: zoo.Data, guard: Any = None, epochs: int = 2, strategy: Any = None, **fit: Any) -> zoo.Run:
    """Train a model that is built under the strategy, by default a new one, from a fixed seed."""
    keras.utils.set_random_seed(0)
    strategy = strategy or tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(REPLICAS)])
    with strategy.scope():
        model = build()
    keras.utils.set_random_seed(1)
    callbacks = [*([guard] if guard is not None else []), *fit.pop("callbacks", [])]
    fit = {"batch_size": zoo.BATCH, "shuffle": False, "verbose": 0, **fit}
    with zoo.as_written():
        history = model.fit(*data.all, epochs=epochs, callbacks=callbacks, **fit).history
    return zoo.Run(model, zoo.numbers(history), guard, state_of(model))


BAD = {3: LAST, 7: 0, 8: None}
"""The replica that has the bad row of a batch; `None` for both replicas."""


def with_poison() -> zoo.Data:
    """Return data with inserted bad batches."""
    rows = zoo.regression().with_poison(BAD, 0.5)
    for batch, replica in BAD.items():
        for row in ROWS.values() if replica is None else [ROWS[replica]]:
            zoo.poison(rows, batch, row=row)
    return rows


def oracle(build: Callable[[], Any]) -> dict[str, Any]:
    """Train on data with bad batches, guarded, and with stock Keras first without these batches, and then with them."""
    guard, without = NanGuard(verbose=0), run(build, zoo.regression())
    guarded = run(build, with_poison(), guard)
    with zoo.as_written():
        without.model.fit(*with_poison().all, batch_size=zoo.BATCH, verbose=0)
    return {
        "stock": sum(not zoo.finite(array) for _, array in state_of(without.model)),
        "differences": zoo.differences(guarded, without),
        **reports(guard),
    }


def reports(guard: NanGuard) -> dict[str, Any]:
    """Return the results that the guard reports."""
    return {
        "steps": [incident.step for incident in guard.incidents],
        "replicas": [list(incident.replicas) for incident in guard.incidents],
        "refused": [incident.refused for incident in guard.incidents],
        "causes": [incident.diagnosis.cause for incident in guard.incidents],
        "samples": [list(incident.diagnosis.samples) for incident in guard.incidents],
    }


@case
def adam() -> dict[str, Any]:
    return oracle(zoo.plain)


def scaled(optimizer: Any) -> Any:
    """Return a loss scale at which no healthy step overflows: Keras half commits those."""
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0, dynamic_growth_steps=10)


@case
def mixed_float16() -> dict[str, Any]:
    keras.config.set_dtype_policy("mixed_float16")
    return oracle(lambda: zoo.plain(scaled(keras.optimizers.Adam())))


@case
def eager() -> dict[str, Any]:
    return oracle(lambda: zoo.plain(run_eagerly=True))


@case
def two_optimizers() -> dict[str, Any]:
    return oracle(programs.gan)


@case
def overflow() -> dict[str, Any]:
    """A float16 overflow on replica 1: the scale is halved on both, and nothing else changes."""
    keras.config.set_dtype_policy("mixed_float16")
    states: list[dict[str, Any]] = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            states.append(dict(state_of(self.model)))

    data = zoo.regression(batches=4)
    data.y[2 * zoo.BATCH + ROWS[LAST]] = 3e4
    guard = NanGuard(verbose=0)
    done = run(lambda: zoo.plain(scaled(keras.optimizers.Adam())), data, guard, epochs=1, callbacks=[Watch()])
    before, after = states[1], states[2]
    changed = {key: (before[key].tolist(), after[key].tolist()) for key in before if not np.array_equal(before[key], after[key])}
    return {"changed": changed, "overflows": guard.session.run.counts.overflows, "finite": all(zoo.finite(a) for _, a in done.state), **reports(guard)}


@case
def several_steps() -> dict[str, Any]:
    """One replica: with several on CPUs, TensorFlow 2.21 cannot run several steps per execution."""
    global REPLICAS
    before, REPLICAS = REPLICAS, 1
    try:
        return oracle(lambda: zoo.plain(steps_per_execution=3))
    finally:
        REPLICAS = before


@case
def healthy() -> dict[str, Any]:
    """Guarded and plain runs on clean data."""
    guard = NanGuard(verbose=0)
    guarded = run(zoo.plain, zoo.regression(), guard)
    return {"differences": zoo.differences(guarded, run(zoo.plain, zoo.regression())), **reports(guard)}


class Own(keras.Model):
    """A custom step with a log without a metric, and a variable that no list of Keras contains."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.score = keras.metrics.Mean(name="score")
        self.hidden = [tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.MEAN)]

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x, y, predicted)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.hidden[0].assign_add(loss)
        self.score.update_state(ops.abs(y - predicted))
        return {"loss": loss, "score": self.score.result()}


def own() -> Any:
    model = Own()
    model.build((None, 6))
    model.compile("adam", "mse")
    return model


@case
def own_step() -> dict[str, Any]:
    return oracle(own)


@case
def uneven() -> dict[str, Any]:
    """A last batch of a single row, of which replica 1 gets none."""
    data = zoo.regression()
    data = zoo.Data(data.x[:-7], data.y[:-7])
    guard = NanGuard(verbose=0)
    done, stock = run(own, data, guard), run(own, data)
    return {"finite": all(zoo.finite(a) for _, a in done.state), "stock": all(zoo.finite(a) for _, a in stock.state), **reports(guard)}


class Logarithm(keras.layers.Layer):
    """Leaves its domain for one row of a batch."""

    def call(self, x: Any) -> Any:
        return ops.log(ops.where(x > 50.0, -1.0, 4.0 + x))


@case
def forward_domain() -> dict[str, Any]:
    """A row for which a layer leaves its domain, on the last replica in batch 3."""
    data = zoo.regression()
    data.x[zoo.BATCH * 3 + ROWS[LAST], 0] = 100.0
    guard = NanGuard(verbose=0)

    def build() -> Any:
        body = [Logarithm(name="logarithm"), keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((6,)), *body])
        model.compile("adam", "mse")
        return model

    done = run(build, data, guard, epochs=1)
    culprits = [incident.diagnosis.culprit for incident in guard.incidents]
    strategy, again = done.model.distribute_strategy, NanGuard(verbose=0)
    plain = run(zoo.plain, zoo.regression(), strategy=strategy)
    guarded = run(zoo.plain, zoo.regression(), again, strategy=strategy)
    second = {"differences": zoo.differences(guarded, plain), **reports(again)}
    finite = all(zoo.finite(a) for _, a in done.state)
    return {"finite": finite, "culprits": culprits, "second": second, **reports(guard)}


def main(names: list[str]) -> None:
    """Run these cases."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
    for name in names:
        keras.config.set_dtype_policy("float32")
        print(json.dumps([name, CASES[name]()]), flush=True)
        keras.backend.clear_session(free_memory=False)


if __name__ == "__main__":
    main(sys.argv[1:])
