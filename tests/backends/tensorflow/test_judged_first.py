"""Gradients that have no room beside the state: each step computes them twice, and all else is as ever."""

from __future__ import annotations

from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf
from backends.tensorflow.test_graph_step import BAD, KEPT, Telling, X, Y, fit, network, same, values
from keras import layers
from support import zoo
from support.programs import PROGRAMS

from keras_nanguard import NanGuard
from keras_nanguard._backends.tensorflow import graph, judged_first, step
from keras_nanguard._core import memory

LINE = "NanGuard: the gradients take {}, and 3 MB of memory can be taken: each step computes them twice."


@pytest.fixture(autouse=True)
def no_room(monkeypatch):
    """Leave no room for anything."""
    monkeypatch.setattr(memory, "room_for", lambda size: False)
    monkeypatch.setattr(memory, "room", lambda: 3 << 20)


@pytest.fixture
def runs(monkeypatch):
    """Count the steps that are traced so."""
    traced, real = [], judged_first.run

    def run(owner, args):
        result = real(owner, args)
        traced.append(owner)
        return result

    monkeypatch.setattr(judged_first, "run", run)
    return traced


SAME = (
    *("optimizer-accumulation", "feed-sample-weight-bad", "model-many-inputs-outputs"),
    *("model-stateful-rnn", "model-unlisted-state", "precision-mixed_float16"),
)
"""Programs of which every step can be run twice."""


@pytest.mark.parametrize("name", SAME)
def test_the_same_bits(name, runs):
    """Healthy or with bad batches put in, the run ends as the plain one without them."""
    program = PROGRAMS[name]
    oracle = program.run(program.data(), None, "graph")
    healthy = program.run(program.data(), True, "graph")
    assert zoo.differences(healthy, oracle) == []
    poisoned = program.run(program.data().with_poison((3, 8), where=program.where), True, "graph")
    assert zoo.differences(poisoned, oracle) == []
    assert poisoned.guard.session.refused == 2 * 2
    assert runs


@pytest.mark.parametrize("name", ["step-gan"])
def test_updates_that_cannot_wait(name, runs):
    """Where the step reads what it has updated, old values are kept as ever."""
    program = PROGRAMS[name]
    poisoned = program.run(program.data().with_poison((3, 8), where=program.where), True, "graph")
    assert zoo.differences(poisoned, program.run(program.data(), None, "graph")) == []
    assert not runs


@pytest.mark.parametrize("several", [1, 4])
@pytest.mark.parametrize("jit", [False, True])
def test_dropout_and_statistics(jit, several, runs):
    """Seeds and statistics move once in a committed step, and not in a refused one; compiled or not, in executions of several."""
    plain, guarded = (network(jit_compile=jit, steps_per_execution=several) for _ in range(2))
    fit(plain, X[KEPT], Y[KEPT])
    guard = NanGuard(verbose=0)
    fit(guarded, BAD, Y, guard)
    assert [(i.step, i.refused, i.diagnosis.cause) for i in guard.incidents] == [(2, True, "input_nonfinite")]
    if several == 1:
        same(guarded, plain)
    else:  # XLA fuses otherwise in executions of another length
        for one, other in zip(values(guarded), values(plain)):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert runs


def test_float16(runs):
    """The loss scale is halved by an overflow, as in a plain run, and grows by committed steps only."""
    scales = []
    for guards in ([], [NanGuard(verbose=0)]):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), layers.Dense(8, dtype="mixed_float16"), layers.Dense(1, dtype="float32")])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1e-3), initial_scale=2.0**20, dynamic_growth_steps=3)
        model.compile(optimizer, "mse")
        seen = []
        note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(float(optimizer.dynamic_scale)))  # noqa: B023
        model.fit(X, Y, batch_size=8, shuffle=False, epochs=3, verbose=0, callbacks=[*guards, note])
        scales.append(seen)
    assert scales[0] == scales[1] and min(scales[0]) < 2.0**20
    assert runs


@pytest.mark.parametrize("jit", [None, True])
def test_a_loop(jit, runs):
    """So is a hand-written step; it returns what it returned, and of a refused step its bad loss."""

    def trained(inputs, indices, guard=None):
        model = network()
        optimizer = model.optimizer
        optimizer.build(model.trainable_variables)

        def body(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            optimizer.apply(tape.gradient(loss, [v.value for v in model.trainable_variables]), model.trainable_variables)
            return loss

        step_ = tf.function(body, jit_compile=jit)
        with guard.watch(model, optimizer) if guard else nullcontext():
            step_ = guard.step(step_) if guard else step_
            losses = [float(step_(inputs[indices[i : i + 8]], Y[indices[i : i + 8]])) for i in range(0, len(indices), 8)]
        return model, losses

    plain, losses = trained(X, KEPT)
    guarded, others = trained(BAD, np.arange(64), NanGuard(verbose=0))
    assert np.isnan(others.pop(2)) and others == losses
    same(guarded, plain)
    assert runs


@pytest.mark.parametrize("several", [1, 4])
def test_the_same_incidents(several, monkeypatch):
    """Bad batches, a statistic that goes bad, and an update that overflows: in the same steps, with the same findings but for gradients."""

    class Overflowing(layers.Layer):
        def __init__(self):
            super().__init__(name="overflowing")

        def build(self, shape):
            self.last = self.add_weight(shape=(), initializer="zeros", trainable=False, name="last")

        def call(self, x, training=False):
            if training:
                self.last.assign(tf.math.exp(tf.reduce_max(x)))
            return x

    hot = X.copy()
    hot[40:48, 0] = 200.0  # whose exponential is infinite

    def found(inputs, rate, room):
        monkeypatch.setattr(memory, "room_for", lambda size: room)
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), Overflowing(), layers.Dense(1, name="last")], name="net")
        model.compile(keras.optimizers.SGD(rate, momentum=0.9, name="sgd"), "mse", steps_per_execution=several)
        guard = NanGuard(verbose=0, diagnose=False)
        fit(model, inputs, Y, guard)
        told = [(f.site, f.kind, f.path, f.nan, f.inf) for i in guard.incidents for f in i.findings if f.site != "gradients"]
        return [(i.step, i.refused, i.sites) for i in guard.incidents], told

    for inputs, rate in ((BAD, 1e-3), (hot, 1e-3), (X, 1e38)):
        assert found(inputs, rate, False)[0] and found(inputs, rate, False) == found(inputs, rate, True)


def test_logs_that_no_metric_holds():
    """Of a refused step they are those of the step before."""
    bad, seen = X.copy(), []
    bad[16:24] = np.inf
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["first"]))
    network(Telling).fit(bad, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[NanGuard(verbose=0), note])
    means = [float(Y[i : i + 8].mean()) for i in range(0, 64, 8)]
    means[2] = means[1]
    np.testing.assert_allclose(seen, means, rtol=1e-5)


class Noisy(keras.Model):
    """Draws numbers by an operation with a state of its own."""

    def train_step(self, data):
        x, y = data
        return super().train_step((x + tf.random.normal(tf.shape(x)), y))


class Counting(keras.Model):
    """Counts its steps in a table."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)

    def train_step(self, data):
        one = tf.constant(1, tf.int64)
        self.table.insert(one, self.table.lookup(one) + 1)
        return super().train_step(data)


@pytest.mark.parametrize("cls", [Noisy, Counting])
def test_what_would_not_be_the_same_a_second_time(cls, runs, capsys):
    """Such a step is not run twice: the second run would not be the one that was judged, or would leave more behind. Nothing is said."""
    model = network(cls, jit_compile=False)
    guard = NanGuard()
    fit(model, BAD, Y, guard)
    assert [i.step for i in guard.incidents] == [2] and not runs
    assert "twice" not in capsys.readouterr().out
    if cls is Counting:
        assert int(model.table.lookup(tf.constant(1, tf.int64))) == len(X) // 8


def test_which_operations_draw_so():
    """Those that `tf.random` makes by themselves, within functions, too; not those that take a seed or keep it in a variable."""

    def traced(draw):
        return tf.function(lambda: tf.cond(tf.constant(True), draw, lambda: tf.zeros((2,)))).get_concrete_function().graph

    generator, seeds = tf.random.Generator.from_seed(1), keras.random.SeedGenerator(1)
    assert graph.draws(traced(lambda: tf.random.normal((2,))))
    assert not graph.draws(traced(lambda: generator.normal((2,))))
    assert not graph.draws(traced(lambda: keras.random.normal((2,), seed=seeds)))


def test_it_is_said_once(capsys):
    """A line says once what that costs; fits after it do the same."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((1024,)), layers.Dense(1024), layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((20, 1024), "float32"), np.ones((20, 1), "float32")
    for _ in range(2):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[NanGuard()])
    lines = [line for line in capsys.readouterr().out.splitlines() if "twice" in line]
    assert lines == [LINE.format("4 MB")]


def test_a_step_that_is_built_anew_knows_what_the_one_before_knew(capsys, runs):
    """A fit in which Keras makes another train function: gradients stay twice, of which the line says so once."""
    made = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: model.make_train_function(force=True))
    model = network()
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[NanGuard(), made])
    assert len({id(owner) for owner in runs}) == 2
    assert capsys.readouterr().out.count("twice") == 1


@pytest.mark.parametrize(
    ("times", "updated", "short"),
    [(4.2, False, True), (4.5, False, False), (1.8, True, True), (2.0, True, False)],
)
def test_what_has_to_fit(monkeypatch, times, updated, short):
    """The gradients, half as much for the update, a quarter of both for what comes later; slots where none was written yet."""
    monkeypatch.undo()
    size = 64 * (1 << 20)
    weight = keras.Variable(np.zeros((size // 4,), "float32"))
    optimizer = keras.optimizers.Adam()
    optimizer.build([weight])
    if updated:
        optimizer.iterations.assign(1)
    monkeypatch.setattr(memory, "RESERVE", 0)
    monkeypatch.setattr(memory, "room", lambda: times * size)
    state = step.TrainState.of(keras.Sequential([keras.Input((1,))]), [optimizer])
    found = judged_first.shortage(state)
    assert found.endswith("twice.") if short else found == ""


def test_an_accelerator_holds_the_gradients_itself(monkeypatch):
    """The memory of the host does not matter then."""
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: ["one"])
    assert judged_first.shortage(step.TrainState.of(network())) == ""


def test_eager_execution_frees_gradients_anyway(runs):
    """There the old values are kept, and nothing is traced."""
    model = network(run_eagerly=True)
    guard = NanGuard(verbose=0)
    fit(model, BAD, Y, guard)
    assert [i.step for i in guard.incidents] == [2] and not runs
