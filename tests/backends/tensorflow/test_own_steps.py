"""Unusual train steps: the bits of stock Keras, and a refusal undoes all writes."""

from __future__ import annotations

import collections
import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from support import zoo
from support.programs import RawLogs

from keras_nanguard import NanGuard, NanGuardModel
from keras_nanguard._backends.shared.replay import ReplayableStep

BATCH, BATCHES = 8, 10
BAD = (2, 6)
WITH_BAD = np.random.default_rng(0).standard_normal((BATCH * BATCHES, 6)).astype("float32")
WITH_BAD_Y = WITH_BAD[:, :1] - 0.5 * WITH_BAD[:, 1:2]
KEPT = np.concatenate(
    [np.arange(b * BATCH, b * BATCH + BATCH) for b in range(BATCHES) if b not in BAD]
)
X, Y = WITH_BAD[KEPT], WITH_BAD_Y[KEPT]
WITH_BAD[[step * BATCH + 3 for step in BAD]] = np.nan

MODES = {
    "graph": {"jit_compile": False},
    "eager": {"run_eagerly": True},
    "two steps in one": {"jit_compile": False, "steps_per_execution": 2},
}
EPOCHS = {"graph": 2, "eager": 1, "two steps in one": 2}


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


class Plain(keras.Model):
    """Base of the others; `state` lists further variables that a step may write."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4, activation="tanh")
        self.norm = layers.BatchNormalization()
        self.out = layers.Dense(1)

    def call(self, x, training=False):
        return self.out(self.norm(self.dense(x), training=training))

    def state(self):
        return []


def test_a_lowered_rate_reaches_each_function_of_a_loop():
    """A schedule is built into the traced step, so each function is traced again."""
    model = keras.Sequential(
        [keras.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    optimizer = keras.optimizers.SGD(
        keras.optimizers.schedules.PiecewiseConstantDecay([1000], [0.1, 0.1])
    )

    def towards(target):
        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - target) ** 2)
            optimizer.apply(
                tape.gradient(loss, model.trainable_variables), model.trainable_variables
            )
            return loss

        return guard.step(step)

    guard = NanGuard({"rules": [{"name": "act", "do": "lower_lr"}]}, verbose=0, diagnose=False)
    x, kernel = tf.ones((4, 1)), model.layers[0].kernel
    with guard.watch(model, optimizer):
        steps = towards(1.0), towards(2.0)
        for step, batch in zip((*steps, steps[0]), (x, x, x * np.nan)):
            step(batch)
        for target, step in zip((1.0, 2.0), steps):
            before = float(kernel.numpy().item())
            step(x)
            rate = (before - float(kernel.numpy().item())) / (2 * (before - target))
            assert rate == pytest.approx(0.01, rel=1e-3)


class Called:
    """A step that is an object."""

    def __init__(self, function):
        self.function = function

    def step(self, x, y):
        return self.function(x, y)

    __call__ = step


CALLS = {
    "function": lambda compiled: lambda x, y: compiled(x, y),
    "partial": functools.partial,
    "object": Called,
    "method": lambda compiled: Called(compiled).step,
}


@pytest.mark.parametrize("bad", ["first", "middle", "gradients"])
@pytest.mark.parametrize("form", [*CALLS, "xla"])
@pytest.mark.daily("function-first", "partial-middle", "xla-gradients")
def test_a_python_step_that_calls_a_compiled_one(form, bad):
    """It trains as without the bad batches, also if its first call creates layers and slots, and trains a weight that
    is not part of the model.
    """
    refused = {"first": (0, 1, 5), "middle": (4,), "gradients": (3, 6)}[bad]

    def train(steps, watched):
        keras.utils.set_random_seed(0)
        model, optimizer = Plain(), keras.optimizers.Adam(0.01)
        factor = keras.Variable(np.ones(6, "float32"), name="factor")

        @tf.function(jit_compile=form == "xla")
        def compiled(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x * factor, training=True) - y) ** 2)
                loss += tf.reduce_sum(tf.sqrt(tf.abs(x[0, 0] * factor)))  # at 0 its gradient is NaN
            weights = [*model.trainable_variables, factor]
            optimizer.apply(tape.gradient(loss, weights), weights)
            return loss

        step = CALLS.get(form, Called)(compiled)
        guard = NanGuard(verbose=0, diagnose=False)
        with guard.watch(model, optimizer) if watched else contextlib.nullcontext():
            step = guard.step(step) if watched else step
            for number in steps:
                step(tf.constant(x[number]), tf.constant(Y[:BATCH]))
                assert guard.refused == (watched and number in refused)
        return [v.numpy() for v in (*model.variables, *optimizer.variables, factor)]

    x = [X[:BATCH] + number for number in range(8)]
    for number in refused:
        x[number][0, 0] = 0.0 if bad == "gradients" else np.nan
    zoo.assert_same(train(range(8), True), train([n for n in range(8) if n not in refused], False))


class CallsACompiledFunction(Plain, NanGuardModel):
    """Its train step, which runs eagerly, leaves all the work to a `tf.function`."""

    nanguard_verbose = 0

    @tf.function
    def updated(self, x, y):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(
            tape.gradient(loss, self.trainable_variables), self.trainable_variables
        )
        return loss

    def train_step(self, data):
        return {"loss": self.updated(*data)}


def test_a_model_whose_eager_step_calls_a_compiled_function():
    """It trains as without the bad batches."""
    found = []
    for x, y in ((WITH_BAD, WITH_BAD_Y), (X, Y)):
        keras.utils.set_random_seed(0)
        model = CallsACompiledFunction()
        model.nanguard.diagnose = False
        model.compile(sgd(), "mse", run_eagerly=True)
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        found.append([v.numpy() for v in (*model.variables, *model.optimizer.variables)])
        assert [i.step for i in model.nanguard.incidents] == (list(BAD) if x is WITH_BAD else [])
    zoo.assert_same(*found)


class LowersItsRate(Plain):
    """Writes the learning rate after its update."""

    def train_step(self, data):
        logs = super().train_step(data)
        self.optimizer.learning_rate.assign(self.optimizer.learning_rate * 0.9)
        return logs


class ReadsItsRateLate(Plain):
    """Its rate is a callable that reads a variable, which the step writes after its update."""

    def __init__(self):
        super().__init__()
        self.rate = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(0.05), trainable=False, name="rate"
        )

    def train_step(self, data):
        logs = super().train_step(data)
        self.rate.assign(self.rate * 0.9)
        return logs


class WritesWeights(Plain):
    """Changes its weights itself before and after its update."""

    def train_step(self, data):
        for weight in self.trainable_weights:
            weight.assign(weight * 1.01)
        logs = super().train_step(data)
        for weight in self.trainable_weights:
            weight.assign(weight * 0.99)
        return logs


class SetsItsRateFirst(Plain):
    """Writes the learning rate before its update, depending on the batch."""

    def train_step(self, data):
        rate = self.optimizer.learning_rate
        rate.assign(rate * 0.9 + tf.reduce_mean(data[0]) * 1e-3)
        return super().train_step(data)


class WritesASlotFirst(Plain):
    """Changes the momentum of its last weight before its update."""

    def train_step(self, data):
        if self.optimizer.built:
            slot = self.optimizer.momentums[-1]
            slot.assign(slot + tf.reduce_mean(data[0]))
        return super().train_step(data)


class HidesAVariable(Plain):
    """Writes a `tf.Variable` that is only in a closure."""

    def __init__(self):
        super().__init__()
        hidden = tf.Variable(tf.zeros((6,)), trainable=False)
        self.hidden = lambda: hidden

    def state(self):
        return [self.hidden()]

    def train_step(self, data):
        x, y = data
        self.hidden().assign_add(0.1 * tf.reduce_mean(x, 0))
        return super().train_step((x - self.hidden(), y))


class ReadsItsWeights(Plain):
    """Logs the norm of its weights after the update."""

    def train_step(self, data):
        logs = super().train_step(data)
        return {**logs, "norm": keras.ops.norm(self.out.kernel)}


def nested(how):
    """Return a step that writes a `tf.Variable` inside a construct."""

    class Nested(Plain):
        def __init__(self):
            super().__init__()
            self.mean = tf.Variable(tf.zeros((6,)), trainable=False)
            self.draws = tf.random.Generator.from_seed(3)

        def state(self):
            return [self.mean, self.draws.state]

        def train_step(self, data):
            x, y = data
            mean = tf.reduce_mean(x, 0)

            def update():
                self.mean.assign(0.9 * self.mean + 0.1 * mean + 0.01 * self.draws.normal((6,)))
                return tf.constant(0)

            if how == "cond":
                tf.cond(tf.size(x) > 0, update, lambda: tf.constant(0))
            elif how == "while":
                tf.while_loop(lambda i: i < 2, lambda i: (update() + i + 1,), [tf.constant(0)])
            elif how == "function":
                tf.function(update)()
            else:
                update()
            return super().train_step((x - self.mean, y))

    return Nested


class TrainsNative(keras.Model):
    """Trains a `tf.Variable`, such as one of a `tf.Module`."""

    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(tf.ones((6, 1)), name="own/weight")

    def state(self):
        return [self.weight]

    def call(self, x):
        return tf.matmul(x, self.weight)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        self.update(tape.gradient(loss, self.weight))
        return {"loss": loss}

    def update(self, gradient):
        self.optimizer.apply_gradients([(gradient, self.weight)])


def updates_inside(how):
    """Return a step that trains its `tf.Variable` inside a construct."""

    class Inside(TrainsNative):
        def update(self, gradient):
            def inside():
                TrainsNative.update(self, gradient)
                return tf.constant(0)

            tf.function(inside)() if how == "function" else tf.cond(
                tf.size(gradient) > 0, inside, lambda: tf.constant(0)
            )

    return Inside


class Adversarial(keras.Model):
    """A GAN whose networks are not attributes, and read one another's updates."""

    def __init__(self):
        super().__init__()
        inner = [layers.Dense(8, "tanh"), layers.BatchNormalization()]
        generator = keras.Sequential([keras.Input((3,)), *inner, layers.Dense(6)])
        critic = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(1)])
        self.networks = lambda: (generator, critic)
        self.generator_optimizer, self.critic_optimizer = sgd(), sgd()
        self.seed = keras.random.SeedGenerator(3)

    def state(self):
        return [v for network in self.networks() for v in network.variables]

    def train_step(self, data):
        x, _ = data
        generator, critic = self.networks()
        noise = keras.random.normal((BATCH, 3), seed=self.seed)
        with tf.GradientTape() as tape:
            critic_loss = tf.reduce_mean(
                tf.nn.softplus(-critic(x)) + tf.nn.softplus(critic(generator(noise, training=True)))
            )
        self._update(self.critic_optimizer, tape, critic_loss, critic)
        with tf.GradientTape() as tape:
            generator_loss = tf.reduce_mean(
                tf.nn.softplus(-critic(generator(noise, training=True)))
            )
        self._update(self.generator_optimizer, tape, generator_loss, generator)
        return {"critic_loss": critic_loss, "generator_loss": generator_loss}

    def _update(self, optimizer, tape, loss, network):
        optimizer.apply_gradients(
            zip(tape.gradient(loss, network.trainable_weights), network.trainable_weights)
        )


class Counts(Plain):
    """Counts in a table, which a refusal does not restore, and does not report its loss."""

    def __init__(self):
        super().__init__()
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, default_value=0)

    def train_step(self, data):
        key = tf.constant(1, tf.int64)
        self.table.insert(key, self.table.lookup(key) + 1)
        return super().train_step(data)


STEPS = {
    "lowers its rate": LowersItsRate,
    "reads its rate late": ReadsItsRateLate,
    "sets its rate first": SetsItsRateFirst,
    "writes a slot first": WritesASlotFirst,
    "hides a variable": HidesAVariable,
    "writes weights": WritesWeights,
    "reads its weights": ReadsItsWeights,
    "writes a variable": nested("plain"),
    "writes in a conditional": nested("cond"),
    "writes in a loop": nested("while"),
    "writes in a function": nested("function"),
    "trains a tf.Variable": TrainsNative,
    **{f"updates in a {how}": updates_inside(how) for how in ("conditional", "function")},
    "networks that are not attributes": Adversarial,
    "writes a table": Counts,
}

KEEPS_OLD_VALUES = {
    *("lowers its rate", "reads its rate late", "writes weights", "reads its weights"),
    *("writes a slot first", "networks that are not attributes"),
    *(name for name in STEPS if name.startswith("updates in a ")),
}
"""Steps with an update in graph mode that cannot be deferred, so old values are stored."""

NOT_EAGER = {"networks that are not attributes", "hides a variable"}
"""Steps with writes that cannot be seen in eager execution, nor restored: a documented limit."""


def fitted(make, x, y, callbacks, mode):
    """Return history, state, and the model after a fit."""
    keras.utils.set_random_seed(1)
    model = make()
    rate = (lambda: model.rate + 0.0) if make is ReadsItsRateLate else 0.05
    model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse", **MODES[mode])
    options = {"batch_size": BATCH, "epochs": EPOCHS[mode], "shuffle": False, "verbose": 0}
    history = model.fit(x, y, callbacks=callbacks, **options).history
    optimizers = [
        model.optimizer,
        *(o for o in vars(model).values() if isinstance(o, keras.optimizers.Optimizer)),
    ]
    state = [
        *model.variables,
        *model.state(),
        *(v for o in optimizers if o is not None for v in o.variables),
    ]
    return history, [np.asarray(v) for v in state], model


def in_turn():
    """Return every step in every mode; the normal run has one mode for each step, in turn."""
    for n, name in enumerate(STEPS):
        for m, mode in enumerate(MODES):
            yield pytest.param(name, mode, marks=[pytest.mark.slow] if (n + m) % len(MODES) else [])


@pytest.mark.parametrize(("name", "mode"), in_turn())
def test_bad_batches_leave_nothing_behind(name, mode):
    """A guarded run with inserted bad batches ends like stock Keras without them."""
    plain_history, plain, _ = fitted(STEPS[name], X, Y, [], mode)
    guard, seen = NanGuard(verbose=0, diagnose=False), not (mode == "eager" and name in NOT_EAGER)
    given = (WITH_BAD, WITH_BAD_Y) if seen else (X, Y)
    history, state, model = fitted(STEPS[name], *given, [guard], mode)
    assert zoo.plain_logs(history) == plain_history
    zoo.assert_same(state, plain)
    bad = [BATCHES * epoch + step for epoch in range(EPOCHS[mode]) for step in BAD] if seen else []
    assert [incident.step for incident in guard.incidents] == bad
    if mode == "graph":
        assert guard.session.run.access.transaction.learned.updates_first == (
            name in KEEPS_OLD_VALUES
        )
    if name == "writes a table":  # said among the limits
        assert int(model.table.lookup(tf.constant(1, tf.int64))) == EPOCHS[mode] * BATCHES


def test_a_rollback_restores_networks_that_are_not_attributes():
    """A snapshot has everything that the optimizers train, and a scan of the state finds it."""
    policy = {"rules": [{"name": "back", "do": {"rollback": {"replay_steps": False}}}]}
    guard, spoiled = NanGuard(policy, verbose=0, diagnose=False), []

    class Spoils(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4 and not spoiled:
                weight = self.model.networks()[1].trainable_weights[0]
                weight.assign(np.full(weight.shape, np.nan, "float32"))
                spoiled.append(weight)

    _, state, _ = fitted(Adversarial, X, Y, [guard, Spoils()], "graph")
    first = guard.incidents[0]
    assert first.findings[0].site == "state" and first.findings[0].path == spoiled[0].path
    assert [o.status for o in first.outcomes] == ["done"]
    assert all(np.isfinite(value).all() for value in state)


@pytest.mark.parametrize("make", [TrainsNative, HidesAVariable])
def test_a_tf_variable(make):
    """A replay keeps it, too: cause and rows are known. A trained one is reported by its name."""
    guard = NanGuard(verbose=0)
    fitted(make, WITH_BAD, WITH_BAD_Y, [guard], "graph")
    first = guard.incidents[0]
    assert (first.diagnosis.cause, first.diagnosis.samples) == ("input_nonfinite", (3,))
    named = "own/weight" in {f.path for f in first.findings if f.site == "gradients"}
    assert named == (make is TrainsNative)


class GuardedRawLogs(RawLogs, NanGuardModel):
    """Logs the loss of its batch under the name of a metric that it never updates."""


class Doubled(RawLogs):
    """Returns the result of one metric in other units, and another one unchanged."""

    def __init__(self):
        super().__init__()
        self.last = keras.metrics.Mean(name="last")

    @property
    def metrics(self):
        return [self.tracker, self.last]

    def train_step(self, data):
        logs = super().train_step(data)
        self.tracker.update_state(logs["loss"])
        self.last.update_state(logs["loss"])
        return {"loss": 2.0 * self.tracker.result(), "last": self.last.result()}


def seen_by_callbacks(make, x, callbacks, mode, y=Y):
    seen = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append({k: float(v) for k, v in logs.items()})
    )
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(keras.optimizers.SGD(0.05), "mse", **MODES[mode])
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[*callbacks, note])
    return seen


@pytest.mark.daily("RawLogs-graph", "Doubled-eager", "Doubled-two steps in one")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [RawLogs, Doubled])
def test_logs_are_those_that_the_step_returned(make, mode):
    """A refused step logs the results of the last committed step."""
    plain = seen_by_callbacks(make, X, [], mode)
    assert plain == seen_by_callbacks(make, X, [NanGuard(verbose=0)], mode)
    if mode == "two steps in one":
        return
    guard = NanGuard(verbose=0, diagnose=False)
    left_out = seen_by_callbacks(make, WITH_BAD, [guard], mode, WITH_BAD_Y)
    without, expected = iter(plain), []
    for step in range(BATCHES):
        expected.append(expected[-1] if step in BAD else next(without))
    assert left_out == expected


def test_a_single_batch_logs_its_own_loss():
    """`train_on_batch` of a guarded model returns the same as that of the plain one."""
    results = []
    for make in (RawLogs, GuardedRawLogs):
        keras.utils.set_random_seed(0)
        model = make()
        model.compile(keras.optimizers.SGD(0.05), "mse")
        results.append([model.train_on_batch(X[:8], Y[:8], return_dict=True) for _ in range(3)])
    assert results[0] == results[1]


def test_an_optimizer_that_writes_while_it_is_built():
    """Stock momenta are 0 in graph mode and the weights in eager mode: so in a guarded run."""
    if not hasattr(keras.optimizers, "ScheduleFreeAdamW"):
        pytest.skip("this version of Keras has no ScheduleFreeAdamW")

    def run(callbacks, **mode):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(1)])
        model.compile(keras.optimizers.ScheduleFreeAdamW(3e-3), "mse", **mode)
        model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]

    graph, eager = run([]), run([], run_eagerly=True)
    assert not np.allclose(graph[0], eager[0], atol=1e-3), "stock Keras agrees with itself"
    zoo.assert_same(run([NanGuard(verbose=0)]), graph)
    zoo.assert_same(run([NanGuard(verbose=0)], run_eagerly=True), eager)


class ScalesBeforeItIsBuilt(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            scaled = self.optimizer.scale_loss(loss)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, weights), weights)
        return {"loss": loss}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_scales_its_loss_before_the_optimizer_is_built(mode):
    """Keras reads the constant `initial_scale` then, until it traces the step again: so in a guarded run."""

    def run(callbacks):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6,))
        model = ScalesBeforeItIsBuilt(inputs, layers.Dense(1)(layers.Dense(4, "tanh")(inputs)))
        scaled = keras.optimizers.LossScaleOptimizer(
            sgd(), initial_scale=1024.0, dynamic_growth_steps=3
        )
        model.compile(scaled, **MODES[mode])
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
        return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]

    zoo.assert_same(run([NanGuard(verbose=0)]), run([]))


@pytest.fixture
def checked_numerics():
    tf.debugging.enable_check_numerics()
    yield
    tf.debugging.disable_check_numerics()


def test_with_check_numerics(checked_numerics):
    """A bad step raises as without the guard, before anything is written."""
    guard = NanGuard(verbose=0)
    _, state, model = fitted(Plain, X, Y, [guard], "graph")
    zoo.assert_same(state, fitted(Plain, X, Y, [], "graph")[1])
    assert guard.incidents == []
    with pytest.raises(tf.errors.InvalidArgumentError, match="Infinity or NaN"):
        model.fit(
            WITH_BAD, WITH_BAD_Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[guard]
        )
    assert all(
        np.isfinite(np.asarray(v)).all() for v in (*model.variables, *model.optimizer.variables)
    )


@pytest.mark.parametrize("mode", ["graph", "two steps in one"])
def test_weights_that_a_step_trains_by_hand_after_a_fit_without_a_guard(mode):
    """A moving average of other weights, which no optimizer trains, moves on as without a guard."""

    class Average(keras.Model):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = layers.Dense(1), layers.Dense(1)

        def build(self, shape):
            self.student.build(shape)
            self.teacher.build(shape)
            self.built = True

        def call(self, x):
            return self.student(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.student(x) - y) ** 2)
            weights = self.student.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            for average, weight in zip(self.teacher.trainable_variables, weights):
                average.assign(0.5 * average + 0.5 * weight)
            return {"loss": loss}

    def trained(callbacks):
        keras.utils.set_random_seed(0)
        model = Average()
        model.build((None, 6))
        model.compile("sgd", **MODES[mode])
        for given in ([], callbacks):
            model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=given)
        return model.get_weights()

    for one, other in zip(trained([NanGuard(verbose=0)]), trained([])):
        np.testing.assert_array_equal(one, other)


def test_arguments_are_cast_to_the_signature_of_a_function(caplog):
    """As TensorFlow casts them, so a Python number does not trace the step again."""
    model, traces = keras.Sequential([keras.Input((6,)), layers.Dense(1)]), []
    optimizer = keras.optimizers.SGD(0.01)

    @tf.function(
        input_signature=[
            tf.TensorSpec((None, 6)),
            tf.TensorSpec((None, 1)),
            tf.TensorSpec((), tf.int32),
        ]
    )
    def step(x, y, number):
        traces.append(x.dtype)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss, number

    guard = NanGuard(verbose=0)
    with guard.watch(model, optimizer):
        guarded = guard.step(step)
        for number in range(5):
            before = len(traces)
            bad = np.nan if number == 3 else 1.0
            _, given = guarded(
                X[:8].astype("float64") * bad, number=number, y=Y[:8].astype("float64")
            )
            assert given.dtype == tf.int32 and int(given) == number
            assert number in (0, 3) or len(traces) == before, "no new trace"
    assert set(traces) == {tf.float32}, "in the replays of the diagnosis as well"
    assert [incident.step for incident in guard.incidents] == [3]
    assert not caplog.records, "TensorFlow has no advice about the code of the guard"


def test_weights_that_are_unfrozen_without_compiling_in_a_custom_step():
    """They stay as they are, as without a guard: the optimizer was not built for them."""

    class Own(keras.Model):
        def train_step(self, data):
            return super().train_step(data)

    def trained(callbacks):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        back = layers.Dense(4, kernel_regularizer="l2")
        model = Own(inputs, layers.Dense(1)(back(inputs)))
        back.trainable = False
        model.compile("adam", "mse", jit_compile=False)
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
        back.trainable = True
        model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
        return model.get_weights()

    for one, other in zip(trained([NanGuard(verbose=0)]), trained([])):
        np.testing.assert_array_equal(one, other)


def test_arguments_that_a_signature_leaves_out():
    model, optimizer = (
        keras.Sequential([keras.Input((6,)), layers.Dense(1)]),
        keras.optimizers.SGD(0.01),
    )
    specs = [tf.TensorSpec((None, 6)), tf.TensorSpec((None, 1))]

    def core(x, y, factor=1.0):
        with tf.GradientTape() as tape:
            loss = factor * tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function(input_signature=specs)
    def by_default(x, y, flag=True, *, other=None):
        return core(x, y) if flag else 0.0

    @tf.function(input_signature=[*specs, tf.TensorSpec(())])
    def of_signature(x, y, factor=2.0):
        return core(x, y, factor)

    guard = NanGuard(verbose=0)
    with guard.watch(model, optimizer):
        step, scaled = guard.step(by_default), guard.step(of_signature)
        for args, kwargs in (
            ((X, Y), {}),
            ((X, Y, True), {}),
            ((X,), {"y": Y, "flag": True, "other": None}),
        ):
            step(*args, **kwargs)
        scaled(X, Y)
        scaled(X, Y, factor=1)
        with pytest.raises(
            TypeError,
            match=r"Expected flag=True, which the input_signature leaves out. Received: flag=False",
        ):
            step(X, Y, flag=False)
    assert int(optimizer.iterations.numpy()) == 5


class FirstFixed(Plain):
    """Its first gradient is a constant; the second one is NaN for large inputs, in graphs only."""

    fixed = np.zeros((6, 4), "float32")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_weights
        gradients = tape.gradient(loss, weights)
        with tf.init_scope():
            gradients[0] = tf.constant(self.fixed)
        if not tf.executing_eagerly():
            gradients[1] = tf.where(tf.reduce_max(x) > 50, np.nan, gradients[1])
        self.optimizer.apply(gradients, weights)
        return {"loss": loss}


def test_a_gradient_that_is_a_constant():
    """Another one, which only the graph has as NaN, is found by its own name."""
    model = FirstFixed()
    model.compile(sgd(), "mse", jit_compile=False)
    model.build((None, 6))
    batch = tf.constant(X[:BATCH] * 100), tf.constant(Y[:BATCH])
    found = ReplayableStep.of(model, [model.optimizer]).run_compiled((batch,), jit=False)
    assert (found.first, found.first_path) == ("gradients", model.dense.bias.path)


def test_loop_step_without_source():
    """TensorFlow cannot convert a function whose source is unknown, and runs it as it is."""
    scope = {}
    exec("def step(x, y):\n    return update(x, y)\n", scope)
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    def update(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    scope["update"] = update
    guard = NanGuard(verbose=0)
    step = guard.step(tf.function(scope["step"]))
    x = tf.ones((4, 3))
    with guard.watch(model, optimizer):
        step(x, tf.ones((4, 1)))
        before = [np.array(v) for v in model.variables]
        step(x, tf.fill((4, 1), np.nan))
    zoo.assert_same([np.array(v) for v in model.variables], before)
    assert len(guard.incidents) == 1


def test_names_of_outputs_in_an_ordered_dict():
    """Keras names outputs in the order in which an `OrderedDict` has them."""
    inputs = keras.Input((3,))
    outputs = collections.OrderedDict(
        zulu=layers.Dense(1, name="zulu")(inputs),
        alpha=layers.Rescaling(1e38, name="alpha")(layers.Dense(1, name="dense")(inputs)),
    )
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    guard = NanGuard("tune", verbose=0)
    y = collections.OrderedDict.fromkeys(outputs, np.zeros((4, 1), "float32"))
    model.fit(np.full((4, 3), 1e5, "float32"), y, verbose=0, callbacks=[guard])
    (incident,) = guard.incidents
    bad = {finding.path for finding in incident.findings if finding.site == "outputs"}
    assert bad == {"alpha"}
