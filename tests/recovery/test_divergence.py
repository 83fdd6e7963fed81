"""A run at a rate that is too high ends as one that had the right rate from the beginning."""

from __future__ import annotations

import re
from dataclasses import replace

import keras
import numpy as np
import pytest
from keras import layers, optimizers
from sklearn.datasets import load_digits
from support import zoo

from keras_nanguard import NanGuard
from keras_nanguard._diagnose.explain_step import Explainer
from keras_nanguard._keras import optimizers as keras_optimizers

EPOCHS, BATCH = 4, 32
DIGITS = load_digits()
X, Y = (DIGITS.data[:1280] / 16).astype("float32"), DIGITS.target[:1280]
"""160 steps in all."""


def mlp(optimizer, activation="relu", dtype="float32"):
    def build():
        hidden = [layers.Dense(64, activation, dtype=dtype) for _ in range(2)]
        model = keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10, dtype=dtype)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"])
        return model

    return build


def unscaled(optimizer):
    def build():
        model = keras.Sequential([keras.Input((64,)), layers.Dense(32, "relu"), layers.Dense(1)])
        model.compile(optimizer(), "mse")
        return model

    return build


def fit(build, guard=None, y=Y, callbacks=(), epochs=EPOCHS, seed=0, **options):
    keras.utils.set_random_seed(seed)
    model = build()
    guards = [guard] if guard is not None else []
    history = model.fit(X, y, batch_size=BATCH, epochs=epochs, verbose=0, callbacks=[*guards, *callbacks], **options).history
    return model, history


def values(model):
    return [keras.ops.convert_to_numpy(v) for v in (*model.variables, *model.optimizer.variables)]


def same(model, other):
    """Whether two models hold the same state: bit for bit on TensorFlow, up to the order of additions elsewhere."""
    exact = zoo.BACKEND == "tensorflow"
    for one, two in zip(values(model), values(other)):
        np.testing.assert_allclose(one, two, rtol=0 if exact else 1e-3, atol=0 if exact else 1e-5)


def changes(guard):
    return [[o.action for o in i.outcomes if o.status == "done" and o.action != "warn"] for i in guard.incidents if i.changes]


def accuracy(model):
    return model.evaluate(X, Y, batch_size=256, verbose=0, return_dict=True)["accuracy"]


def momentum(rate):
    return lambda: optimizers.SGD(rate, momentum=0.9)


def adam(rate):
    return lambda: optimizers.Adam(rate)


class TestBroughtHome:
    """Stock Keras fails at the rate; the guarded run ends with the bits of the run at the lower rate that the guard has found."""

    @pytest.mark.parametrize(
        ("build", "rate", "y"),
        [
            pytest.param(lambda rate: mlp(adam(rate)), 3.0, Y, id="Adam"),
            pytest.param(lambda rate: mlp(lambda: optimizers.RMSprop(rate)), 1.0, Y, id="RMSprop"),
            pytest.param(lambda rate: unscaled(momentum(rate)), 1.0, Y * 100.0 + 1000.0, id="overflow on unscaled targets"),
        ],
    )
    def test_as_if_begun_so(self, build, rate, y):
        guard = NanGuard(verbose=0)
        stock, _ = fit(build(rate), y=y)
        model, guarded = fit(build(rate), guard, y=y)
        found = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
        best, history = fit(build(found), y=y)
        assert changes(guard) == [["rollback", "lower_lr"]] and found <= 0.011 * rate
        refused = sum(i.refused for i in guard.incidents)
        more = f" refused, {refused} refused at first and run again after a rollback" if refused else " refused, "
        assert more in guard.summary() and guard.session.counts.run_again == refused
        assert any(not np.allclose(one, two) for one, two in zip(values(stock), values(best)))
        same(model, best)
        assert guarded["loss"] == pytest.approx(history["loss"], rel=1e-3), "epochs show the steps that count, not those undone"
        assert guard.incidents[-1].diagnosis.cause == "divergence"
        advised = next(re.search(r"try (\S+)\)", text) for text in guard.incidents[-1].diagnosis.advice if "try" in text)
        assert float(advised[1]) == pytest.approx(found, rel=0.5), "the advice names the rate that was found"

    def test_a_refusal_on_the_way_that_is_explained_otherwise(self, monkeypatch):
        """With finite data no batch is left out of the steps that are run again, whatever cause one of the refused steps is given."""
        explain, refused = Explainer.__call__, []

        def otherwise(self, run, incident, report):
            diagnosis = explain(self, run, incident, report)
            if incident.refused:
                refused.append(incident.step)
            return diagnosis if len(refused) != 2 or diagnosis is None else replace(diagnosis, cause="input_scale")

        monkeypatch.setattr(Explainer, "__call__", otherwise)
        guard, y = NanGuard(verbose=0), Y * 100.0 + 1000.0
        model, _ = fit(unscaled(lambda: optimizers.SGD(10.0)), guard, y=y)
        assert [i.diagnosis.cause for i in guard.incidents if i.refused][:3] == ["divergence", "input_scale", "divergence"]
        rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
        best, _ = fit(unscaled(lambda: optimizers.SGD(rate)), y=y)
        same(model, best)

    def test_a_warmup_is_scaled_as_a_whole(self):
        """The run ends as one whose whole schedule was lower, and not as one that rises to a limit at once."""
        schedule = lambda peak: optimizers.schedules.CosineDecay(peak / 100, 300, warmup_target=peak, warmup_steps=60)  # noqa: E731
        guard = NanGuard(verbose=0)
        model, _ = fit(mlp(adam(schedule(1.0))), guard, epochs=8)
        stock, _ = fit(mlp(adam(schedule(1.0))), epochs=8)
        right, _ = fit(mlp(adam(schedule(0.1))), epochs=8)
        assert accuracy(stock) < 0.5 and accuracy(model) > max(accuracy(right), 0.9) - 0.02
        first = next(o.detail for i in guard.incidents for o in i.outcomes if o.action == "lower_lr")
        assert "at most" not in first

    def test_finite_to_the_end(self):
        """A loss that has settled high beside kernels that have grown, with not one number that is not finite."""
        posed = mlp(momentum(3.0))
        stock, history = fit(posed, epochs=8)
        assert np.isfinite(history["loss"]).all() and accuracy(stock) < 0.3
        guard = NanGuard(verbose=0)
        model, _ = fit(posed, guard, epochs=8)
        assert accuracy(model) > 0.95
        first = guard.incidents[0]
        assert not first.refused and first.findings[0].kind == "divergence"
        assert first.values["onset"] < 10 <= first.step
        assert "rollback: back to the state before the first step" in str(first) and "Onset at step" in str(first)
        assert any("The loss has settled at" in text for text in first.diagnosis.evidence)

    def test_onset_late(self):
        """A schedule that rises too far: back to before it rose, and never above a safe part of where it diverged."""
        schedule = optimizers.schedules.PiecewiseConstantDecay([120, 150], [0.03, 1.0, 5.0])
        posed = mlp(lambda: optimizers.SGD(schedule, momentum=0.9))
        stock, _ = fit(posed, epochs=8)
        assert accuracy(stock) < 0.5
        guard, seen = NanGuard(verbose=0), []

        class Rates(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if guard.incidents:
                    seen.append(keras_optimizers.learning_rate(self.model.optimizer))

        model, _ = fit(posed, guard, callbacks=[] if zoo.BACKEND == "jax" else [Rates()], epochs=8)
        changed = [i for i in guard.incidents if i.changes]
        assert 0 < len(changed) <= 2 and changed[0].values["onset"] >= 99 and "at most 0.5 from here on" in str(changed[0])
        assert accuracy(model) > 0.95
        assert not seen or max(seen) <= 0.51

    @pytest.mark.requires_backend("tensorflow", reason="how slowly it diverges depends on the last bits")
    def test_a_slow_divergence_does_not_begin_anew(self):
        """A rate that rises for hundreds of steps: back to where the loss was lowest, and not to the state before the first step."""
        schedule = optimizers.schedules.ExponentialDecay(0.01, 80, 2.0)
        guard = NanGuard(verbose=0)
        _model, history = fit(mlp(lambda: optimizers.SGD(schedule, momentum=0.9)), guard, epochs=24)
        rolled = [o.detail for i in guard.incidents for o in i.outcomes if o.action == "rollback" and o.status == "done"]
        assert rolled and not any("before the first step" in detail for detail in rolled)
        assert history["accuracy"][-1] > 0.99

    @pytest.mark.parametrize("every", [100, 250])
    def test_the_epochs_show_the_steps_that_count(self, every):
        """Where the steps since a snapshot are run again, the epoch that runs shows what these come to, and none that were undone.

        Its mean is over the steps of the epoch, whether the snapshot was taken before it (100) or within it (250).
        """
        x = np.random.default_rng(0).standard_normal((1024, 16)).astype("float32")
        y = np.tanh(x[:, :1] * x[:, 1:2]) + x[:, 2:3]
        seen = []

        class Losses(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                recorded = guard.recording.steps
                here = (recorded["step"] >= 32 * epoch) & ~recorded["undone"] & (recorded["status"] == 0)
                seen.append((logs["loss"], recorded["loss"][here].mean()))

        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((16,)), layers.Dense(64, "relu"), layers.Dense(1)])
        schedule = optimizers.schedules.ExponentialDecay(0.005, decay_steps=32, decay_rate=2.0)
        model.compile(optimizers.SGD(schedule), "mse")
        guard = NanGuard(verbose=0, snapshot={"every": every, "good_after": 1})
        model.fit(x, y, batch_size=32, epochs=10, verbose=0, callbacks=[guard, Losses()])
        assert changes(guard)
        for reported, mean in seen:
            assert reported == pytest.approx(mean, rel=1e-3)

    def test_nothing_helps(self):
        """A program that fails by itself at the first step ends within a few steps, with the cause, and with its rate as it was."""
        guard = NanGuard(verbose=0)

        def build():
            huge = keras.initializers.Constant(1e30)
            model = keras.Sequential([keras.Input((64,)), layers.Dense(8, kernel_initializer=huge), layers.Dense(1)])
            model.compile(optimizers.SGD(0.1), "mse")
            return model

        model, _ = fit(build, guard)
        assert model.stop_training and guard.incidents[-1].step < 60
        assert guard.incidents[-1].decision.terminal and guard.incidents[-1].diagnosis.advice
        assert float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)) == pytest.approx(0.1)


class TestRunAgain:
    def test_healthy_steps_are_not_touched(self):
        """A trial of another rate leaves the run as if there had been none."""
        plain, _ = fit(mlp(adam(0.01)))

        class Trial(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                session = guard.session
                if session.step == 60:
                    found.append(session.try_again(session.ring.start, 0.1))

        found, guard = [], NanGuard(verbose=0)
        model, _ = fit(mlp(adam(0.01)), guard, callbacks=[Trial()])
        assert found[0] is not None and found[0].step == 59
        same(model, plain)

    def test_a_trial_shows_what_the_rate_would_have_done(self):
        """The level at the end of a trial is that of a run that had the rate from the beginning."""
        losses = []

        class Losses(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                losses.append(guard.session.history.last(1)[0][1])

        guard = NanGuard(verbose=0)
        fit(mlp(adam(0.001)), guard, callbacks=[Losses()], epochs=2)
        found = []

        class Trial(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                if epoch == 1:
                    found.append(guard.session.try_again(guard.session.ring.start, 0.1))

        guard = NanGuard(verbose=0)
        fit(mlp(adam(0.01)), guard, callbacks=[Trial()], epochs=2)
        assert found[0].value == pytest.approx(np.median(losses[-16:]), rel=1e-3)

    def test_bad_data_is_not_run_again(self):
        """A batch that was refused for its own sake stays refused when the steps around it are run again."""
        x = X.copy()
        x[5 * BATCH] = np.nan

        def run(build, guard):
            keras.utils.set_random_seed(0)
            model = build()
            model.fit(x, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[guard])
            return model

        guard, lower = NanGuard(verbose=0), NanGuard(verbose=0)
        model, best = run(mlp(adam(3.0)), guard), run(mlp(adam(0.03)), lower)
        assert [i.step for i in lower.incidents] == [5, 45]
        assert "80 steps, 2 refused" in guard.summary()
        same(model, best)


class TestRateIsRemembered:
    def test_another_callback_does_not_raise_it_above_the_limit(self):
        """A rate finder that is run on into divergence stays at a safe part of the rate at which training diverged."""

        class Finder(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                rate = self.model.optimizer.learning_rate
                rate.assign(rate * 1.05)

        guard = NanGuard(verbose=0)
        model, _ = fit(mlp(momentum(0.01)), guard, callbacks=[Finder()], epochs=8)
        assert accuracy(model) > 0.9
        assert len([i for i in guard.incidents if i.changes]) <= 6 and not model.stop_training

    def test_it_returns_where_a_trial_shows_that_it_may(self):
        """A rate that was lowered needlessly far is raised, within the limit, and a line says so."""
        lines = []
        guard = NanGuard(verbose=1)
        guard._reporter.line = lines.append
        posed = unscaled(momentum(0.03))
        y = Y * 100.0 + 1000.0
        model, _ = fit(posed, guard, y=y, epochs=8)
        rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
        assert changes(guard) and rate <= 0.003 * 1.001
        assert [line for line in lines if "It is raised to that." in line] == lines

    @pytest.mark.requires_backend("tensorflow", reason="with this seed there it is the rate of a hundredth that helps, and no other")
    def test_a_tenth_of_the_rate_is_no_better(self):
        """Where most units have died at a tenth of the rate as well, a hundredth is tried, and the run goes on at that."""

        def build():
            sizes = [layers.Dense(size, "relu") for size in (32, 16, 32)]
            model = keras.Sequential([keras.Input((64,)), *sizes, layers.Dense(64)])
            model.compile(momentum(30.0)(), "mse")
            return model

        guard = NanGuard(verbose=0)
        model, _ = fit(build, guard, y=X, seed=4)
        stock, _ = fit(build, y=X, seed=4)
        assert float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)) == pytest.approx(0.3)
        assert "Tried again with a hundredth of the learning rate" in str(guard.incidents[0].diagnosis)
        assert model.evaluate(X, X, verbose=0) < 0.6 * stock.evaluate(X, X, verbose=0)

    @pytest.mark.requires_backend("tensorflow", reason="with this seed there a trial would end at a lower loss at a lower rate")
    def test_a_run_that_goes_well_is_not_doubted(self):
        """Any run at a constant rate ends at a lower loss soon where the rate is lowered: that alone is no reason to."""
        guard = NanGuard(verbose=0)
        fit(mlp(lambda: optimizers.RMSprop(0.01)), guard, epochs=11, seed=1)
        assert guard.incidents == []


def test_the_rate_that_is_reported_is_the_one_in_effect():
    """Where the limit after a divergence is below what the factor comes to, the rate is at the limit at once."""
    slower = [{"rollback": {"before_onset": True, "run_again": True}}, {"lower_lr": {"factor": 0.5, "safe": 0.1}}]
    guard = NanGuard({"rules": [{"name": name, "do": slower} for name in ("divergence", "divergence-refused")]}, verbose=0)
    model, _ = fit(unscaled(lambda: optimizers.SGD(10.0)), guard, y=Y * 100.0 + 1000.0, epochs=1)
    details = [o.detail for i in guard.incidents for o in i.outcomes if o.action == "lower_lr" and o.status == "done"]
    assert details and float(details[-1].rpartition("-> ")[2]) == pytest.approx(keras_optimizers.learning_rate(model.optimizer), rel=0.01)


def test_an_ending_gives_the_rate_back(capsys):
    """A run that a policy ends after a divergence has the rate as it was set, and the line says so."""
    slower = [{"rollback": {"before_onset": True}}, {"lower_lr": {"factor": 0.5, "safe": 0.5}}]
    names = ("divergence", "divergence-refused")
    guard = NanGuard({"rules": [{"name": name, "do": slower, "limit": {"times": 1}, "otherwise": "stop"} for name in names]})
    model, _ = fit(mlp(lambda: optimizers.SGD(1000.0)), guard)
    assert guard.stopped
    assert "is 1e+03 again (it was lowered to 500)" in capsys.readouterr().out
    assert float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)) == 1000.0
