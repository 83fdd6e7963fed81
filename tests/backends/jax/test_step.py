"""Steps on JAX: functions from state to state that may write over their state."""

from __future__ import annotations

import functools
import gc
import weakref
from dataclasses import replace

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers
from support import zoo

from keras_nanguard import GuardError, NanGuard
from keras_nanguard._backends.jax.step import StartedStep, Transaction
from keras_nanguard._diagnose import explainer
from keras_nanguard.testing import inject

BAD = (3, 4, 8)


def oracle(build, data=None, tolerance=0.0):
    """Return a guarded run with bad batches that equals an unguarded one without them."""
    data = data or zoo.regression()
    guarded = zoo.run(build, data.with_poison(BAD), guard="undiagnosed")
    assert zoo.differences(guarded, zoo.run(build, data), tolerance) == []
    epoch = data.batches + len(BAD)
    assert guarded.steps == [*BAD, *(epoch + batch for batch in BAD)]
    assert guarded.guard.session.run.counts.refused == 2 * len(BAD)
    return guarded


# Optimizers and precision, where the step writes over its state


network = functools.partial(zoo.plain, rounded=True)


def test_written_over(recwarn):
    """A step that overwrites its state refuses without a trace, and needs no old values."""

    def build():
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), 64.0, 5)
        return network(scaled, steps_per_execution=3)

    run = oracle(build, tolerance=1e-5)
    assert not run.guard.session.run.access.transaction.learned.updates_first
    assert not [w for w in recwarn if "donated" in str(w.message)]


class Both(keras.optimizers.SGD):
    """Writes a slot itself, and then through the optimizer."""

    def build(self, variables):
        super().build(variables)
        self.seen = [self.add_variable_from_reference(v, name="seen") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        seen = self.seen[self._get_variable_index(variable)]
        seen.assign(gradient)
        self.assign_add(seen, gradient)
        self.assign_sub(variable, learning_rate * seen.value)


def test_an_optimizer_that_writes_slots_itself():
    """A variable is restored for any kind of assignment of the optimizer."""
    bad = oracle(lambda: network(Both(0.05)), tolerance=1e-5)
    assert np.abs(bad.model.optimizer.seen[0].numpy()).max() > 0


def test_an_update_that_overflows():
    """Finite gradients times a rate give infinite weights: reported and undone."""
    data = zoo.regression(batches=24)
    data.y[6 * zoo.BATCH : 7 * zoo.BATCH] = 1e10
    net = network(keras.optimizers.SGD(keras.optimizers.schedules.PiecewiseConstantDecay([5], [1e-2, 1e30])))
    rule = {"name": "heal", "do": ["rollback", {"lower_lr": {"factor": 1e-32, "min_lr": 0.0}}]}
    guard = NanGuard(snapshot={"every": 4, "verify_after": 1}, rules=[rule], verbose=0, diagnose=False)
    zoo.fit(net, data, guard)
    assert guard.incidents[0].step == 6 and "weights" in guard.incidents[0].sites
    assert not guard.incidents[0].refused, "it has committed when the new weights are read"
    assert zoo.bad_entries(net) == [] and guard.session.run.step == 24


class Same(keras.optimizers.SGD):
    """Gives a weight and two slots the same value."""

    def build(self, variables):
        super().build(variables)
        self.seen = [[self.add_variable_from_reference(v, name=f"seen{i}") for v in variables] for i in range(2)]

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * gradient)
        for seen in self.seen:
            self.assign(seen[self._get_variable_index(variable)], variable)


def test_one_value_in_several_places():
    """No two arrays of a state share memory that a later step overwrites."""
    bad = oracle(lambda: network(Same(0.05)), tolerance=1e-5)
    weight, slots = bad.model.trainable_variables[0], [seen[0] for seen in bad.model.optimizer.seen]
    for slot in slots:
        np.testing.assert_array_equal(np.asarray(slot.value), np.asarray(weight.value))


def test_overflow_halves_the_scale():
    """It also resets the counter, and changes nothing else."""
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01, momentum=0.9), initial_scale=64.0)
    model, data, guard = zoo.plain(optimizer, dropout=False), zoo.regression(), NanGuard(verbose=0)
    look = zoo.After(zoo.state_of)
    with inject(model, site="gradients", kind="inf", step=4):
        model.fit(*data.all, batch_size=zoo.BATCH, verbose=0, callbacks=[guard, look])
    assert guard.session.run.counts.overflows == 1 and guard.incidents == []
    moved = {path for (path, a), (_, b) in zip(look.seen[3], look.seen[4]) if not np.array_equal(a, b)}
    assert moved == {"loss_scale_optimizer/dynamic_scale", "loss_scale_optimizer/step_counter"}
    assert float(np.asarray(optimizer.dynamic_scale.value)) == 32.0


# Custom train steps


class OwnStep(keras.Model):
    """A custom loss and custom logs without a metric; `compute_loss` is never called."""

    def __init__(self):
        super().__init__()
        self.body = keras.Sequential([layers.Dense(6), layers.BatchNormalization(), layers.Dense(1)])

    def call(self, x, training=None):
        return self.body(x, training=training)

    def loss_of(self, weights, other, x, y):
        predicted, other = self.stateless_call(weights, other, x, training=True)
        return jnp.mean((y - predicted) ** 2), other

    def gradients(self, weights, other, data):
        x, y = data
        return jax.value_and_grad(self.loss_of, has_aux=True)(weights, other, x, y)

    def train_step(self, state, data):
        weights, other, slots, metrics = state
        (loss, other), gradients = self.gradients(weights, other, data)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        return {"loss": loss, "mean": jnp.mean(data[0])}, (weights, other, slots, metrics)


class TwoUpdates(OwnStep):
    """Reads its weights after the first update."""

    def train_step(self, state, data):
        for _ in range(2):
            logs, state = super().train_step(state, data)
        return logs, state


class Sharpness(OwnStep):
    """Sharpness-aware minimisation: the gradient is taken uphill of the weights."""

    def train_step(self, state, data):
        weights, other, slots, metrics = state
        _, uphill = self.gradients(weights, other, data)
        moved = [w + 0.05 * g for w, g in zip(weights, uphill)]
        (loss, other), gradients = self.gradients(moved, other, data)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        return {"loss": loss}, (weights, other, slots, metrics)


class SlowCopy(OwnStep):
    """Uses the updated weights in its logs."""

    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return {**logs, "size": sum(jnp.sum(w**2) for w in state[0])}, state


class Conditional(OwnStep):
    """Makes its update within a conditional."""

    def train_step(self, state, data):
        weights, other, slots, metrics = state
        (loss, other), gradients = self.gradients(weights, other, data)
        update = lambda: self.optimizer.stateless_apply(slots, gradients, weights)  # noqa: E731
        weights, slots = jax.lax.cond(loss > 0.5, update, lambda: (weights, slots))
        return {"loss": loss}, (weights, other, slots, metrics)


class Adversarial(keras.Model):
    """A GAN; the slots of its second optimizer are variables of the model."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((3,)), layers.Dense(6), layers.Dense(6)])
        self.critic = keras.Sequential([keras.Input((6,)), layers.Dense(6), layers.LeakyReLU(), layers.Dense(1)])
        self.critic_optimizer = keras.optimizers.Adam(0.01)
        self.critic_optimizer.build(self.critic.trainable_variables)
        self.critic_slots = self.critic_optimizer.variables
        self.count = len(self.generator.trainable_variables)

    def call(self, x):
        return self.critic(x)

    def compile(self, **mode):
        super().compile(keras.optimizers.SGD(0.01, momentum=0.9), **mode)
        self.optimizer.build(self.generator.trainable_variables)

    def critic_loss(self, critic, generator, real):
        fake, _ = self.generator.stateless_call(generator, [], real[:, :3])
        on = lambda x: self.critic.stateless_call(critic, [], x)[0]  # noqa: E731
        return jnp.mean(jax.nn.softplus(-on(real))) + jnp.mean(jax.nn.softplus(on(fake)))

    def generator_loss(self, generator, critic, real):
        fake, _ = self.generator.stateless_call(generator, [], real[:, :3])
        return jnp.mean(jax.nn.softplus(-self.critic.stateless_call(critic, [], fake)[0]))

    def train_step(self, state, data):
        real = data[0] if isinstance(data, tuple) else data
        weights, other, slots, metrics = state
        known = {id(v): i for i, v in enumerate(self.non_trainable_variables)}
        places = [known[id(v)] for v in self.critic_optimizer.variables]
        generator, critic = weights[: self.count], weights[self.count :]
        d_loss, gradients = jax.value_and_grad(self.critic_loss)(critic, generator, real)
        critic, moved = self.critic_optimizer.stateless_apply([other[i] for i in places], gradients, critic)
        other = list(other)
        for place, value in zip(places, moved):
            other[place] = value
        g_loss, gradients = jax.value_and_grad(self.generator_loss)(generator, critic, real)
        generator, slots = self.optimizer.stateless_apply(slots, gradients, generator)
        return {"d_loss": d_loss, "g_loss": g_loss}, ([*generator, *critic], other, slots, metrics)


def _own(kind, **mode):
    model = kind()
    model.compile(**({} if kind is Adversarial else {"optimizer": keras.optimizers.Adam(0.01)}), **mode)
    model(np.zeros((1, 6), "float32"))
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return model


STEPS = {OwnStep: False, TwoUpdates: True, Sharpness: False, SlowCopy: False, Conditional: True, Adversarial: True}
"""Each with whether its verdict depends on an update, or its weights on several."""


@pytest.mark.parametrize("kind", STEPS)
def test_own_step(kind):
    """The same transaction; if a step uses updated variables, this is detected."""
    bad = oracle(functools.partial(_own, kind), tolerance=1e-5)
    assert bad.guard.session.run.access.transaction.learned.updates_first == STEPS[kind]
    assert all(np.isfinite(v) for values in bad.history.values() for v in values)


class Keeping(OwnStep):
    """Keeps the last gradient of its last kernel, and logs one."""

    def build(self, shape):
        self.body.build(shape)
        self.last = self.add_weight(shape=(6, 1), initializer="zeros", trainable=False, name="last")
        self.built = True

    def train_step(self, state, data):
        trainable, non_trainable, slots, metrics = state

        def loss_of(trainable):
            outputs, moved = self.stateless_call(trainable, non_trainable, data[0], training=True)
            return jnp.mean(jnp.square(outputs - data[1])), moved

        (loss, moved), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable)
        place = next(i for i, v in enumerate(self.non_trainable_variables) if v.path == self.last.path)
        moved[place] = gradients[-2]
        trainable, slots = self.optimizer.stateless_apply(slots, gradients, trainable)
        return {"loss": loss, "bias": gradients[-1][0]}, (trainable, moved, slots, metrics)


def test_a_gradient_that_stays():
    """An array that goes to the state or the logs, too, is not donated with the others."""
    bad = oracle(functools.partial(_own, Keeping), tolerance=1e-5)
    assert np.abs(bad.model.last.numpy()).max() > 0


def test_own_step_eager():
    """The same without a compiled step."""
    oracle(functools.partial(_own, Adversarial, run_eagerly=True), zoo.regression(batches=6))


def test_first_step_of_raw_logs_is_bad():
    """A refused first step has no last committed logs: it logs finite values."""
    data = zoo.poison(zoo.regression(batches=3), 0)
    run = zoo.run(functools.partial(_own, OwnStep), data, guard=True, epochs=1)
    assert run.steps == [0] and np.isfinite(run.history["loss"][0])


# The state between two steps


def test_healthy_steps_leave_the_variables_alone(monkeypatch):
    """Variables are written only if the host reads them: for monitors and snapshots."""
    model, data, guard = zoo.plain(), zoo.regression(batches=40), NanGuard(verbose=0)
    calls = []
    real = model.jax_state_sync
    monkeypatch.setattr(type(model), "jax_state_sync", lambda self: (calls.append(guard.session.run.step), real())[1])
    model.fit(*data.all, batch_size=zoo.BATCH, verbose=0, callbacks=[guard])
    assert set(calls) <= {0, 1, 10, 30, 39, 40}


def test_other_callbacks_see_the_state():
    """A callback reads and changes the state of the next step."""

    def halve(model):
        model.layers[0].kernel.assign(model.layers[0].kernel * 0.5)

    build, data = functools.partial(zoo.plain, dropout=False), zoo.regression()
    guarded, plain = (zoo.run(build, data, guard=guard, callbacks=[zoo.After(halve, 5)]) for guard in (True, None))
    assert zoo.differences(guarded, plain, 1e-5) == []


def test_counts_name_variables():
    """An incident counts the bad entries of each gradient, by the path of its variable."""
    model, guard = zoo.plain(dropout=False), NanGuard(verbose=0)
    with inject(model, site="gradients", kind="inf", step=3, path="*/kernel", entries=2):
        model.fit(*zoo.regression().all, batch_size=zoo.BATCH, verbose=0, callbacks=[guard])
    kernels = {v.path: int(np.prod(v.shape)) for v in model.trainable_variables if v.path.endswith("kernel")}
    found = {f.path: (f.inf, f.size) for f in guard.incidents[0].findings if f.site == "gradients"}
    assert found == {path: (min(2, size), size) for path, size in kernels.items()}


def test_counts_are_of_their_own_batch():
    """The last batch of an epoch is smaller, and is traced separately."""
    x, y = np.random.default_rng(0).standard_normal((20, 4)).astype("float32"), np.zeros((20, 1), "float32")
    x[:8] = x[16:] = np.nan
    model, guard = keras.Sequential([keras.Input((4,)), layers.Dense(1)]), NanGuard(verbose=0, diagnose=False)
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[guard])
    found = [(i.batch, f.nan, f.size) for i in guard.incidents for f in i.findings if f.site == "outputs"]
    assert found == [(0, 8, 8), (2, 4, 4)] * 2


def test_a_diagnosis_runs_the_compiled_step_again():
    """On another batch, without a new trace and without a change of the state."""
    model = network(keras.optimizers.Adam(0.01))
    data, traces, found = zoo.regression(), _traces_of(model), []

    def again(model):
        before, kernel = len(traces), np.asarray(model.trainable_variables[0])
        run = guard.session.run
        step, (batch,) = explainer.step_of(run), run.recent.newest
        healthy = step.rerun((batch,))
        bad = step.rerun(((batch[0] * np.nan, batch[1]),))
        found.append((healthy.finite, bad.first, len(traces) - before, np.array_equal(kernel, model.trainable_variables[0])))

    guard = NanGuard()
    model.fit(data.x, data.y, batch_size=8, verbose=0, callbacks=[guard, zoo.After(again)])
    assert set(found) == {(True, "loss", 0, True)}


def test_a_diagnosis_runs_the_compiled_step_again_with_the_present_rates():
    """Under a schedule that is lowered twice: no new trace, and the current rate."""
    model = network(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.05, 40)))
    data, traces, found = zoo.regression(), _traces_of(model), []

    def again(model):
        session, before = guard.session, len(traces)
        rate = session.run.recovery.rate(model.optimizer)
        if rate.factor == 1.0:
            rate.lower(0.5, 0.0, 0.0)
            session.run.access.rebuild()
            return
        step, args = session.run.access.transaction, session.run.recent.newest
        moved = [step.judged(*args).weights]
        rate.lower(1e-3, 0.0, 0.0)
        moved.append(step.judged(*args).weights)
        rate.restore(0.5)
        found.append((moved[0] != moved[1], len(traces) - before))

    guard = NanGuard()
    model.fit(data.x, data.y, batch_size=8, verbose=0, callbacks=[guard, zoo.After(again)])
    assert set(found) == {(True, 0)}


def _traces_of(model):
    """Return a list that grows with each trace of a model's train step."""
    traces, plain = [], model.train_step
    object.__setattr__(model, "train_step", lambda *args: (traces.append(1), plain(*args))[1])
    return traces


def test_no_nnx(monkeypatch):
    """If NNX is enabled, the guard reports that it is not supported."""
    monkeypatch.setattr(keras.config, "is_nnx_enabled", lambda: True)
    with pytest.raises(GuardError, match="NNX"):
        zoo.run(zoo.plain, zoo.regression(), guard=True)


# Hand-written loops


class Loop:
    """A stateless step and its initial state."""

    def __init__(self):
        keras.utils.set_random_seed(0)
        self.model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8), layers.BatchNormalization(), layers.ReLU(), layers.Dense(1)]
        )
        self.optimizer = keras.optimizers.Adam(0.01)
        self.optimizer.build(self.model.trainable_variables)
        parts = (self.model.trainable_variables, self.model.non_trainable_variables, self.optimizer.variables)
        self.state = tuple([v.value for v in part] for part in parts)

    def loss(self, weights, other, x, y):
        predicted, other = self.model.stateless_call(weights, other, x, training=True)
        return jnp.mean((predicted - y) ** 2), other

    def step(self, state, x, y):
        weights, other, slots = state
        (loss, other), gradients = jax.value_and_grad(self.loss, has_aux=True)(weights, other, x, y)
        weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
        return loss, (weights, other, slots)


def batches(bad=()):
    data = zoo.regression().with_poison(bad)
    return [(data.x[i * 8 : i * 8 + 8], data.y[i * 8 : i * 8 + 8]) for i in range(data.batches)]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_step_of_a_loop_takes_arguments_by_name(compiled):
    """As without the guard; a bad step is refused, too."""
    loop, guard = Loop(), NanGuard(verbose=0)
    step = jax.jit(loop.step) if compiled else loop.step
    state = plain = loop.state
    with guard.watch(loop.model, loop.optimizer):
        run = guard.step(step)
        for x, y in batches()[:3]:
            loss, state = run(state, x, y=y)
            expected, plain = step(plain, x, y=y)
            assert float(loss) == pytest.approx(float(expected), rel=1e-6)
        _, state = run(state, np.nan * x, y=y)
    zoo.assert_same(jax.tree_util.tree_leaves(plain), jax.tree_util.tree_leaves(state), 1e-5)
    assert guard.incidents[0].diagnosis.cause == "input_nonfinite"


@pytest.mark.parametrize("compiled", [True, False])
def test_steps_of_a_loop_after_the_end_of_training(compiled, capsys):
    """They return the state that they receive, and the loop is told."""
    loop, guard = Loop(), NanGuard("stop")
    state, (x, y) = loop.state, batches()[0]
    with guard.watch(loop.model, loop.optimizer):
        run = guard.step(jax.jit(loop.step) if compiled else loop.step)
        for bad in (False, True):
            _, state = run(state, x * np.nan if bad else x, y)
        before = jax.tree_util.tree_map(np.array, state)
        for _ in range(3):
            loss, state = run(state, x, y)
            assert np.isfinite(float(loss))
    assert guard.stopped and guard.session.run.counts.step == 2
    zoo.assert_same(jax.tree_util.tree_leaves(before), jax.tree_util.tree_leaves(state))
    assert capsys.readouterr().out.count("steps since then have no effect. End the loop if guard.stopped") == 1


@pytest.mark.parametrize("compiled", [True, False])
def test_loop(compiled):
    """It ends like an unguarded one without the bad batches."""
    ends = []
    for bad in ((), BAD):
        loop, guard, refused = Loop(), NanGuard(verbose=0), []
        step = jax.jit(loop.step) if compiled else loop.step
        state = loop.state
        with guard.watch(loop.model, loop.optimizer):
            run = guard.step(step) if bad else step
            for i, batch in enumerate(batches(bad)):
                _, state = run(state, *batch)
                refused += [i] if guard.refused else []
        assert tuple(refused) == bad and [i.step for i in guard.incidents] == list(bad)
        ends.append(jax.tree_util.tree_leaves(state))
    zoo.assert_same(*ends, 1e-5)


@pytest.mark.parametrize(("bad", "cause", "path"), [("b", "input_nonfinite", "x/1"), ("c", "target_nonfinite", "y/y")])
def test_loop_with_inputs_in_a_tuple_and_targets_in_a_dict(bad, cause, path):
    """The arguments of the step have the roles of their order, not of their types."""
    loop, guard = Loop(), NanGuard(verbose=0)

    @jax.jit
    def step(state, inputs, targets):
        return loop.step(state, jnp.concatenate(inputs, -1), targets["y"])

    x, y = batches()[0]
    batch = {"a": x[:, :3], "b": x[:, 3:].copy(), "c": y.copy()}
    batch[bad][2, 0] = np.nan
    with guard.watch(loop.model, loop.optimizer):
        guard.step(step)(loop.state, (batch["a"], batch["b"]), {"y": batch["c"]})
    (incident,) = guard.incidents
    assert (incident.diagnosis.cause, incident.diagnosis.samples, incident.findings[0].path) == (cause, (2,), path)


def test_loop_remembers_its_batches_in_one_buffer():
    """The batches before a refused step are known, also from one array for all."""
    loop, guard, found = Loop(), NanGuard(verbose=0), []
    inputs, targets = (np.empty_like(part) for part in batches()[0])
    state = loop.state
    with guard.watch(loop.model, loop.optimizer):
        step = guard.step(jax.jit(loop.step))
        for x, y in batches((7,)):
            inputs[:], targets[:] = x, y
            _, state = step(state, inputs, targets)
            if guard.refused:
                found.append(guard.session.run.recent.last(100))
    assert len(found[0]) == 7
    for (x, y), ((known_x, known_y), _) in zip(batches(), found[0]):
        np.testing.assert_array_equal(x, known_x)
        np.testing.assert_array_equal(y, known_y)


def test_loop_rolls_back():
    """A rollback passes the last good state to the loop, with a lower rate in it."""
    loop, state = Loop(), None
    policy = {
        "snapshot": {"every": 3, "verify_after": 1},
        "rules": [{"name": "back", "do": ["rollback", {"lower_lr": {"factor": 0.5}}]}],
    }
    guard, state, states = NanGuard(policy, verbose=0), loop.state, []
    with guard.watch(loop.model, loop.optimizer):
        step = guard.step(jax.jit(loop.step))
        for batch in batches((8,)):
            _, state = step(state, *batch)
            states.append(state)
    assert [i.step for i in guard.incidents] == [8]
    zoo.assert_same(states[8][0], states[5][0])
    assert float(loop.optimizer.learning_rate.value) == pytest.approx(0.005)


def test_loop_that_is_compiled_again():
    """A step that is compiled again keeps the facts of the previous one."""
    loop, guard = Loop(), NanGuard(verbose=0)
    with guard.watch(loop.model, loop.optimizer):
        step, state, session = guard.step(jax.jit(loop.step)), loop.state, guard.session
        for batch in batches((4,)):
            _, state = step(state, *batch)
            before = session.run.access.transaction
            before.learned = replace(before.learned, tolerated=before.learned.tolerated | {session.run.step})
            session.run.access.rebuild()
            assert session.run.access.transaction is not before and session.run.access.transaction.learned.tolerated == set(range(1, session.run.step + 1))
    assert [i.step for i in guard.incidents] == [4]


WRONG_FORMS = {
    "state of another layout": (Loop.step, "trainable_variables"),
    "no state": (lambda loop, state, x, y: jnp.zeros(()), "return loss, state"),
    "a part lost": (lambda loop, *given: (0.0, loop.step(*given)[1][:2]), "in the structure"),
}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("what", WRONG_FORMS)
def test_a_loop_of_another_form(what, compiled):
    """The error names the expected form, and the state before the step is kept."""
    loop, guard = Loop(), NanGuard(verbose=0)
    body, said = WRONG_FORMS[what]
    step = functools.partial(body, loop)
    state = [jnp.zeros(3)] if what == "state of another layout" else loop.state
    with guard.watch(loop.model, loop.optimizer), pytest.raises(GuardError, match=said):
        guard.step(jax.jit(step) if compiled else step)(state, *batches()[0])
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree_util.tree_leaves(loop.state))


def largest_program(callbacks=()):
    """Return the peak memory of the step of a fit beyond its arguments, in bytes."""
    keras.utils.clear_session()
    gc.collect()
    model = keras.Sequential([keras.Input((1056,)), *(layers.Dense(1056, use_bias=False) for _ in range(4)), layers.Dense(1)])
    model.compile("adam", "mse")
    client = jax.local_devices()[0].client
    before = {id(program) for program in client.live_executables()}
    model.fit(np.ones((8, 1056), "float32"), np.ones((8, 1), "float32"), batch_size=4, verbose=0, callbacks=list(callbacks))
    taken = [p.get_compiled_memory_stats() for p in client.live_executables() if id(p) not in before]
    state = 3 * 4 * 4 * 1056**2
    return max(stats.temp_size_in_bytes for stats in taken if stats.argument_size_in_bytes >= state)


def test_a_step_takes_its_gradients_more_than_without_a_guard():
    """All of them are kept until the verdict; no weight and no slot exists twice."""
    gradients = 4 * 4 * 1056**2
    assert largest_program([NanGuard(verbose=0)]) <= largest_program() + gradients + (1 << 20)


class Interrupting:
    """A vector of a verdict whose wait is interrupted by a signal, once."""

    def __init__(self, vector, error):
        self.vector, self.errors = vector, [error]

    def __array__(self, *args, **kwargs):
        if self.errors:
            raise self.errors.pop()
        return np.asarray(self.vector)


@pytest.mark.daily("*-error0-True", "large-error0-False", "small-error1-False", "small-error2-True")
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError("no memory")])
@pytest.mark.parametrize("wide", [8, 600], ids=["small", "large"])
def test_an_interrupted_wait_loses_nothing(error, ahead, wide, monkeypatch):
    """The model has the state of the last step, and the user gets the interrupt."""
    data, started, real = zoo.regression(), [], Transaction.start

    def start(self, *args, **more):
        result = real(self, *args, **more)
        started.append(result)
        if len(started) == 8:
            result.computed = result.computed._replace(vector=Interrupting(result.computed.vector, error))
        return result

    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(wide), layers.Dense(wide), layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    model, look = build(), [] if ahead else [zoo.After(lambda model: 0)]
    monkeypatch.setattr(Transaction, "start", start)
    with pytest.raises(type(error)):
        zoo.fit(model, data, NanGuard(verbose=0), *look)
    assert zoo.bad_entries(model) == []
    assert int(np.asarray(model.optimizer.iterations)) == len(started)
    model.fit(*data.all, batch_size=zoo.BATCH, verbose=0)


def test_an_interrupt_right_after_the_step_loses_nothing(monkeypatch):
    """The new state is in the list to which the program wrote it."""
    model, calls, real = zoo.plain(), [], StartedStep.__init__

    def made(self, *args, **more):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        real(self, *args, **more)

    monkeypatch.setattr(StartedStep, "__init__", made)
    with pytest.raises(KeyboardInterrupt):
        zoo.run(lambda: model, zoo.regression(), guard=NanGuard(verbose=0))
    assert zoo.bad_entries(model) == [] and int(np.asarray(model.optimizer.iterations)) == 6


def test_metrics_are_released_with_the_model():
    """No program that JAX keeps refers to them."""

    def train():
        model = zoo.plain()
        zoo.fit(model, zoo.regression(batches=4), NanGuard(verbose=0))
        return [weakref.ref(metric) for metric in model.metrics]

    metrics = train()
    keras.utils.clear_session(free_memory=False)
    gc.collect()
    assert metrics and [metric() for metric in metrics] == [None] * len(metrics)


HUGE = {
    "sgd": (lambda: keras.optimizers.SGD(1e-22), True),
    "clipped": (lambda: keras.optimizers.Adam(1e-3, clipvalue=1.0), True),
    "adam": (lambda: keras.optimizers.Adam(1e-3), False),
}


@pytest.mark.parametrize("at", [1, 5, 11], ids=["at its start", "within an epoch", "at its end"])
def test_one_huge_gradient(at):
    """A single step with such gradients is not refused, whenever it is read."""

    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-3, clipvalue=1.0), "mse")
        return model

    data = zoo.regression()
    data.y[at * zoo.BATCH] = 1e18
    plain, guarded = (zoo.run(build, data, guard=guard) for guard in (None, "undiagnosed"))
    assert [i.step for i in guarded.guard.incidents if i.refused] == []
    found = zoo.differences(guarded, plain, 1e-5)
    if at == 11:  # Keras has read the metrics of the epoch when its last verdict is read
        found = [difference for difference in found if not difference.startswith("history['loss']")]
    assert found == []


@pytest.mark.parametrize("optimizer", HUGE)
def test_huge_gradients(optimizer):
    """Gradients of 1e20: a step commits if and only if its update is finite."""
    make, commits = HUGE[optimizer]

    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        model.compile(make(), lambda y, predicted: keras.ops.mean(keras.ops.square(predicted - y)) * 1e20)
        return model

    plain = zoo.run(build, zoo.regression(), epochs=1)
    assert (zoo.bad_entries(plain.model) == []) == commits, "stock Keras"
    guarded = zoo.run(build, zoo.regression(), guard="undiagnosed", epochs=1)
    assert zoo.bad_entries(guarded.model) == []
    assert (guarded.guard.session.run.counts.refused == 0) == commits
    if commits:
        assert guarded.guard.incidents == [] and zoo.differences(guarded, plain, 1e-5) == []


def test_loop_of_another_library():
    """`watch` needs no optimizer of another library: its state passes through the step."""
    loop, guard, refused = Loop(), NanGuard(verbose=0), []
    weights, other, _ = loop.state
    momentum = [jnp.zeros_like(w) for w in weights]

    def step(state, x, y):
        weights, other, momentum = state
        (loss, other), gradients = jax.value_and_grad(loop.loss, has_aux=True)(weights, other, x, y)
        momentum = [0.9 * m + g for m, g in zip(momentum, gradients)]
        return loss, ([w - 0.01 * m for w, m in zip(weights, momentum)], other, momentum)

    state = (weights, other, momentum)
    with guard.watch(loop.model):
        run = guard.step(jax.jit(step))
        for i, batch in enumerate(batches(BAD)):
            _, state = run(state, *batch)
            refused += [i] if guard.refused else []
    assert tuple(refused) == BAD and all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree_util.tree_leaves(state))


def test_an_optimizer_of_another_library():
    """It is not an argument of `watch`, and the error names the right call."""
    with pytest.raises(GuardError, match=r"Write guard.watch\(model\)"), NanGuard(verbose=0).watch(zoo.plain(), object()):
        pass
    with pytest.raises(GuardError, match="its own argument"), NanGuard(verbose=0).watch(zoo.plain(), [keras.optimizers.SGD()]):
        pass
