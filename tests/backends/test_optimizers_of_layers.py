"""The optimizer of a network within a model, as a GAN may use it: part of the train state once a step uses it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops
from support import zoo
from support.programs import differentiated

from keras_nanguard import NanGuard

BAD = (0, 5, 9)
SNAPSHOT = {"every": 4, "verify_after": 1}
TOLERANCE = 1e-5 if zoo.BACKEND == "jax" else 0.0

needs_stateful_steps = pytest.mark.skipif(
    zoo.BACKEND == "jax", reason="there the slots are variables of the model"
)


def network(*sizes):
    return keras.Sequential([keras.Input((6,)), *(layers.Dense(size, "tanh") for size in sizes)])


class Adversarial(keras.Model):
    """Two networks, each with an optimizer of its own, or of the whole model.

    Args:
        reads: whether the step of the second one reads the first one after its update.
    """

    def __init__(self, reads=True):
        super().__init__()
        self.generator, self.critic, self.reads = network(4, 6), network(4, 1), reads
        self.critic.compile(optimizer=keras.optimizers.Adam(0.01))
        if zoo.BACKEND == "jax":
            self.critic.optimizer.build(self.critic.trainable_variables)
            self.critic_slots = self.critic.optimizer.variables

    def call(self, x):
        return self.critic(self.generator(x))

    def differences(self, data, weights):
        return differentiated(
            lambda: ops.mean(ops.square(data[1] - self(data[0]))), lambda: weights
        )

    def train_step(self, *args):
        if zoo.BACKEND == "jax":
            return self.stateless_step(*args)
        (data,) = args
        first, second = self.critic, self.generator
        loss, gradients = self.differences(data, first.trainable_variables)
        if not self.reads:
            _, others = self.differences(data, second.trainable_variables)
        first.optimizer.apply(gradients, first.trainable_variables)
        if self.reads:
            _, others = self.differences(data, second.trainable_variables)
        self.optimizer.apply(others, second.trainable_variables)
        return {"loss": loss}

    def stateless_step(self, state, data):
        import jax

        weights, other, slots, metrics = state
        places = [
            next(i for i, v in enumerate(self.non_trainable_variables) if v is s)
            for s in self.critic_slots
        ]
        count = len(self.generator.trainable_variables)

        def error(generator, critic):
            outputs = self.stateless_call([*generator, *critic], other, data[0])[0]
            return ops.mean(ops.square(data[1] - outputs))

        generator, critic = weights[:count], weights[count:]
        loss, gradients = jax.value_and_grad(error, 1)(generator, critic)
        others = jax.grad(error)(generator, critic)
        critic, moved = self.critic.optimizer.stateless_apply(
            [other[i] for i in places], gradients, critic
        )
        if self.reads:
            others = jax.grad(error)(generator, critic)
        generator, slots = self.optimizer.stateless_apply(slots, others, generator)
        changed = dict(zip(places, moved))
        other = [changed.get(i, value) for i, value in enumerate(other)]
        return {"loss": loss}, ([*generator, *critic], other, slots, metrics)


def gan(reads=True, **mode):
    keras.utils.set_random_seed(0)
    model = Adversarial(reads)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), **mode)
    model(np.zeros((1, 6), "float32"))
    if zoo.BACKEND == "jax":
        model.optimizer.build(model.generator.trainable_variables)
    return model


def state_of(model):
    return zoo.state_of(model, model.optimizer, model.critic.optimizer)


def assert_same(one, other):
    for (path, a), (_, b) in zip(state_of(one), state_of(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, err_msg=path)


def with_bad(data):
    for batch in BAD:
        zoo.poison(data, batch)
    return data


def trained(model, data, *callbacks, **more):
    with zoo.as_written():
        zoo.fit(model, data, *callbacks, **{"epochs": 2, **more})
    return model


@pytest.mark.daily("graph-True", "eager-True")
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("mode", ["graph", "eager", "steps4"])
def test_bad_batches_never_happened(mode, reads):
    """Weights and slots of both networks are those of a run without the bad batches, also in a second fit."""
    zoo.supported(zoo.MODES[mode], even=False)
    guards = [NanGuard(verbose=0), NanGuard(verbose=0)]
    model, oracle = gan(reads, **zoo.MODES[mode]), gan(reads, **zoo.MODES[mode])
    for guard in guards:
        trained(model, with_bad(zoo.regression()), guard)
        trained(oracle, zoo.regression().without(BAD))
        assert_same(model, oracle)
        assert [incident.step for incident in guard.incidents] == [
            *BAD,
            *(zoo.BATCHES + batch for batch in BAD),
        ]
        assert guard.session.run.train_state().optimizers == (
            model.optimizer,
            model.critic.optimizer,
        )


@needs_stateful_steps
@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("bad", [3, 6])
def test_rollback(bad, eager):
    """It restores the slots, also those that did not exist when the first snapshot was taken."""
    policy = {
        "rules": [{"name": "act", "do": "rollback"}],
        "rollback": {"replay_steps": False},
        "snapshot": SNAPSHOT,
    }
    kept, model, guard = [], gan(run_eagerly=eager), NanGuard(policy, verbose=0, diagnose=False)
    note = zoo.Before(
        lambda model: kept.append([np.array(v) for v in model.critic.optimizer.variables])
    )
    trained(model, zoo.poison(zoo.regression(), bad), note, guard, epochs=1)
    ((step, outcome),) = (
        (i.step, o) for i in guard.incidents for o in i.outcomes if o.action == "rollback"
    )
    assert (
        step == bad and ("before the first step" if bad == 3 else "after 4 steps") in outcome.detail
    )
    before = [np.zeros_like(slot) for slot in kept[1]] if bad == 3 else kept[4]
    assert len(before) == 10
    for slot, old in zip(kept[bad + 1][2:], before[2:], strict=True):  # without iterations and rate
        np.testing.assert_array_equal(slot, old)


@pytest.mark.daily("first")
@pytest.mark.parametrize("stopped", [8, 15], ids=["first", "second"])
def test_resumed_run(tmp_path, stopped):
    """A snapshot on disk has the slots of both networks."""

    def guard(**more):
        snapshot = {**SNAPSHOT, "storage": "disk"}
        return NanGuard(
            directory=str(tmp_path), snapshot=snapshot, verbose=0, diagnose=False, **more
        )

    whole = trained(gan(), zoo.regression())
    epoch, batch = divmod(stopped, zoo.BATCHES)
    ends = zoo.After(zoo.raising(KeyboardInterrupt), batch, epoch)
    with pytest.raises(KeyboardInterrupt):
        trained(gan(), zoo.regression(), guard(), ends)
    resumed = trained(gan(), zoo.regression(), guard(resume=True))
    assert_same(resumed, whole)


@needs_stateful_steps
@pytest.mark.parametrize("frozen", [True, False])
def test_unused_optimizer(frozen):
    """That of a network which was trained before does not count."""
    data = zoo.regression()
    part = network(4, 1)
    part.compile("adam", "mse")
    part.fit(*data.all, verbose=0)
    part.trainable = not frozen
    model = keras.Sequential([keras.Input((6,)), part, layers.Dense(1)])
    model.compile("sgd", "mse")
    slots, guard = (
        [np.array(v) for v in part.optimizer.variables],
        NanGuard(verbose=0, snapshot=SNAPSHOT),
    )
    trained(model, zoo.poison(data, 3), guard)
    run = guard.session.run
    assert run.train_state().optimizers == (model.optimizer,)
    assert all(
        snapshot.value(v) is None
        for snapshot in run.ring.snapshots
        for v in part.optimizer.variables
    )
    zoo.assert_same(part.optimizer.variables, slots)
    assert [incident.diagnosis.cause for incident in guard.incidents] == ["input_nonfinite"] * 2
