"""A refused step changes nothing: the oracle."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from support import zoo

POISONED = {3: "inputs", 4: "inputs", 7: "inputs", 9: "targets", 10: "gradients"}
"""Batch of each fault, and the first site that shows it; two are adjacent, never three."""


def tolerance(mode: str) -> float:
    """Return how far two programs that XLA compiles may differ; 0 without XLA."""
    return 1e-5 if mode == "xla" or (zoo.BACKEND == "jax" and mode != "eager") else 0.0


def _schedule():
    return keras.optimizers.schedules.CosineDecay(0.05, 40, warmup_target=0.08, warmup_steps=6)


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "sgd": lambda: keras.optimizers.SGD(
        _schedule(), momentum=0.9, nesterov=True, weight_decay=1e-2, global_clipnorm=0.5
    ),
    "adamw-ema": lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=5),
    "rmsprop-accumulation": lambda: keras.optimizers.RMSprop(0.01, gradient_accumulation_steps=3),
}


def poisoned_data() -> zoo.Data:
    """NaN and infinities in x, NaN in y, and a target with a bad gradient alone."""
    data = zoo.trap(zoo.regression(batches=14))
    zoo.poison(data, 3, np.nan)
    zoo.poison(data, 4, np.inf, row=0)
    zoo.poison(data, 7, -np.inf, row=7)
    zoo.poison(data, 9, np.nan, "y")
    data.y[10 * zoo.BATCH + 5, 1] = 0.0
    return data


CASES = [(optimizer, mode) for mode in zoo.MODES for optimizer in OPTIMIZERS]
# XLA takes seconds for each compilation and shares all of its code but the cluster with graph mode; so do eager steps on JAX
LONG = {"xla", "eager"} if zoo.BACKEND == "jax" else {"xla"}
CASES = [case for case in CASES if case[1] not in LONG or case[0] in ("adam", "rmsprop-accumulation")]


DAILY = {  # tensorflow/test_updates.py has the other optimizers, jax/test_step.py an eager step
    "tensorflow": ("adam-*", "rmsprop-accumulation-steps4"),
    "jax": ("adam-steps4", "adamw-ema-graph", "sgd-graph", "rmsprop-accumulation-steps4"),
    "torch": ("adam-*", "*-graph"),
}


@pytest.mark.daily(*DAILY[zoo.BACKEND])
@pytest.mark.parametrize(("optimizer", "mode"), CASES)
def test_bad_batches_never_happened(optimizer, mode):
    """A guarded run over bad data ends bit-identical to an unguarded one over the data without the
    bad batches.

    Every bad batch is an incident of its own step, which names the first bad site in causal order.
    The epoch logs have the number of refused steps, and means over the others.
    """
    zoo.supported(zoo.MODES[mode], even=False)

    def build():
        return zoo.plain(OPTIMIZERS[optimizer](), loss=zoo.trapped, rounded=tolerance(mode) > 0, **zoo.MODES[mode])

    data, epochs = poisoned_data(), 1 if mode == "eager" else 2
    guarded = zoo.run(build, data, guard="undiagnosed", epochs=epochs)
    oracle = zoo.run(build, data.without(POISONED), epochs=epochs)
    assert zoo.differences(guarded, oracle, tolerance(mode)) == []
    expected = [(epoch * 14 + batch, epoch, batch, site) for epoch in range(epochs) for batch, site in POISONED.items()]
    incidents = guarded.guard.incidents
    assert [(i.step, i.epoch, i.batch, i.sites[0]) for i in incidents] == expected and all(i.refused for i in incidents)
    assert guarded.history["refused_steps"] == [5] * epochs and guarded.guard.session.run.counts.refused == 5 * epochs
    assert "refused_steps" not in oracle.history


@pytest.mark.skipif(zoo.FILLS, reason="the test above has executions of several steps, and more")
def test_even_executions():
    """Filled executions give the same as single steps, in every version of Keras."""
    data = zoo.regression(batches=16)
    bad = (3, 4, 8, 15)
    for batch in bad:
        zoo.poison(data, batch)
    guarded = zoo.run(lambda: zoo.plain(steps_per_execution=4), data, guard="undiagnosed")
    assert guarded.steps == [epoch * 16 + batch for epoch in (0, 1) for batch in bad]
    assert zoo.differences(guarded, zoo.run(lambda: zoo.plain(steps_per_execution=4), data.without(bad))) == []


@pytest.mark.requires_backend("tensorflow", reason="only TensorFlow rewrites graphs")
@pytest.mark.daily("adam")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rewritten_graph(optimizer):
    """If TensorFlow rewrites a graph, both runs agree up to rounding."""

    def build():
        return zoo.plain(OPTIMIZERS[optimizer](), loss=zoo.trapped)

    data = poisoned_data()
    guarded = zoo.run(build, data, guard="undiagnosed", rewritten=True)
    oracle = zoo.run(build, data.without(POISONED), rewritten=True)
    assert zoo.differences(guarded, oracle, 0.0 if optimizer.startswith("adam") else 1e-5) == []


@pytest.mark.shared
@pytest.mark.daily("graph")
@pytest.mark.parametrize("mode", ["graph", "eager", "steps4"])
def test_every_batch_bad(mode):
    """Nothing is changed, and the policy stops within a dozen steps."""
    data = zoo.regression(batches=24)
    data.x[:, 0] = np.nan
    run = zoo.run(lambda: zoo.plain(**zoo.MODES[mode]), data, guard="undiagnosed", epochs=3)
    keras.utils.set_random_seed(0)
    fresh = zoo.plain(**zoo.MODES[mode])
    for one, other in zip(run.model.get_weights(), fresh.get_weights()):
        if one.dtype.kind == "f":
            np.testing.assert_array_equal(one, other)
    assert run.guard.session.run.step == 12 and run.guard.session.run.counts.refused == 12
    assert run.guard.session.run.stopped and run.model.stop_training


def unbuilt():
    """Return a model that its first step builds."""
    body = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(body)
    model.compile("adam", "mse", metrics=["mae"])
    return model


@pytest.mark.daily("unbuilt")
@pytest.mark.parametrize("build", [zoo.plain, unbuilt])
def test_first_and_last_step_bad(build):
    """The variables that the first step creates are unchanged; the last batch is smaller."""
    data = zoo.poison(zoo.regression(), 0)
    data.x, data.y = data.x[:-5], data.y[:-5]
    data.x[-1, 0] = np.nan
    guarded = zoo.run(build, data, guard="undiagnosed")
    oracle = zoo.run(build, data.without([0]))  # which has whole batches only
    assert zoo.differences(guarded, oracle) == []
    assert guarded.steps == [0, 11, 12, 23]


class Replaces(keras.callbacks.Callback):
    """Gives the model a new optimizer between two epochs, without `compile`."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            optimizer = keras.optimizers.Adam(0.01)
            optimizer.build(self.model.trainable_variables)
            self.model.optimizer = optimizer


@pytest.mark.daily("compiled" if zoo.BACKEND == "jax" else "eager")  # eager steps on JAX take longest
@pytest.mark.parametrize("eager", [False, True], ids=["compiled", "eager"])
def test_first_step_bad_with_a_new_optimizer(eager):
    """Its slots stay empty. A compiled step on TensorFlow keeps the old optimizer."""
    data = zoo.poison(zoo.regression(), 0)

    def build():
        return zoo.plain("sgd", rounded=tolerance("graph") > 0, run_eagerly=eager)

    guarded = zoo.run(build, data, guard=True, callbacks=[Replaces()])
    oracle = zoo.run(build, data.without([0]), callbacks=[Replaces()])
    assert zoo.differences(guarded, oracle, tolerance("eager" if eager else "graph")) == []
    assert guarded.steps == [0, 12] and {i.diagnosis.cause for i in guarded.guard.incidents} == {"input_nonfinite"}


class Clusters(keras.Model):
    """Moves centers to the means of the rows nearest to them, without an optimizer."""

    def __init__(self):
        super().__init__()
        self.centers = self.add_weight(shape=(3, 6), initializer=keras.initializers.RandomNormal(seed=1), trainable=False)
        self.built = True

    def call(self, x):
        return keras.ops.one_hot(keras.ops.argmin(keras.ops.sum((x[:, None] - self.centers) ** 2, -1), -1), 3)

    def train_step(self, data):
        near = self(data[0])
        sums = keras.ops.matmul(keras.ops.transpose(near), data[0])
        self.centers.assign(0.9 * self.centers + 0.1 * sums / (keras.ops.sum(near, 0)[:, None] + 1.0))
        return {"mean": keras.ops.mean(self.centers)}


@pytest.mark.shared
@pytest.mark.requires_backend("tensorflow", "torch", reason="Keras on JAX always needs an optimizer")
def test_model_that_needs_no_optimizer():
    """A train step of one's own may do without an optimizer."""

    def build():
        model = Clusters()
        model.compile(optimizer=None)
        return model

    data = zoo.poison(zoo.regression(), 4)
    guarded = zoo.run(build, data, guard=True)
    assert zoo.differences(guarded, zoo.run(build, data.without([4]))) == []
    assert guarded.steps == [4, 16]


@pytest.mark.daily("5")
@pytest.mark.parametrize("steps", [3, 5, 16])
def test_uneven_executions(steps):
    """An execution of any length reports the number of each step."""
    zoo.supported({"steps_per_execution": steps}, even=False)
    data = zoo.poison(zoo.poison(zoo.regression(), 0), 11)
    guarded = zoo.run(lambda: zoo.plain(steps_per_execution=steps), data, guard="undiagnosed")
    oracle = zoo.run(lambda: zoo.plain(steps_per_execution=steps), data.without([0, 11]))
    assert zoo.differences(guarded, oracle) == []
    assert guarded.steps == [0, 11, 12, 23]
