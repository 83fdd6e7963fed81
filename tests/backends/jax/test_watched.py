"""The variables in the sums of a step on JAX: exactly those that must be finite."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from backends.jax.test_step import Loop, OwnStep
from keras import layers

from keras_nanguard import NanGuard

BATCH, BATCHES, AT = 8, 8, 3
X = np.random.default_rng(0).standard_normal((BATCH * BATCHES, 6)).astype("float32")
Y = X[:, :1] - 0.5 * X[:, 1:2]
HOT = X.copy()
HOT[AT * BATCH] = 200.0  # whose exponential is infinite
BAD = X.copy()
BAD[AT * BATCH] = np.nan


class Tracks(layers.Layer):
    """Stores a number from its input in a weight of the model's state on which no loss depends."""

    def __init__(self, of, first=0.0):
        super().__init__(name="tracks")
        self.of, self.first = of, first

    def build(self, shape):
        self.last = self.add_weight(shape=(), initializer=keras.initializers.Constant(self.first), trainable=False, name="last")

    def call(self, x, training=False):
        if training:
            self.last.assign(self.of(x, self.last))
        return x


class Undefined(keras.metrics.Metric):
    """NaN in every step, in its own state."""

    def __init__(self):
        super().__init__(name="undefined")
        self.last = self.add_variable((), "zeros", name="last")

    def update_state(self, y, predicted, sample_weight=None):
        self.last.assign(keras.ops.mean(predicted) * float("nan"))

    def result(self):
        return self.last + 0.0


def guarded(model, x=X, policy="recover", callbacks=()):
    """Train a model for an epoch, and return its guard."""
    guard = NanGuard(policy, verbose=0, diagnose=False)
    model.fit(x, Y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0, callbacks=[guard, *callbacks])
    return guard


def fitted(tracks, x=X, optimizer=None, **compiling):
    """Return a model with this layer after a fit, and its guard."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), tracks, layers.Dense(4, activation="tanh"), layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(0.01, momentum=0.9), "mse", **compiling)
    return model, guarded(model, x)


def test_a_statistic_that_turns_bad_refuses_its_step():
    """Loss and gradients are finite; the incident names and counts the variable."""
    model, guard = fitted(Tracks(lambda x, last: jnp.exp(x[0, 0])), HOT)
    assert [(i.step, i.refused) for i in guard.incidents] == [(AT, True)]
    found = [f for f in guard.incidents[0].findings if f.site == "statistics"]
    assert [(f.path, f.nan, f.inf, f.size) for f in found] == [(model.layers[0].last.path, 0, 1, 1)]
    assert np.isclose(np.asarray(model.layers[0].last), np.exp(X[-BATCH, 0]))


def test_a_metric_may_be_nan():
    """The variables of a metric are not part of the state of training."""
    _, guard = fitted(Tracks(lambda x, last: jnp.mean(x)), metrics=[Undefined()])
    assert guard.incidents == [] and guard.session.run.counts.refused == 0 and guard.session.run.step == BATCHES


def test_initially_infinite_values_are_tolerated():
    """A running minimum starts with Inf."""
    model, guard = fitted(Tracks(lambda x, last: jnp.maximum(last.value, jnp.min(x)), first=np.inf))
    assert guard.incidents == [] and np.isposinf(np.asarray(model.layers[0].last))


class SpoilsItsSlots(keras.optimizers.SGD):
    """Writes an Inf into the slot of each variable in one of its updates, but into no weight."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        slot = self.momentums[self._get_variable_index(variable)]
        now = keras.ops.equal(self.iterations, AT)
        self.assign(slot, jnp.where(now, jnp.inf, keras.ops.convert_to_tensor(slot)))


def test_a_slot_that_turns_bad_is_seen_in_its_step():
    _, guard = fitted(Tracks(lambda x, last: jnp.mean(x)), optimizer=SpoilsItsSlots(0.01, momentum=0.9))
    first = guard.incidents[0]
    assert first.step == AT and "slots" in first.sites
    assert not any(f.site == "weights" for f in first.findings)


class Halves(OwnStep):
    """Two networks, each with an optimizer; the variables of the second are the model's."""

    def __init__(self, rate=0.01):
        super().__init__()
        self.second = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        self.second_optimizer = keras.optimizers.SGD(rate)  # without slots, which would be bad as well
        self.second_optimizer.build(self.second.trainable_variables)
        self.second_state = self.second_optimizer.variables

    def train_step(self, state, data):
        weights, other, slots, metrics = state
        known = {id(v): i for i, v in enumerate(self.non_trainable_variables)}
        places = [known[id(v)] for v in self.second_state]
        first, second = weights[:-2], weights[-2:]
        loss = lambda second: jnp.mean((data[1] - data[0] @ second[0] - second[1]) ** 2)  # noqa: E731
        one, gradients = jax.value_and_grad(lambda first: self.loss_of([*first, *second], other, *data)[0])(first)
        first, slots = self.optimizer.stateless_apply(slots, gradients, first)
        two, gradients = jax.value_and_grad(loss)(second)
        second, moved = self.second_optimizer.stateless_apply([other[i] for i in places], gradients, second)
        other = list(other)
        for place, value in zip(places, moved):
            other[place] = value
        return {"loss": one + two}, ([*first, *second], other, slots, metrics)


@pytest.mark.parametrize("which", ["first", "second"])
def test_the_weights_of_each_of_two_optimizers(which):
    """An update with an infinite learning rate is detected in its step, for either optimizer."""
    keras.utils.set_random_seed(0)
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([AT - 1], [0.01, np.inf])
    model = Halves(rate if which == "second" else 0.01)
    model.compile(keras.optimizers.SGD(rate if which == "first" else 0.01))
    model(np.zeros((1, 6), "float32"))
    model.optimizer.build(model.trainable_variables[:-2])
    guard = guarded(model)
    first = guard.incidents[0]
    assert first.step == AT and "weights" in first.sites and "loss" not in first.sites
    assert all(np.isfinite(np.asarray(w)).all() for w in model.weights)


@pytest.mark.parametrize("scale", [-4.0, 0.0])
def test_a_scale_that_scales_nothing_refuses_its_step(scale):
    """Also if the gradients are finite; the scale is reset."""
    keras.utils.set_random_seed(0)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=64.0)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    optimizer.dynamic_scale.assign(scale)
    guard = guarded(model)
    assert [(i.step, i.refused, "loss_scale" in i.sites) for i in guard.incidents] == [(0, True, True)]
    assert float(np.asarray(optimizer.dynamic_scale)) >= 64.0 and guard.session.run.step == BATCHES


@pytest.mark.parametrize("policy", ["recover", "observe"])
def test_logs_of_a_refused_step(policy):
    """Other callbacks get the means over the committed steps; under `observe` those of Keras."""
    seen = []
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append((logs["loss"], logs["mae"])))
    guarded(model, BAD, policy, [look])
    finite = np.isfinite(np.asarray(seen, "float64")).all(axis=1).tolist()
    assert finite == [policy == "recover" or step < AT for step in range(BATCHES)]
    if policy == "recover":
        np.testing.assert_allclose(seen[AT], seen[AT - 1], rtol=1e-6)


class ByHand(OwnStep):
    """Changes its weights without an optimizer; by an infinite step if its input is large."""

    def train_step(self, state, data):
        weights, other, slots, metrics = state
        (loss, other), gradients = self.gradients(weights, other, data)
        away = jnp.where(jnp.max(data[0]) > 50, jnp.inf, 0.01)
        return {"loss": loss}, ([w - away * g for w, g in zip(weights, gradients)], other, slots, metrics)


def test_weights_that_no_optimizer_moves():
    """They are checked in the step that changes them, and restored."""
    keras.utils.set_random_seed(0)
    model = ByHand()
    model.compile("sgd")
    model(np.zeros((1, 6), "float32"))
    model.optimizer.build(model.trainable_variables)
    guard = guarded(model, HOT)
    assert [(i.step, i.refused) for i in guard.incidents] == [(AT, True)] and "weights" in guard.incidents[0].sites
    assert all(np.isfinite(np.asarray(w)).all() for w in model.weights)


@pytest.mark.parametrize("bad", [(0,), (1,), (0, 1)])
def test_an_overflow_lowers_the_scale_of_its_own_optimizer(bad):
    loop, guard = Loop(), NanGuard(verbose=0, diagnose=False)
    weights = loop.model.trainable_variables
    halves = weights[:1], weights[1:]
    optimizers = [keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=64.0) for _ in range(2)]
    for optimizer, half in zip(optimizers, halves, strict=True):
        optimizer.build(half)

    def step(state, x, y):
        weights, other, slots = state
        (loss, other), gradients = jax.value_and_grad(loop.loss, has_aux=True)(weights, other, x, y)
        gradients = [jnp.where(jnp.max(x) > 50, jnp.inf, g) if min(n, 1) in bad else g for n, g in enumerate(gradients)]
        first, slots_of_first = optimizers[0].stateless_apply(slots[0], gradients[:1], weights[:1])
        second, slots_of_second = optimizers[1].stateless_apply(slots[1], gradients[1:], weights[1:])
        return loss, ([*first, *second], other, [slots_of_first, slots_of_second])

    state = (*loop.state[:2], [[v.value for v in optimizer.variables] for optimizer in optimizers])
    with guard.watch(loop.model, *optimizers):
        run = guard.step(jax.jit(step))
        for at in range(BATCHES):
            batch = slice(at * BATCH, (at + 1) * BATCH)
            _, state = run(state, jnp.asarray(HOT[batch]), jnp.asarray(Y[batch]))
        guard.session.run.access.sync_variables()
        assert [float(o.dynamic_scale) for o in optimizers] == [32.0 if n in bad else 64.0 for n in range(2)]
        place = [v is optimizers[1].dynamic_scale for v in optimizers[1].variables].index(True)
        state[2][1][place] = jnp.asarray(np.inf, "float32")  # beside a finite one
        run(state, jnp.asarray(X[batch]), jnp.asarray(Y[batch]))
    assert guard.session.run.counts.refused == 2 and guard.incidents[-1].sites == ("loss_scale",)
    assert all(np.isfinite(float(o.dynamic_scale)) for o in optimizers)


def test_a_scale_outside_of_the_state():
    """Of two optimizers, an overflow halves the scale of that which a loop passes."""
    loop, guard = Loop(), NanGuard(verbose=0, diagnose=False)
    unused, used = (keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=64.0) for _ in range(2))
    for optimizer in (unused, used):
        optimizer.build(loop.model.trainable_variables)
    place = [v is used.dynamic_scale for v in used.variables].index(True)

    def step(state, x, y):
        weights, other, slots = state
        (loss, other), gradients = jax.value_and_grad(loop.loss, has_aux=True)(weights, other, x, y)
        gradients = [jnp.where(jnp.max(x) > 50, jnp.inf, g) for g in gradients]
        weights, slots = used.stateless_apply(slots, gradients, weights)
        return loss, (weights, other, slots)

    state = (*loop.state[:2], [v.value for v in used.variables])
    scales = []
    with guard.watch(loop.model, unused, used):
        run = guard.step(jax.jit(step))
        for at in range(BATCHES):
            batch = slice(at * BATCH, (at + 1) * BATCH)
            _, state = run(state, jnp.asarray(HOT[batch]), jnp.asarray(Y[batch]))
            scales.append(float(state[2][place]))
    assert scales == [64.0] * AT + [32.0] * (BATCHES - AT) and guard.session.run.counts.overflows == 1
