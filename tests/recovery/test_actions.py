"""Every action in a running fit, done and skipped."""

import contextlib
import types

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras.optimizers import schedules
from support import zoo

from keras_nanguard import NanGuard
from keras_nanguard._fit.perform import PERFORMERS
from keras_nanguard._fit.recovery import Recovery
from keras_nanguard._policy.actions import ACTIONS
from keras_nanguard.errors import NonFiniteError
from keras_nanguard.testing import corrupt


def acting(*do, times=10, snapshot=None, tables=None, **options):
    """Return a guard that does this at each incident; `tables` are others of its policy."""
    policy = {
        "rules": [{"name": "act", "do": list(do)}],
        "rollback": {"further_back": False, "replay_steps": False},
        "action_budget": times,
        "snapshot": snapshot or {"every": 4, "verify_after": 1},
        **(tables or {}),
    }
    return NanGuard(policy, verbose=0, diagnose=False, **options)


def outcomes(guard, action):
    """Return `(step, status, detail)` of each occurrence of an action."""
    return [(i.step, o.status, o.detail) for i in guard.incidents for o in i.outcomes if o.action == action]


class At(keras.callbacks.Callback):
    def __init__(self, **steps):
        super().__init__()
        self.steps, self.seen = {int(name[1:]): do for name, do in steps.items()}, 0

    def on_train_batch_begin(self, batch, logs=None):
        if self.seen in self.steps:
            self.steps[self.seen](self.model)
        self.seen += 1


class Weights(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.values = [self._now()]

    def on_train_batch_end(self, batch, logs=None):
        self.values.append(self._now())

    def _now(self):
        return float(np.ravel(self.model.trainable_variables[0].numpy())[0])

    @property
    def steps(self):
        return [round(float(before - after), 7) for before, after in zip(self.values, self.values[1:])]


def line(optimizer, **compile_options):
    """Return a model whose gradient is 1: each step of SGD changes the weight by the rate."""
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(optimizer, loss=lambda y, p: ops.mean(p), **compile_options)
    return model


def walk(model, guard, *bad, batches=12, epochs=1, callbacks=()):
    """Train on ones, with NaN in some batches; return the change in each step."""
    x = np.ones((batches, 1), "float32")
    x[list(bad)] = np.nan
    weights = Weights()
    model.fit(x, x, batch_size=1, epochs=epochs, shuffle=False, verbose=0, callbacks=[guard, weights, *callbacks])
    return weights.steps


def train(guard, *bad, build=None, callbacks=(), **fit):
    """Train the usual small network, eagerly, with NaN in some batches."""
    data = zoo.regression()
    for batch in bad:
        zoo.poison(data, batch)
    return zoo.run(build or (lambda: zoo.plain(run_eagerly=True)), data, guard=guard, epochs=1, callbacks=callbacks, **fit)


@pytest.mark.requires_backend("tensorflow", reason="several steps in one compiled call")
@pytest.mark.parametrize(
    ("action", "refused", "remembered"),
    [
        *(("rollback", 3, 0), ("reset_batchnorm", 3, 0), ({"reset_slots": {"scope": "all"}}, 3, 0)),
        ("lower_lr", 1, 8),
    ],
)
def test_later_steps_of_an_execution(action, refused, remembered):
    """Steps of its execution that had started do not count, and no earlier one is replayed."""
    guard = acting(action)
    known = zoo.After(lambda model: len(guard.session.run.recent._entries))
    build = lambda: zoo.plain(dropout=False, metrics=(), steps_per_execution=4)  # noqa: E731
    train(guard, 5, build=build, callbacks=[known], steps_per_epoch=8)
    assert [o.status for i in guard.incidents for o in i.outcomes] == ["done"]
    assert (guard.session.run.counts.refused, known.seen[-1]) == (refused, remembered)


@pytest.mark.requires_backend("tensorflow", reason="several steps in one compiled call")
def test_later_steps_of_the_execution_in_which_training_stops():
    """They have run on the same state: those that have committed count as such."""
    model, guard = zoo.plain("sgd", dropout=False, steps_per_execution=10), NanGuard("stop", verbose=0)
    data = zoo.poison(zoo.poison(zoo.regression(batches=10), 3), 7)
    history = zoo.fit(model, data, guard, epochs=1)
    assert guard.stopped and [incident.step for incident in guard.incidents] == [3]
    assert history["refused_steps"] == [2] and int(model.optimizer.iterations) == 8
    assert guard.session.run.counts.committed == 8
    assert np.flatnonzero(guard.recording.steps["status"]).tolist() == [3, 7]


@pytest.mark.parametrize(
    ("action", "build", "reason"),
    [
        ("fix_loss_scale", None, "the model does not scale its loss"),
        ("repair", None, "no entry is bad"),
        ("reset_batchnorm", lambda: _linear(), "the model has no BatchNormalization"),
        pytest.param(
            "recalibrate_batchnorm",
            lambda: zoo.plain(steps_per_execution=4),
            "no batch is in memory",
            marks=pytest.mark.requires_backend("tensorflow", reason="several steps in one compiled call"),
        ),
        ("reset_slots", None, "no slot is bad"),
        ({"reset_slots": {"scope": "all"}}, lambda: zoo.plain("sgd"), "there is no slot"),
        ({"call": {"function": "fails"}}, None, "ZeroDivisionError: division by zero"),
        ({"call": {"function": "other"}}, None, "fails"),
    ],
)
def test_skipped(action, build, reason):
    """An action that cannot be done is skipped with the reason, and training goes on."""
    guard = acting(action, functions={"fails": lambda incident: 1 / 0})
    train(guard, 3, build=build)
    ((_, status, words),) = outcomes(guard, action if isinstance(action, str) else next(iter(action)))
    assert status == "skipped" and reason in words and guard.session.run.step == 12


def test_each_action_has_a_function():
    assert list(PERFORMERS) == list(ACTIONS)


class TestWarn:
    def test_done(self, capsys):
        guard = acting({"warn": {"message": "look at the sensors"}})
        guard.verbose = 1
        train(guard, 3)
        assert "look at the sensors" in capsys.readouterr().out


class TestRollback:
    def test_newest(self):
        """A rollback restores the newest verified snapshot, with slots and statistics."""
        kept = {}
        save = {"s4": lambda m: kept.update(zoo.state_of(m))}
        guard = acting("rollback", snapshot={"every": 4, "verify_after": 2})
        train(guard, 6, build=lambda: zoo.plain(dropout=False, run_eagerly=True), callbacks=[At(s7=lambda m: kept.update(now=zoo.state_of(m)), **save)])
        back = {path: value for path, value in kept.pop("now") if not path.startswith(("loss/", "mean_absolute"))}
        for path, value in back.items():
            np.testing.assert_array_equal(value, kept[path], err_msg=path)
        assert outcomes(guard, "rollback") == [(6, "done", "restored the state after 4 steps; 2 committed steps undone")]

    def test_unproven(self):
        """A snapshot with too few good steps after it is not restored."""
        guard = acting("rollback", snapshot={"every": 4, "verify_after": 3})
        train(guard, 6)
        assert outcomes(guard, "rollback")[0][2] == "restored the state before the first step; 6 committed steps undone"

    def test_depth(self):
        further = {"rollback": {"replay_steps": False}}
        guard = acting("rollback", snapshot={"every": 3, "verify_after": 1, "keep": 5}, tables=further)
        train(guard, 10, 11)
        details = [detail for _, _, detail in outcomes(guard, "rollback")]
        assert details == [
            "restored the state after 9 steps; 1 committed step undone",
            "restored the state after 6 steps; 3 committed steps undone",
        ]

    def test_counts_only_committed(self):
        """None before the first, none twice, and the one that left a bad state."""
        guard = acting("rollback", snapshot={"every": 4, "verify_after": 1})
        train(guard, 0, 1, 7, 8, 10)
        assert [detail.split("; ")[1] for _, _, detail in outcomes(guard, "rollback")] == [
            *["no step had committed since"] * 2,
            "3 committed steps undone",
            "no step had committed since",
            "1 committed step undone",
        ]

    def test_reseed(self):
        """Each rollback advances the seeds by another amount, for other dropout."""
        seeds = []

        def note(model):
            seeds.append([v.numpy().tolist() for v in model.variables if "seed" in v.path])

        guard = acting("rollback", snapshot={"every": 100})
        train(guard, 3, 5, callbacks=[At(s0=note, s4=note, s6=note)])
        first, second, third = seeds
        assert first != second != third != first

    @pytest.mark.requires_backend("tensorflow", "torch", reason="on JAX the state passes through the step")
    def test_batches_of_an_own_loop(self):
        """A loop chooses its batches: none is skipped, nothing is left to skip, and the outcome says so."""
        model, guard = zoo.plain(), acting({"rollback": {"skip_batches": 3}})
        x, ones = zoo.poison(zoo.regression(), 6).x.reshape(zoo.BATCHES, 8, 6), keras.ops.ones((8, 1))
        with guard.watch(model):
            step = guard.step(lambda x: model.train_step((keras.ops.convert_to_tensor(x), ones))["loss"])
            for batch in x:
                step(batch)
            assert not guard.session.pending, "nothing is due before the next step"
        ((_, status, detail),) = outcomes(guard, "rollback")
        assert status == "done" and "skip" in detail and "batches are skipped" not in detail and "loop" in detail
        steps = guard.recording.steps
        assert steps["status"].tolist() == [int(n == 6) for n in range(12)] and steps["batch"].tolist() == [*range(12)]

    def test_skipped(self):
        guard = acting("rollback")
        train(guard, 0, build=_damaged)
        reason = "there is no verified snapshot to restore"
        assert outcomes(guard, "rollback")[0][1:] == ("skipped", reason)


def _linear():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def _damaged():
    model = zoo.plain(run_eagerly=True)
    corrupt(model.layers[0].kernel)
    return model


SCHEDULES = {
    "CosineDecay": lambda: schedules.CosineDecay(0.5, 20),
    "CosineDecayRestarts": lambda: schedules.CosineDecayRestarts(0.5, 5),
    "ExponentialDecay": lambda: schedules.ExponentialDecay(0.5, 3, 0.7),
    "InverseTimeDecay": lambda: schedules.InverseTimeDecay(0.5, 3, 0.7),
    "PiecewiseConstantDecay": lambda: schedules.PiecewiseConstantDecay([3, 6], [0.5, 0.3, 0.1]),
    "PolynomialDecay": lambda: schedules.PolynomialDecay(0.5, 20, power=2.0),
}


def expected_walk(rates, bad, factor, batches=12):
    """Return the change in each step if each bad step multiplies all later rates by the factor."""
    reported, iteration, now = [], 0, 1.0
    for step in range(batches):
        if step in bad:
            reported.append(0.0)
            now *= factor
        else:
            reported.append(float(rates(iteration)) * now)
            iteration += 1
    return reported


class TestLowerLr:

    @pytest.mark.daily("CosineDecay", "PiecewiseConstantDecay")
    @pytest.mark.parametrize("name", SCHEDULES)
    def test_schedule(self, name):
        """The rate is that of the schedule times the factor; the saved config is the schedule's."""
        model = line(keras.optimizers.SGD(SCHEDULES[name]()))
        config = keras.optimizers.serialize(model.optimizer)
        during = []
        look = At(s11=lambda m: during.append(keras.optimizers.serialize(m.optimizer)))
        guard = acting({"lower_lr": {"factor": 0.25}})
        steps = walk(model, guard, 4, 7, callbacks=[look])
        np.testing.assert_allclose(steps, expected_walk(SCHEDULES[name](), (4, 7), 0.25), atol=1e-5)
        assert during == [config] and keras.optimizers.serialize(model.optimizer) == config
        assert config["config"]["learning_rate"]["class_name"] == name
        assert "_get_current_learning_rate" not in vars(model.optimizer)

    @pytest.mark.parametrize("kind", ["plain", "callable", "scaled", "xla", "steps4", "eager"])
    def test_rate(self, kind):
        """A plain rate, a callable and that of a LossScaleOptimizer, in every mode."""
        optimizer = {
            "callable": lambda: keras.optimizers.SGD(lambda: 0.5),
            "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(SCHEDULES["CosineDecay"]())),
        }.get(kind, lambda: keras.optimizers.SGD(0.5))()
        rates = SCHEDULES["CosineDecay"]() if kind == "scaled" else lambda step: 0.5
        mode = zoo.MODES.get(kind, {})
        zoo.supported(mode)
        guard = acting({"lower_lr": {"factor": 0.25}})
        steps = walk(line(optimizer, **mode), guard, 4, 7)
        wanted = expected_walk(rates, (4, 7), 0.25)
        if kind == "steps4":  # the host looks after each four steps
            steps, wanted = steps[-1:], [4 * 0.5 * 0.25**2]
        np.testing.assert_allclose(steps, wanted, atol=1e-5)

    @pytest.mark.requires_backend("tensorflow", reason="its train step has a GradientTape")
    def test_two_optimizers(self):
        model = _Pair()
        model.compile()
        x = np.ones((8, 1), "float32")
        x[3] = np.nan
        guard = acting({"lower_lr": {"factor": 0.1}})
        model.fit(x, x, batch_size=1, shuffle=False, verbose=0, callbacks=[guard])
        assert float(model.one.learning_rate.numpy()) == pytest.approx(0.01)
        factors = [change.factor for change in guard.session.guard_state.rates]  # the unused one, too
        assert factors == pytest.approx([0.1] * 3)
        assert "0.1 -> 0.01" in outcomes(guard, "lower_lr")[0][2] and "0.2 -> 0.02" in outcomes(guard, "lower_lr")[0][2]

    @pytest.mark.requires_backend("tensorflow", "torch", reason="its step updates within `train_step(data)`")
    def test_a_second_schedule_that_cannot_be_read(self):
        """Then no rate is lowered, and the action is skipped with the reason."""
        inside = []

        class InStep(schedules.LearningRateSchedule):
            def __call__(self, step):
                if not inside:
                    raise RuntimeError("outside of a step")
                return 0.25

        class Two(keras.Sequential):
            def train_step(self, data):
                inside.append(1)
                loss = super().train_step(data)
                self.second.apply([ops.ones((1, 1))], self.trainable_variables)
                inside.clear()
                return loss

        model = Two([keras.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.second = keras.optimizers.SGD(InStep())
        model.compile(keras.optimizers.SGD(0.5), loss=lambda y, p: ops.mean(p), run_eagerly=True)
        guard = acting("lower_lr")
        walk(model, guard, 4)
        ((step, status, reason),) = outcomes(guard, "lower_lr")
        assert (step, status) == (4, "skipped") and "outside of a step" in reason
        assert float(model.optimizer.learning_rate.numpy()) == 0.5

    def test_min_lr(self):
        """A rate never falls below min_lr, a lower one stays, and no effect means skipped."""
        guard = acting({"lower_lr": {"factor": 0.1, "min_lr": 0.2}})
        steps = walk(line(keras.optimizers.SGD(0.5), run_eagerly=True), guard, 2, 4)
        assert steps[3] == pytest.approx(0.2) and steps[-1] == pytest.approx(0.2)
        assert [o[1] for o in outcomes(guard, "lower_lr")] == ["done", "skipped"]
        guard = acting({"lower_lr": {"factor": 0.1, "min_lr": 0.7}})
        assert walk(line(keras.optimizers.SGD(0.5), run_eagerly=True), guard, 2)[-1] == pytest.approx(0.5)

    def test_no_step_in_between(self):
        """If no step has committed at a rate, a lower one has the same result."""
        guard = acting({"lower_lr": {"factor": 0.5}})
        walk(line(keras.optimizers.SGD(0.5), run_eagerly=True), guard, 0, 2, 3, 5)
        assert outcomes(guard, "lower_lr") == [
            (0, "skipped", "no step has committed yet, so a lower rate has no effect"),
            (2, "done", "learning rate 0.5 -> 0.25"),
            (3, "skipped", "no step has committed since it was lowered, so a lower rate has no effect"),
            (5, "done", "learning rate 0.25 -> 0.125"),
        ]

    def test_rate_at_which_the_update_overflows(self):
        """A step whose update overflows used its rate: the rate is lowered until a step commits."""
        guard = acting("rollback", {"lower_lr": {"factor": 1e-3}})
        model = line("sgd")
        model.compile(keras.optimizers.SGD(1e35), loss=lambda y, p: 1e10 * ops.mean(ops.tanh(p)))
        walk(model, guard, batches=6)
        assert [status for _, status, _ in outcomes(guard, "lower_lr")] == ["done"] * 3
        assert np.isfinite(model.get_weights()).all() and guard.session.run.counts.committed == 3

    @pytest.mark.parametrize("rate", ["plain", "schedule"])
    def test_recovery(self, rate):
        """After enough good steps the rate returns to exactly its original value."""
        optimizer = keras.optimizers.SGD(0.5 if rate == "plain" else schedules.PolynomialDecay(0.5, 1000, 0.5))
        guard = acting({"lower_lr": {"factor": 0.01, "recover_after": 3}})
        steps = walk(line(optimizer), guard, 2, 4, batches=14)
        np.testing.assert_allclose(steps[3], 0.005, atol=1e-6)
        np.testing.assert_allclose(steps[5:8], 0.5e-4, atol=1e-6, err_msg="lowered twice, for 3 good steps")
        np.testing.assert_allclose(steps[8:], 0.5, rtol=1e-6)
        assert not guard.session.run.recovery.active

    def test_reduce_lr_on_plateau(self):
        """ReduceLROnPlateau continues from the lowered rate, and both factors apply."""
        guard = acting({"lower_lr": {"factor": 0.1}})
        plateau = keras.callbacks.ReduceLROnPlateau("flat", mode="min", factor=0.5, patience=1, min_delta=1e9)
        model = line(keras.optimizers.SGD(0.8), run_eagerly=True)
        feed = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(flat=1.0))
        steps = walk(model, guard, 1, batches=3, epochs=4, callbacks=[feed, plateau])
        assert [steps[i] for i in (2, 5, 8, 11)] == pytest.approx([0.08, 0.008, 0.004 * 0.1, 0.002 * 0.01], rel=1e-3)

    def test_learning_rate_scheduler(self):
        """A scheduler computes the rate from the epoch: all factors so far apply in each epoch."""
        guard = acting({"lower_lr": {"factor": 0.1}}, times=6)
        plan = [0.8, 0.8, 0.2, 0.1, 0.4]
        scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: plan[epoch])
        model = line(keras.optimizers.SGD(0.8), run_eagerly=True)
        steps = walk(model, guard, 1, batches=3, epochs=5, callbacks=[scheduler])
        assert [steps[i] for i in (2, 5, 8, 11, 14)] == pytest.approx([0.08, 0.008, 0.2e-3, 1e-5, 0.4e-5], rel=1e-3)

    @pytest.mark.parametrize("sets", ["plateau", "scheduler", "same", "by hand"])
    def test_rate_of_another_callback(self, sets):
        """Never exceeded, also not when the old rate returns; `same` meets the lowered rate."""
        told = []  # the rates that the callback has set

        class Told:
            def on_epoch_begin(self, epoch, logs=None):
                super().on_epoch_begin(epoch, logs)
                told.append(float(self.model.optimizer.learning_rate.numpy()))

        class Plateau(Told, keras.callbacks.ReduceLROnPlateau):
            """Reduces the rate at the end of an epoch."""

            def on_epoch_end(self, epoch, logs=None):
                super().on_epoch_end(epoch, {"flat": 1.0})

        class Scheduler(Told, keras.callbacks.LearningRateScheduler):
            """Sets the rate of each epoch."""

        class ByHand(Told, keras.callbacks.Callback):
            """Assigns a rate once."""

            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 1:
                    self.model.optimizer.learning_rate.assign(0.05)
                super().on_epoch_begin(epoch, logs)

        step = 0.08 if sets == "same" else 0.2
        callback = {
            "plateau": lambda: Plateau("flat", mode="min", factor=0.5, patience=1, min_delta=1e9),
            "by hand": ByHand,
        }.get(sets, lambda: Scheduler(lambda epoch, rate: step if epoch else 0.8))()
        guard = acting({"lower_lr": {"factor": 0.1, "recover_after": 8}})
        x = np.ones((1, 1), "float32")

        def data():
            for number in range(36):
                yield (x * np.nan if number == 1 else x), x

        model, weights = line(keras.optimizers.SGD(0.8), run_eagerly=True), Weights()
        model.fit(data(), steps_per_epoch=4, epochs=9, verbose=0, callbacks=[callback, guard, weights])
        assert weights.steps[2:4] == pytest.approx([0.08, 0.08], rel=1e-5), "lowered"
        used = np.reshape(weights.steps, (9, 4))
        first = 2 if sets == "plateau" else 1  # the epoch in which the callback has set its first rate
        assert (used[first:] <= np.array(told)[first:, None] + 1e-6).all(), (used, told)
        assert used[-1, -1] == pytest.approx(told[-1], abs=1e-6), "the rate of the callback at the end"

    def test_a_rate_that_returns_in_the_next_fit_is_the_first_one(self):
        """Exactly, although the lowered one differs a little from that of the factor."""
        guard, x = acting({"lower_lr": {"factor": 0.1, "recover_after": 6}}), np.ones((4, 1), "float32")
        model = line(keras.optimizers.SGD(0.8), run_eagerly=True)
        before = float(model.optimizer.learning_rate.numpy())
        spoiled = x.copy()
        spoiled[1] = np.nan
        model.fit(spoiled, x, batch_size=1, shuffle=False, verbose=0, callbacks=[guard])
        assert float(model.optimizer.learning_rate.numpy()) < 0.1
        model.fit(np.repeat(x, 5, axis=0), np.repeat(x, 5, axis=0), batch_size=1, verbose=0, callbacks=[guard])
        assert float(model.optimizer.learning_rate.numpy()) == before

    @pytest.mark.daily("optimizer-schedule")
    @pytest.mark.parametrize("kind", ["schedule", "plain"])
    @pytest.mark.parametrize("chosen", ["optimizer", "rate", "nothing"])
    def test_a_new_choice_for_the_next_fit(self, chosen, kind):
        """Another optimizer or rate is not lowered; one optimizer stays clipped, another is not."""
        rate = float if kind == "plain" else (lambda value: schedules.PolynomialDecay(value, 1000, value))
        guard = acting({"lower_lr": {"factor": 0.1, "recover_after": 0}}, {"clip": {"global_clipnorm": 0.5}})
        model = line(keras.optimizers.SGD(rate(0.5)))
        assert walk(model, guard, 3)[-1] == pytest.approx(0.025, rel=1e-3)
        if chosen == "optimizer":
            model.compile(keras.optimizers.SGD(rate(0.25)), model.loss)
        elif chosen == "rate":
            model.optimizer.learning_rate = rate(0.25)
        wanted = {"optimizer": 0.25, "rate": 0.125, "nothing": 0.025}[chosen]
        np.testing.assert_allclose(walk(model, guard), wanted, rtol=1e-3)
        assert (guard.session.run.recovery.lowering.at is None) == (chosen != "nothing")

    def test_saved_model(self, tmp_path):
        """Saved while the rate is lowered, it loads without this library, with its own schedule."""
        model = line(keras.optimizers.SGD(SCHEDULES["CosineDecay"]()))
        model.compile(keras.optimizers.SGD(SCHEDULES["CosineDecay"]()), "mse")
        walk(model, acting("lower_lr"), 4, callbacks=[At(s9=lambda m: m.save(tmp_path / "m.keras"))])
        loaded = keras.saving.load_model(tmp_path / "m.keras")
        assert isinstance(loaded.optimizer._learning_rate, schedules.CosineDecay)


class EachBatch(keras.callbacks.Callback):
    """Sets the rate before each batch, unaware of other changes."""

    seen = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.seen += 1
        self.model.optimizer.learning_rate = 3.0 * (1 - self.seen / 4000)


def test_rate_set_before_each_batch_of_a_run_that_diverges():
    """A fit with a lowered rate ends, even if another callback sets the rate in each batch."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, 8)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(16, activation="relu")
    model = keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(3.0), "mse")
    each, guard = EachBatch(), NanGuard(verbose=0, diagnose=False)
    model.fit(x, y, epochs=10, shuffle=False, verbose=0, callbacks=[each, guard])
    assert "done" in [status for _, status, _ in outcomes(guard, "lower_lr")]
    assert all(np.isfinite(w).all() for w in model.get_weights())


class _Pair(keras.Model):
    """Two weights with an optimizer each; `model.optimizer` is unused."""

    def __init__(self):
        super().__init__()
        self.left, self.right = layers.Dense(1), layers.Dense(1)
        self.one = keras.optimizers.SGD(0.1)
        self.other = keras.optimizers.SGD(schedules.ExponentialDecay(0.2, 1000, 0.999))

    def train_step(self, data):
        import tensorflow as tf

        x, _ = data
        with tf.GradientTape(persistent=True) as tape:
            losses = [ops.mean(self.left(x)), ops.mean(self.right(x))]
        for layer, optimizer, loss in zip((self.left, self.right), (self.one, self.other), losses):
            optimizer.apply(tape.gradient(loss, layer.trainable_weights), layer.trainable_weights)
        return {"loss": losses[0] + losses[1]}


class TestClip:
    @pytest.mark.parametrize(("given", "expected"), [({}, 0.5), ({"global_clipnorm": 0.2}, 0.1), ({"global_clipnorm": 9.0}, 0.5)])
    def test_done(self, given, expected):
        """Clipping starts, a larger norm is reduced, a small one tightened, as gradients show."""
        model = line(keras.optimizers.SGD(1.0, **given))
        guard = acting({"clip": {"global_clipnorm": 0.5, "factor": 0.5}}, times=1)
        assert walk(model, guard, 3)[-1] == pytest.approx(expected)
        assert outcomes(guard, "clip")[0][1] == "done"
        assert model.optimizer.global_clipnorm == given.get("global_clipnorm"), "the optimizer has its own setting back"

    def test_skipped(self):
        """If the optimizer clips in a way that Keras combines with none, nothing is changed."""
        model = line(keras.optimizers.SGD(1.0, clipnorm=2.0), run_eagerly=True)
        guard = acting("clip")
        assert walk(model, guard, 3)[-1] == pytest.approx(1.0)
        assert outcomes(guard, "clip")[0][1] == "skipped" and "clipnorm" in outcomes(guard, "clip")[0][2]

    def test_lowest(self):
        """The norm never falls below min_clipnorm, and the outcome states when this is reached."""
        guard = acting({"clip": {"global_clipnorm": 0.5, "factor": 0.5, "min_clipnorm": 0.3}})
        model = line(keras.optimizers.SGD(1.0), run_eagerly=True)
        assert walk(model, guard, 3, 5, 7)[-1] == pytest.approx(0.3)
        assert [o[1] for o in outcomes(guard, "clip")] == ["done", "done", "skipped"]

    def test_an_optimizer_that_raises(self):
        """The others get their setting back, as the step is not compiled with it."""
        first, odd, recovery = keras.optimizers.SGD(1.0, global_clipnorm=9.0), types.SimpleNamespace(name="odd"), Recovery()
        state = types.SimpleNamespace(optimizers=[first, odd])
        context = types.SimpleNamespace(run=types.SimpleNamespace(recovery=recovery, train_state=lambda: state))
        with pytest.raises(AttributeError):
            PERFORMERS["clip"](context, ACTIONS["clip"](global_clipnorm=0.5, factor=0.5, min_clipnorm=0.1))
        assert first.global_clipnorm == 9.0 and not recovery.changed


class TestFixLossScale:
    @pytest.mark.parametrize(("before", "after"), [(0.0, 4.0), (np.inf, 64.0), (np.nan, 64.0), (2.0**30, 64.0), (16.0, 16.0)])
    def test_bounds(self, before, after):
        """Any loss scale returns to the range between floor and ceiling, and stays there."""
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), dynamic_growth_steps=1)
        guard = acting("fix_loss_scale", tables={"loss_scale": {"floor": 4.0, "ceiling": 64.0}})
        scales = []
        look = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: scales.append(float(optimizer.dynamic_scale.numpy()))
        )

        def change(model):
            optimizer.dynamic_scale.assign(before)

        bad = () if not 0 < before < np.inf else (3,)
        model = line(optimizer, run_eagerly=True)
        walk(model, guard, *bad, callbacks=[look, At(s3=change)], batches=14)
        assert guard.incidents[0].step == 3 and outcomes(guard, "fix_loss_scale")[0][1] == "done"
        assert scales[3] == after or not 0 < before < np.inf
        assert all(4.0 <= scale <= 64.0 for scale in scales[3:])
        assert np.isfinite(model.get_weights()[0]).all()

    @pytest.mark.parametrize(("growth", "looks"), [(2000, 0), (3, 4)])
    def test_bounds_without_work_in_each_step(self, growth, looks):
        """The scale is looked at when it can have grown, and stays in its range after each batch."""
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), dynamic_growth_steps=growth)
        guard = acting({"fix_loss_scale": {"reset_to": 32.0}}, tables={"loss_scale": {"floor": 4.0, "ceiling": 64.0}})
        waits, scales = [], []

        def look(batch, logs):
            run = guard.session.run
            waits.append(run.due.step_of("changes") - run.step)
            scales.append(float(optimizer.dynamic_scale.numpy()))

        callback, model = keras.callbacks.LambdaCallback(on_train_batch_end=look), line(optimizer, run_eagerly=True)
        walk(model, guard, 3, callbacks=[callback], batches=16)
        assert [o[:2] for o in outcomes(guard, "fix_loss_scale")] == [(3, "done")]
        assert waits[3] == 1 and waits[4:].count(1) == looks
        assert all(4.0 <= scale <= 64.0 for scale in scales[3:]) and (scales[-1] == 64.0) == (growth == 3)
        walk(model, guard, callbacks=[callback], batches=16)  # the next fit continues so
        assert waits[17:].count(1) <= looks + 1 and all(4.0 <= scale <= 64.0 for scale in scales[16:])

    def test_a_scale_that_a_callback_sets(self):
        """It returns to the range within 50 steps, and is reported if a check sees it before."""
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
        guard = acting("fix_loss_scale", tables={"loss_scale": {"floor": 4.0, "ceiling": 64.0}})
        scales = []
        look = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: scales.append(float(optimizer.dynamic_scale.numpy()))
        )
        change = At(s20=lambda model: optimizer.dynamic_scale.assign(2.0**20))
        walk(line(optimizer, run_eagerly=True), guard, 3, callbacks=[look, change], batches=72)
        assert scales[3] == 64.0 and scales[70:] == [64.0, 64.0]

    def test_reset_and_growth(self):
        """It restarts from reset_to, and doubles after the given number of good steps."""
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), dynamic_growth_steps=2000)
        guard = acting({"fix_loss_scale": {"reset_to": 8.0, "growth_steps": 2}})
        walk(line(optimizer), guard, 3, batches=8)
        assert float(optimizer.dynamic_scale.numpy()) == 32.0
        assert optimizer.dynamic_growth_steps == 2000

    def test_growth_after_a_rollback(self):
        """A rollback restores more good steps than the scale now needs to double."""
        fix = {"action": {"fix_loss_scale": {"reset_to": 64.0, "growth_steps": 3}}, "ceiling": 1024.0}
        guard = NanGuard(verbose=0, diagnose=False, loss_scale=fix, snapshot={"every": 8, "verify_after": 1})
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=64.0, dynamic_growth_steps=2000)
        breaks = At(
            s10=lambda model: optimizer.dynamic_scale.assign(0.0),
            s14=lambda model: model.layers[0].kernel.assign([[np.nan]]),
        )
        walk(line(optimizer), guard, batches=28, callbacks=[breaks])
        done = [[o.action for o in i.outcomes if o.status == "done"] for i in guard.incidents]
        assert done == [["fix_loss_scale"], ["rollback"]] and "6 later steps replayed" in str(guard.incidents[1])
        assert float(optimizer.dynamic_scale.numpy()) == 1024.0, "it has doubled four times since"

    def test_a_later_fit_with_an_optimizer_without_a_loss_scale(self):
        """The changed setting is skipped: this optimizer does not have it."""
        model = line(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)))
        guard = acting({"fix_loss_scale": {"reset_to": 8.0, "growth_steps": 2}})
        walk(model, guard, 3)
        model.compile("sgd", loss=lambda y, p: ops.mean(p), auto_scale_loss=False)
        assert len(walk(model, guard)) == 12


class TestRepair:
    @pytest.mark.parametrize("source", ["last_good", "zeros", "ones", "initializer"])
    def test_sources(self, source):
        """Only bad entries are overwritten, in weights, statistics and slots, from each source."""
        seen = {}

        def damage(model):
            model.layers[1].moving_variance.assign(np.r_[np.nan, np.arange(2.0, 9.0)])
            kernel = model.layers[0].kernel.numpy()
            kernel[0, 0], seen["kernel"] = np.inf, kernel
            model.layers[0].kernel.assign(kernel)

        def look(model):
            seen["variance"], seen["now"] = model.layers[1].moving_variance.numpy(), model.layers[0].kernel.numpy()

        guard = acting({"repair": {"source": source}})
        run = train(guard, callbacks=[At(s5=damage, s6=look)])
        assert outcomes(guard, "repair")[0][:2] == (5, "done") and "2 entries" in outcomes(guard, "repair")[0][2]
        np.testing.assert_array_equal(seen["variance"][1:], np.arange(2.0, 9.0))
        good = np.isfinite(seen["kernel"])
        np.testing.assert_array_equal(seen["now"][good], seen["kernel"][good])
        wanted = {"zeros": 0.0, "ones": 1.0, "initializer": 1.0}.get(source)
        assert np.isfinite(seen["variance"][0]) if wanted is None else seen["variance"][0] == wanted
        assert zoo.bad_entries(run.model) == []

    def test_a_variable_whose_initializer_is_not_known(self):
        """The others are repaired, and it is named."""

        class Own(layers.Layer):
            def build(self, shape):
                self.table = self.add_weight(shape=(1,), initializer="ones", name="table")

            def call(self, x):
                return x * self.table

        def damage(model):
            for variable in model.trainable_variables:
                variable.assign(np.full(variable.shape, np.nan))

        model = keras.Sequential([keras.Input((1,)), layers.Dense(1, kernel_initializer="ones", name="dense"), Own(name="own")])
        model.compile("sgd", "mse")
        guard = acting({"repair": {"source": "initializer"}})
        x = np.ones((4, 1), "float32")
        model.fit(x, x, batch_size=1, shuffle=False, verbose=0, callbacks=[guard, At(s2=damage)])
        status, detail = outcomes(guard, "repair")[0][1:]
        own, dense = model.get_layer("own"), model.get_layer("dense")
        assert status == "done" and detail.startswith("2 entries") and detail.endswith(f"no value for {own.table.path}")
        assert np.isnan(own.table.numpy()).all() and dense.kernel.numpy() == 1.0 and dense.bias.numpy() == 0.0

    def test_before_the_first_step(self):
        """The repaired state is the snapshot of the start, to which a rollback can go."""
        model, kept = line("sgd"), []
        model.layers[0].kernel.assign([[np.nan]])
        guard = acting({"repair": {"source": "ones"}})
        walk(model, guard, batches=3, callbacks=[At(s1=lambda m: kept.append(guard.session.run.ring.start))])
        assert outcomes(guard, "repair")[0][:2] == (0, "done") and len(guard.incidents) == 1
        assert kept[0] is not None and kept[0].step == 0

    def test_slots(self):
        guard = acting({"repair": {"source": "initializer"}})
        run = train(guard, callbacks=[At(s5=lambda m: corrupt(m.optimizer.variables[2], "inf"))])
        assert guard.incidents and zoo.bad_entries(run.model) == []

    def test_skipped(self):
        """A source without a value: nothing is changed."""
        guard = acting("repair")
        train(guard, build=_damaged)
        assert outcomes(guard, "repair")[0][1] == "skipped"


class TestResetBatchnorm:
    @pytest.mark.parametrize("source", ["initial", "last_good"])
    def test_done(self, source):
        """Moving statistics return to initial values or the last good state, also nested."""
        seen = {}

        def look(name):
            return lambda m: seen.update({name: [v.numpy() for v in m.layers[0].layers[0].non_trainable_variables]})

        guard = acting({"reset_batchnorm": {"source": source}}, snapshot={"every": 4, "verify_after": 1})
        train(guard, 6, build=_nested, callbacks=[At(s0=look("first"), s4=look("kept"), s7=look("after"))])
        wanted = seen["first" if source == "initial" else "kept"]
        for one, other in zip(seen["after"], wanted):
            np.testing.assert_array_equal(one, other)


def _nested(**options):
    norm = layers.BatchNormalization(momentum=0.9, moving_variance_initializer=keras.initializers.Constant(3.0), **options)
    model = keras.Sequential([keras.Input((6,)), keras.Sequential([keras.Input((6,)), norm]), layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    return model


def reached(model):
    """Return a model whose variables have the current state: while JAX trains they are empty."""
    getattr(model, "jax_state_sync", lambda: None)()
    return model


def normalized(momentum=0.99, trainable=True, **options):
    norm = layers.BatchNormalization(momentum=momentum, trainable=trainable)
    model = keras.Sequential([keras.Input((6,)), norm, layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    return model


def moving(of, *later, momentum):
    """Return mean and variance of all rows of these batches, moved on by later ones."""
    found = [of.reshape(-1, 6).mean(0), of.reshape(-1, 6).var(0)]
    for batch in (batch for some in later for batch in some):
        new = batch.mean(0), batch.var(0)
        found = [momentum * old + (1 - momentum) * one for old, one in zip(found, new)]
    return found


class TestRecalibrateBatchnorm:
    @pytest.mark.parametrize("mode", ["eager", "graph", "steps4"])
    def test_from_the_last_good_batches(self, mode):
        """They are mean and variance of the rows of those batches, and no bad batch is one."""
        if zoo.BACKEND == "tensorflow" and mode == "steps4":
            pytest.skip("several steps in one compiled call remember no batch: see test_skipped")
        zoo.supported(zoo.MODES[mode], even=False)
        data = zoo.regression(batches=20)
        data.x[:] = data.x * 3.0 + 5.0
        zoo.poison(data, 6)
        zoo.poison(data, 9)
        guard, seen = acting({"recalibrate_batchnorm": {"batches": 4}}), {}

        def look(batch, logs):
            norm = reached(model).layers[0]
            seen[guard.session.run.step] = [v.numpy() for v in (norm.moving_mean, norm.moving_variance)]

        keras.utils.set_random_seed(0)
        model = normalized(**zoo.MODES[mode])
        callback = keras.callbacks.LambdaCallback(on_train_batch_end=look)
        model.fit(data.x, data.y, batch_size=8, shuffle=False, verbose=0, callbacks=[guard, callback])
        words = [o[1:] for o in outcomes(guard, "recalibrate_batchnorm")]
        each = "2 statistics re-estimated from the last {} good steps"
        assert words == [("done", each.format(4)), ("done", each.format(2))], "the first one replaced the state"
        rows = data.x.reshape(20, 8, 6).astype("float64")
        first = moving(rows[2:6], momentum=0.99)
        if mode == "steps4":  # seen after the execution
            first = moving(rows[2:6], rows[7:8], momentum=0.99)
        last = moving(rows[7:9], *([rows[10:12]] if mode == "steps4" else []), momentum=0.99)
        for step, wanted in ((8 if mode == "steps4" else 7, first), (12 if mode == "steps4" else 10, last)):
            for got, one in zip(seen[step], wanted):
                np.testing.assert_allclose(got, one, rtol=1e-4)
        assert zoo.bad_entries(model) == [] and guard.session.run.step == 20

    def test_after_a_validation(self):
        """The layer whose statistics lag is repaired, so later validations are good."""
        rule = {"name": "statistics", "site": "validation", "do": "recalibrate_batchnorm"}
        guard = NanGuard({"rules": [rule]}, verbose=0)
        keras.utils.set_random_seed(0)
        model, rng = normalized(momentum=0.9), np.random.default_rng(0)
        x = rng.standard_normal((96, 6)).astype("float32") + 5.0
        ruin = keras.callbacks.LambdaCallback(
            on_test_begin=lambda logs: len(guard.incidents) or reached(model).layers[0].moving_variance.assign([np.nan] * 6)
        )
        history = model.fit(
            x, x[:, :1], batch_size=8, epochs=2, validation_data=(x, x[:, :1]), verbose=0, callbacks=[guard, ruin]
        ).history
        assert np.isfinite(history["val_loss"]).tolist() == [False, True]
        assert outcomes(guard, "recalibrate_batchnorm")[0][1] == "done"

    @pytest.mark.parametrize(
        ("bad", "options", "reason"),
        [
            (0, {}, "no batch is in memory"),
            (3, {"batch_size": 1}, "two values per channel or more"),
            (3, {"trainable": False}, "no BatchNormalization that learns its statistics"),
        ],
    )
    def test_reasons(self, bad, options, reason):
        """It is skipped, and the statistics stay as they are, without a trace of the attempt."""
        size = options.get("batch_size", 8)
        keras.utils.set_random_seed(0)
        model, rng = normalized(trainable=options.get("trainable", True)), np.random.default_rng(0)
        x = rng.standard_normal((size * 6, 6)).astype("float32")
        x[bad * size] = np.nan
        kept, guard = [], acting({"recalibrate_batchnorm": {"batches": 1}})

        def look(batch, logs):
            kept.append([v.numpy() for v in reached(model).layers[0].non_trainable_variables])

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=look)
        first = [v.numpy() for v in model.layers[0].non_trainable_variables]
        model.fit(x, x[:, :1], batch_size=size, shuffle=False, verbose=0, callbacks=[guard, callback])
        ((step, status, words),) = outcomes(guard, "recalibrate_batchnorm")
        assert (step, status) == (bad, "skipped") and reason in words
        for now, before in zip(kept[bad], kept[bad - 1] if bad else first):
            np.testing.assert_array_equal(now, before)

    def test_a_loop_whose_arguments_are_no_batch(self):
        """The first argument is not what the model takes: the reason names its error."""
        model, guard = normalized(), acting("recalibrate_batchnorm")
        x = np.ones((4, 8, 6), "float32") * np.arange(8)[:, None]
        x[3, 0] = np.nan
        if zoo.BACKEND == "jax":
            pytest.skip("there a step receives the state")
        with guard.watch(model):
            step = guard.step(lambda batch: model.train_step((keras.ops.convert_to_tensor(batch["x"]),) * 2)["loss"])
            for rows in x:
                step({"x": rows})
        ((_, status, words),) = outcomes(guard, "recalibrate_batchnorm")
        assert status == "skipped" and words.startswith("the model cannot run on the arguments of a step: ")
        assert np.isfinite(model.layers[0].moving_mean.numpy()).all()

    @pytest.mark.requires_backend("jax", "torch", reason="TensorFlow has no such names")
    @pytest.mark.parametrize("names", [["norm[1]"], ["norm[1]", "norm"]])
    def test_a_name_that_reads_as_a_pattern(self, names):
        """Its own layer is re-estimated, not those that the pattern matches."""
        norms = [layers.BatchNormalization(name=name) for name in names]
        model = keras.Sequential([keras.Input((6,)), *norms, layers.Dense(1)])
        model.compile("sgd", "mse")
        x = np.random.default_rng(0).standard_normal((48, 6)).astype("float32") * 3.0 + 5.0
        x[40:] = np.nan
        guard = acting({"recalibrate_batchnorm": {"batches": 4}})
        model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0, callbacks=[guard])
        each = f"{2 * len(names)} statistics re-estimated from the last 4 good steps"
        assert [o[1:] for o in outcomes(guard, "recalibrate_batchnorm")] == [("done", each)]
        np.testing.assert_allclose(norms[0].moving_mean.numpy(), x[8:40].mean(0), rtol=1e-4)

    def test_skipped(self):
        """Frozen layers keep their statistics: nothing to estimate, nothing reset."""
        guard = acting("recalibrate_batchnorm")
        run = train(guard, 3, build=lambda: _nested(trainable=False))
        assert outcomes(guard, "recalibrate_batchnorm")[0][1] == "skipped"
        np.testing.assert_array_equal(run.model.layers[0].layers[0].moving_variance.numpy(), 3.0)


class TestResetSlots:
    def test_all(self):
        """Momentum is zero, averages of the weights are the weights, step counts stay."""
        optimizer = keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=None)
        seen = {}

        def look(model):
            seen.update({v.path: v.numpy() for v in [*optimizer.variables, *model.trainable_variables]})

        guard = acting({"reset_slots": {"scope": "all"}})
        train(guard, 5, build=lambda: zoo.plain(optimizer, run_eagerly=True), callbacks=[At(s6=look)])
        assert outcomes(guard, "reset_slots")[0][1] == "done"
        assert seen["adam/iteration"] == 5
        for path, value in seen.items():
            if path.endswith(("momentum", "velocity")):
                assert not value.any(), path
        average = next(value for path, value in seen.items() if "average" in path)
        np.testing.assert_array_equal(average, next(v for path, v in seen.items() if path.endswith("dense/kernel")))

    def test_bad(self):
        guard = acting({"reset_slots": {"scope": "bad"}}, {"repair": {"source": "last_good"}})
        run = train(guard, callbacks=[At(s5=lambda m: corrupt(m.optimizer.variables[3], "inf"))])
        assert "1 slot reset" in outcomes(guard, "reset_slots")[0][2]
        assert zoo.bad_entries(run.model) == []


def diverging(rate, *callbacks, steps=40):
    """Return a model after a fit with SGD at this rate, and its data."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).standard_normal((8 * 40, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    hidden = [layers.Dense(16, "relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((4,)), *hidden, layers.Dense(1)])
    model.compile(keras.optimizers.SGD(rate), "mse")
    data = {"batch_size": 8, "shuffle": False, "verbose": 0}
    with contextlib.suppress(NonFiniteError):
        if steps:
            model.fit(x[: 8 * steps], y[: 8 * steps], callbacks=callbacks, **data)
    return model, x, y


class TestStop:
    def test_restored(self):
        """Damaged by other code: training stops with the last good state, and all good steps."""
        kept, guard = {}, acting("stop", snapshot={"every": 4, "verify_after": 1})
        train(acting("stop"), callbacks=[At(s7=lambda m: kept.update(k=m.layers[0].kernel.numpy()))])
        run = train(guard, callbacks=[At(s6=lambda m: corrupt(m.layers[0].kernel))])
        assert run.model.stop_training and guard.session.run.step == 7
        assert "the state after 4 steps restored, and 3 later steps replayed" in outcomes(guard, "stop")[0][2]
        np.testing.assert_allclose(run.model.layers[0].kernel.numpy(), kept["k"], rtol=0 if zoo.BACKEND == "tensorflow" else 1e-5)

    def test_not_restored(self, monkeypatch, capsys):
        """The line has the whole error, and not what follows it."""

        def fails(*args):
            raise RuntimeError("no memory; try again")

        monkeypatch.setattr("keras_nanguard._fit.rollback.restore", fails)
        monkeypatch.setattr("keras_nanguard._report.console.WIDTH", 400)
        guard = acting("lower_lr", "stop")
        guard.verbose = 1
        train(guard, callbacks=[At(s6=lambda m: corrupt(m.layers[0].kernel))])
        assert "try again; the learning rate of adam is reset to" in outcomes(guard, "stop")[0][2]
        assert "; the state after 4 steps not restored: RuntimeError: no memory; try again." in capsys.readouterr().out

    def test_left(self):
        """Without `restore` nothing changes; after a refused step there is nothing to restore."""
        guard = acting({"stop": {"restore": False}})
        run = train(guard, callbacks=[At(s6=lambda m: corrupt(m.layers[0].kernel))])
        assert zoo.bad_entries(run.model) != []
        guard = NanGuard({"escalation": [{"stop": {"restore": False}}]}, verbose=0)
        model, *_ = diverging(1e10, guard)
        assert "no state is restored" in outcomes(guard, "stop")[0][2]
        assert max(np.abs(w).max() for w in model.get_weights()) > 1e6
        guard = acting("stop")
        run = train(guard, 6)
        assert "still has the last good state" in outcomes(guard, "stop")[0][2]
        assert int(run.model.optimizer.iterations.numpy()) == 6

    @pytest.mark.parametrize("ending", ["stop", "raise"])
    def test_diverged(self, ending, tmp_path, capsys):
        """Ends with plain Keras' weights of before the rate became too high; also a checkpoint."""
        rate = lambda: schedules.PiecewiseConstantDecay([29], [0.01, 50.0])  # noqa: E731
        plain, x, y = diverging(rate(), steps=30)
        guard = NanGuard(ending, verbose=1, snapshot={"every": 10, "verify_after": 2})
        saved = keras.callbacks.ModelCheckpoint(str(tmp_path / "last.keras"))
        model, *_ = diverging(rate(), guard, saved)
        ((_, status, words),) = outcomes(guard, "stop" if ending == "stop" else "raise_error")
        assert "divergence" in guard.incidents[-1].causes and status == "done"
        assert "the state after 30 steps restored" in words
        assert "; the state after 30 steps restored." in capsys.readouterr().out
        for got, expected in zip(model.get_weights(), plain.get_weights()):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
        assert int(model.optimizer.iterations.numpy()) == 30
        if ending == "stop":
            again = keras.saving.load_model(tmp_path / "last.keras")
            assert again.evaluate(x, y, verbose=0) == pytest.approx(plain.evaluate(x, y, verbose=0), rel=1e-4)

    def test_diverged_at_once(self):
        """If no allowed rate can heal, the first state returns, even if a later one was taken."""
        start, *_ = diverging(1e10, steps=0)
        for every in (100, 1):
            guard = NanGuard(verbose=0, snapshot={"every": every, "verify_after": 2}, action_budget=2)
            model, *_ = diverging(1e10, guard)
            assert guard.incidents[-1].decision.rule == "action_budget"
            assert "the state before the first step restored" in outcomes(guard, "stop")[0][2]
            for got, expected in zip(model.get_weights(), start.get_weights()):
                np.testing.assert_array_equal(got, expected)

    def test_diverged_within_one_batch(self):
        """Numbers that overflow within a single step leave a good state, and no step is undone."""
        keras.utils.set_random_seed(0)
        unit = layers.SimpleRNN(1, None, recurrent_initializer=keras.initializers.Constant(1.5))
        model = keras.Sequential([keras.Input((None, 1)), unit])
        model.compile(keras.optimizers.SGD(1e-5), "mse")
        lengths = [300 if step == 9 else 3 + step % 2 for step in range(12)]
        batches = [(np.ones((4, length, 1), "float32"), np.ones((4, 1), "float32")) for length in lengths]
        guard = NanGuard("stop", verbose=0, snapshot={"every": 4, "verify_after": 1})
        model.fit((batch for batch in batches), steps_per_epoch=12, shuffle=False, verbose=0, callbacks=[guard])
        assert [i.diagnosis.cause for i in guard.incidents] == ["divergence"]
        assert "still has the last good state" in outcomes(guard, "stop")[0][2]
        assert int(model.optimizer.iterations.numpy()) == 9

    @pytest.mark.parametrize("ending", ["stop", "raise_error"])
    @pytest.mark.parametrize("kind", ["plain", "schedule"])
    def test_rate_given_back(self, ending, kind):
        """At the end the rate is restored; without `restore` it stays; the outcome says which."""
        for restore, words in ((True, "is reset to 0.5 (from 0.05)"), (False, "stays at 0.05, 0.1 times the configured rate")):
            policy = {"rules": [{"name": "slow", "do": "lower_lr"}], "action_budget": 1}
            policy["escalation"] = [{ending: {"restore": restore}}]
            guard = NanGuard(policy, verbose=0, diagnose=False)
            rate = 0.5 if kind == "plain" else schedules.PolynomialDecay(0.5, 1000, 0.5)
            model = line(keras.optimizers.SGD(rate))
            x = np.ones((8, 1), "float32")
            x[[2, 5]] = np.nan
            with contextlib.suppress(NonFiniteError):
                model.fit(x, x, batch_size=1, shuffle=False, verbose=0, callbacks=[guard])
            assert [step for step, status, _ in outcomes(guard, "lower_lr") if status == "done"] == [2]
            ((step, _, detail),) = outcomes(guard, ending)
            assert step == 5 and detail.endswith(f"the learning rate of {model.optimizer.name} {words}")
            factor = guard.session.guard_state.rates[0].factor
            assert factor == pytest.approx(1.0 if restore else 0.1)
            if kind == "plain":
                assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(0.5 * factor)
            assert bool(guard.session.run.recovery.lowering.recover_after) == (not restore)


class TestRaiseError:
    def test_done(self):
        """The exception has the whole incident, and the model is good and unguarded."""
        model = zoo.plain(run_eagerly=True)
        guard = acting("raise_error")
        with pytest.raises(NonFiniteError, match="step 7") as caught:
            train(guard, 6, build=lambda: model)
        incident = caught.value.incident
        assert incident.step == 6 and incident.outcomes[-1].status == "done"
        assert zoo.bad_entries(model) == [] and "train_step" not in vars(model)


class TestCall:
    def test_done(self):
        """The function receives the incident; its result is reported."""
        seen = []
        guard = acting({"call": {"function": "page"}}, functions={"page": lambda incident: seen.append(incident) or "paged"})
        train(guard, 3)
        assert [i.step for i in seen] == [3] and outcomes(guard, "call") == [(3, "done", "paged")]
