"""A rate that is too high recovers; a run that is not proven to be lost is left alone."""

import json

import keras
import numpy as np
import pytest
from keras import layers, optimizers
from sklearn.datasets import load_digits
from support import zoo

from keras_nanguard import NanGuard
from keras_nanguard._core.incident import Diagnosis, Finding
from keras_nanguard._fit.divergence import Budget
from keras_nanguard._fit.incidents import incident_of
from keras_nanguard._fit.proof import Lost
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard.testing import inject

EPOCHS, BATCH = 4, 32
DIGITS = load_digits()
X, Y = (DIGITS.data[:1280] / 16).astype("float32"), DIGITS.target[:1280]
"""160 steps in all."""


def mlp(optimizer, units=64, **kernel):
    def build():
        body = [layers.Dense(units, "relu", **kernel), layers.Dense(10, **kernel)]
        model = keras.Sequential([keras.Input((64,)), *body])
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
    """Check that two states are equal: bit for bit on TensorFlow, else up to rounding."""
    exact = zoo.BACKEND == "tensorflow"
    for one, two in zip(values(model), values(other)):
        np.testing.assert_allclose(one, two, rtol=0 if exact else 1e-3, atol=0 if exact else 1e-5)


def changes(guard):
    return [[o.action for o in i.outcomes if o.status == "done"] for i in guard.incidents if i.changes]


def accuracy(model):
    return model.evaluate(X, Y, batch_size=256, verbose=0, return_dict=True)["accuracy"]


def adam(rate):
    return lambda: optimizers.Adam(rate)


class TestOverflow:
    """Stock Keras ends untrained; the guarded run ends as the run at the lower rate."""

    @pytest.mark.slow
    def test_as_good_as_the_best_rate(self):
        """The oracle is plain Keras at a tenth, a hundredth, a thousandth of the rate."""
        draw = np.random.default_rng(5)
        x = draw.normal(size=(1280, 16)).astype("float32")
        y = (x @ draw.normal(size=(16, 1)) * 30 + 200).astype("float32")

        def loss(rate, guard=None):
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((16,)), layers.Dense(32, "relu"), layers.Dense(1)])
            model.compile(optimizers.SGD(rate), "mse")
            guards = [guard] if guard is not None else []
            model.fit(x, y, batch_size=BATCH, epochs=5, verbose=0, callbacks=guards)
            return model.evaluate(x, y, batch_size=256, verbose=0)

        guard = NanGuard(verbose=0)
        assert np.isnan(loss(0.1)), "stock Keras ends with NaN"
        assert loss(0.1, guard) < 1.15 * np.nanmin([loss(0.1 * 0.1**n) for n in (1, 2, 3)])
        assert {i.diagnosis.cause for i in guard.incidents} == {"divergence"}
        assert guard.session.run.counts.run_again == sum(i.refused for i in guard.incidents)

    def test_weights_that_training_has_made_huge(self):
        """Above 1e30, after a loss that has grown, and written by no other code."""

        def run(*callbacks):
            keras.utils.set_random_seed(0)
            model = keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False)])
            model.compile(optimizers.SGD(5e25), "mse")  # each step multiplies the weight by -99
            x = np.full((640, 1), 1e-12, "float32")
            model.fit(x, x, batch_size=8, epochs=2, verbose=0, callbacks=list(callbacks))
            return float(keras.ops.convert_to_numpy(model.weights[0]).item())

        assert not np.isfinite(run())
        guard = NanGuard(verbose=0)
        assert run(guard) == pytest.approx(1.0, rel=0.01)
        huge = [f.path for i in guard.incidents for f in i.findings if (f.site, f.kind) == ("state", "out_of_range")]
        assert huge and {i.diagnosis.cause for i in guard.incidents} == {"divergence"}

    def test_nothing_helps(self):
        """A program that fails at any rate ends soon, with the cause and its original rate."""
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


@pytest.fixture(scope="module")
def saturated():
    """Model and guard after a run with a rate that is a thousand times too high."""
    guard = NanGuard(verbose=0)
    return fit(mlp(adam(3.0)), guard, epochs=6)[0], guard


class TestFinite:
    """All numbers are finite, and the network no longer learns."""

    def test_a_loss_that_cannot_fall_to_half(self):
        """Six of ten labels are random, so the loss falls from 2.3 to no less than 1.9."""
        draw = np.random.default_rng(0)
        labels = np.where(draw.random(len(Y)) < 0.6, draw.integers(10, size=len(Y)), Y)

        posed = mlp(adam(3.0), 32, kernel_constraint=keras.constraints.MaxNorm(2))
        stock, history = fit(posed, y=labels, epochs=3)
        assert np.isfinite(history["loss"]).all() and accuracy(stock) < 0.3
        guard = NanGuard(verbose=0)
        model, _ = fit(posed, guard, y=labels, epochs=3)
        assert [f.site for f in guard.incidents[0].findings] == ["loss"], "no kernel has grown"
        assert accuracy(model) > 0.7 and changes(guard) == [["rollback", "lower_lr"]]

    def test_saturated(self, saturated):
        """Adam at a thousand times its rate: the loss settles far above its initial value."""
        stock, history = fit(mlp(adam(3.0)), epochs=6)
        assert np.isfinite(history["loss"]).all() and accuracy(stock) < 0.5
        model, guard = saturated
        assert accuracy(model) > 0.95
        (first,) = guard.incidents
        assert not first.refused and first.findings[0].kind == "divergence"
        assert first.step in (40, 80), "the first step after an epoch"
        assert "rollback: restored the state before the first step" in str(first)
        assert any("With the weights before the first step" in text for text in first.diagnosis.evidence)

    def test_the_onset(self):
        """A callback raises the rate after 80 steps: the onset, although an older state is restored."""
        guard = NanGuard(verbose=0)
        raises = zoo.Before(lambda model: setattr(model.optimizer, "learning_rate", 3.0), batch=0, epoch=2)
        fit(mlp(adam(1e-3)), guard, callbacks=[raises], epochs=6)
        first = guard.incidents[0]
        assert not first.refused and "restored the state before the first step" in str(first)
        assert 80 <= first.values["onset"] <= 84
        assert f"Onset at step {first.values['onset'] + 1}." in str(first)

    @pytest.mark.requires_backend("tensorflow", reason="from other first weights even a hundredth of the rate diverges")
    def test_dead_at_the_mean_of_the_targets(self):
        """All units are dead, but the output bias has learned the mean: better than untrained."""
        x = np.linspace(0, 5, 50, dtype="float32")[:, None]
        y = (5 * x**2 + np.random.default_rng(7).standard_normal((50, 1)) ** 3).astype("float32")

        def run(rate, guard=None):
            keras.utils.set_random_seed(0)
            hidden = [layers.Dense(50, "relu"), layers.Dense(30, "relu", kernel_initializer="random_uniform")]
            model = keras.Sequential([keras.Input((1,)), *hidden, layers.Dense(1)])
            model.compile(optimizers.SGD(rate), "mse")
            rows = [np.tile(part, (8, 1)) for part in (x, y)]
            model.fit(*rows, epochs=8, verbose=0, callbacks=[guard] if guard is not None else [])
            return model

        loss = [run(0.1).evaluate(x, y, verbose=0)]
        guard = NanGuard(verbose=0)
        loss.append(run(0.1, guard).evaluate(x, y, verbose=0))
        assert loss[0] > 0.9 * np.var(y) and loss[1] < 0.5 * loss[0]
        assert guard.incidents[0].diagnosis.cause == "divergence"
        assert any(f.kind == "stuck" for i in guard.incidents for f in i.findings)

    @pytest.mark.slow
    def test_a_long_epoch(self):
        """All steps of an epoch of 260 are replayed, so the run ends like one at the lower rate."""

        def run(rate, guard=None):
            keras.utils.set_random_seed(0)
            model = mlp(adam(rate))()
            ends = zoo.After(lambda model: setattr(model, "stop_training", True), 9, 1)
            callbacks = [ends, *([guard] if guard is not None else [])]
            model.fit(X[:1040], Y[:1040], batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
            return model

        guard = NanGuard(verbose=0)
        model = run(1.0, guard)
        (incident,) = [i for i in guard.incidents if i.changes]
        assert "261 later steps replayed" in str(incident)
        rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
        assert rate < 0.5
        same(model, run(rate))

    def test_under_a_schedule(self):
        """The whole schedule is scaled, on the instance: the saved config does not change."""
        schedule = optimizers.schedules.CosineDecay(0.01, 2000, warmup_target=3.0, warmup_steps=20)
        posed = mlp(adam(schedule))
        stock, _ = fit(posed, epochs=5)
        guard = NanGuard(verbose=0)
        model, _ = fit(posed, guard, epochs=5)
        assert accuracy(stock) < 0.5 and accuracy(model) > 0.9
        assert model.optimizer.get_config()["learning_rate"]["config"] == schedule.get_config()


def test_a_stop_does_not_replay_the_steps_of_a_proven_divergence():
    """It ends with the state from before them."""
    guard = NanGuard("stop", verbose=0)
    model, _ = fit(mlp(adam(3.0)), guard)
    keras.utils.set_random_seed(0)
    untrained = mlp(adam(3.0))()
    assert [i.refused for i in guard.incidents] == [False] and model.stop_training
    assert "the state before the first step restored" in str(guard.incidents[0])
    for got, expected in zip(model.get_weights(), untrained.get_weights(), strict=True):
        np.testing.assert_array_equal(got, expected)


class Spoils(keras.callbacks.Callback):
    """Overwrites the weights with finite noise after an action, so that it cannot help."""

    def __init__(self, guard, scale=100, rate=1e-9):
        super().__init__()
        self.guard, self.scale, self.rate, self.state = guard, scale, rate, None

    def on_train_batch_begin(self, batch, logs=None):
        if self.guard.incidents and self.state is None:
            draw = np.random.default_rng(0)
            self.state = [draw.normal(0, self.scale, value.shape) for value in self.model.get_weights()]
            self.model.set_weights(self.state)
            if self.rate is not None:
                self.model.optimizer.learning_rate = self.rate


def test_a_run_restarts_from_the_state_of_its_proof(monkeypatch, set_limit):
    """Not from another snapshot with a lower loss, although the steps since the start cannot run again."""

    def proven(run, seconds):
        findings, diagnosis = [Finding("loss", "divergence", value=9.0)], Diagnosis("divergence")
        incident = incident_of(run, findings, diagnosis=diagnosis, values={"rate_factor": 0.1})
        state = {id(v): keras_variables.read(v) for v in run.train_state().kept}
        return Lost(incident, run.ring.start, state, {}, run.recovery.lowered_rates), 0

    set_limit("remembered batches", 16)
    monkeypatch.setattr("keras_nanguard._fit.divergence.FALLS", 0.0)
    monkeypatch.setattr("keras_nanguard._fit.divergence.look_for_proof", proven)
    guard = NanGuard(snapshot={"every": 10, "verify_after": 2}, verbose=0)
    fit(mlp(adam(1e-3)), guard, epochs=2)
    (back, _) = guard.incidents[0].outcomes
    assert back.detail == "restored the state before the first step; 41 committed steps undone"


class TestProbation:
    def test_an_action_that_has_not_helped_is_undone_and_not_repeated(self, capsys):
        """The state is restored, a line reports this, and the guard never acts on it again."""
        guard = NanGuard()
        spoils = Spoils(guard)
        model, _ = fit(mlp(adam(3.0)), guard, callbacks=[spoils], epochs=5)
        assert len(guard.incidents) == 1
        assert "State and learning rate are restored" in capsys.readouterr().out
        events = [event.text for event in guard.recording.events if event.kind == "learning_rate"]
        assert "The lower learning rate did not help. State and learning rate are restored." in events
        rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
        assert rate == pytest.approx(1e-9), "a rate that a callback has set stays"
        state = guard.session.guard_state
        assert not state.lowering.diverged and state.lowering.at is None, "nothing of the action is left"
        assert guard.session.run.replacements == 2, "a step that was started before would not count"
        spoiled = [np.float32(value) for value in spoils.state]
        assert not any(np.array_equal(*pair) for pair in zip(model.get_weights(), spoiled, strict=True))

    def test_a_verified_state_is_always_on_disk(self, tmp_path):
        """After the rollback, and after its end that of the state that is restored at once."""
        snapshot = {"every": 10, "verify_after": 5}
        guard, kept = NanGuard(directory=tmp_path, resume=True, snapshot=snapshot, verbose=0), []

        def look(model):
            found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("snapshots/*/snapshot.json"))]
            run = guard.session.run
            kept.append((run.replacements, run.step - max(one["step"] for one in found if one["verified"])))

        fit(mlp(adam(3.0)), guard, callbacks=[Spoils(guard), zoo.After(look)], epochs=5)
        assert changes(guard) == [["rollback", "lower_lr"]]
        assert next(steps for replacements, steps in kept if replacements == 2) == 0
        assert max(steps for _, steps in kept[10:]) <= 15

    def test_a_rate_that_is_lowered_without_a_rollback_is_on_probation_too(self, capsys):
        guard = NanGuard(divergence={"action": "lower_lr"})
        fit(mlp(adam(3.0)), guard, callbacks=[Spoils(guard)], epochs=5)
        assert changes(guard) == [["lower_lr"]]
        assert "State and learning rate are restored" in capsys.readouterr().out
        assert guard.session.guard_state.lowering.at is None
        assert not guard.session.pending, "no rate is lowered, so nothing is due before each step"

    def test_an_earlier_lowered_rate_still_returns(self):
        """The action was lower, for good; without it the rate returns as its own rule has it."""
        rule = {"name": "rows", "cause": "input_nonfinite", "do": {"lower_lr": {"factor": 0.9, "recover_after": 100}}}
        guard = NanGuard({"rules": [rule]}, verbose=0)

        def spoil(batch, logs=None):
            if guard.incidents[-1:] and guard.incidents[-1].diagnosis.cause == "divergence" and not spoiled:
                spoiled.append(batch)
                draw = np.random.default_rng(0)
                spoils.model.set_weights([draw.normal(0, 1e6, v.shape) for v in spoils.model.get_weights()])

        keras.utils.set_random_seed(0)
        spoiled, model = [], mlp(adam(3.0))()
        spoils = keras.callbacks.LambdaCallback(on_train_batch_begin=spoil)
        with inject(model, site="inputs", step=2):
            history = model.fit(X, Y, batch_size=BATCH, epochs=4, verbose=0, callbacks=[guard, spoils]).history
        assert changes(guard) == [["lower_lr"], ["rollback", "lower_lr"]] and spoiled
        assert history["nanguard/rate_factor"] == pytest.approx([0.9, 0.009, 1.0, 1.0])

    @pytest.mark.daily("20")
    @pytest.mark.parametrize("last", [39, 20])
    def test_an_action_in_the_last_epoch_is_judged_at_its_end(self, last, tmp_path, capsys):
        """Before validation and checkpoints. The oracle is plain Keras up to the step of the action."""
        ends = {batch: zoo.After(lambda model: setattr(model, "stop_training", True), batch, 1) for batch in (0, last)}
        plain, _ = fit(mlp(adam(3.0)), callbacks=[ends[0]], epochs=2, validation_data=(X, Y))
        guard = NanGuard()
        path = str(tmp_path / "{epoch}.keras")
        others = [Spoils(guard, 1e6, None), ends[last], keras.callbacks.ModelCheckpoint(path)]
        model, history = fit(mlp(adam(3.0)), guard, callbacks=others, epochs=2, validation_data=(X, Y))
        assert [i.step for i in guard.incidents] == [40] and changes(guard) == [["rollback", "lower_lr"]]
        assert capsys.readouterr().out.count("State and learning rate are restored") == 1
        same(model, plain)
        assert float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)) == pytest.approx(3.0)
        assert guard.session.guard_state.lowering.at is None
        saved = keras.saving.load_model(path.format(epoch=2))
        for one, other in zip(model.get_weights(), saved.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
        now = model.evaluate(X, Y, batch_size=BATCH, verbose=0, return_dict=True)
        assert history["val_loss"][-1] == pytest.approx(now["loss"], rel=1e-4)

    def test_an_action_that_helps_in_the_last_epoch_stays(self, capsys):
        guard = NanGuard()
        model, _ = fit(mlp(adam(3.0)), guard, epochs=2)
        assert [i.step for i in guard.incidents] == [40] and accuracy(model) > 0.9
        assert "restored" not in capsys.readouterr().out.partition("rolled back")[2]
        assert guard.session.tasks.divergence._probation is None

    def test_probation_waits_until_there_is_a_comparison(self, capsys):
        """It does not end in a window without batches to compare on."""
        guard = NanGuard()

        class Forgets(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if guard.incidents and guard.incidents[0].epoch == epoch - 1:
                    guard.session.run.recent.restart()

        fit(mlp(adam(3.0)), guard, callbacks=[Spoils(guard), Forgets()], epochs=5)
        assert len(guard.incidents) == 1
        assert "State and learning rate are restored" in capsys.readouterr().out


class TestSecondFit:
    def test_a_lowered_rate_is_still_that_of_a_divergence(self):
        """The next fit keeps the lowered rate, and the reason for it."""
        guard = NanGuard(verbose=0)
        model, _ = fit(mlp(adam(3.0)), guard, epochs=2)
        assert guard.session.guard_state.lowering.diverged
        model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[guard])
        state = guard.session.guard_state
        assert state.lowering.diverged and state.rates[0].factor < 1


class TestTrainedStart:
    """A fit that begins with trained weights: being no better than those proves nothing."""

    DRAW = np.random.default_rng(0)
    ROWS = DRAW.standard_normal((2048, 16)).astype("float32")
    NOISY = (ROWS @ DRAW.standard_normal((16, 1)) + DRAW.standard_normal((2048, 1))).astype("float32")
    LABELS = np.where(DRAW.random(len(Y)) < 0.3, DRAW.integers(10, size=len(Y)), Y)

    def regression(self):
        model = keras.Sequential([keras.Input((16,)), layers.Dense(1)])
        model.compile(optimizers.SGD(0.2), "mse")
        return model, self.ROWS, self.NOISY

    def classifier(self):
        model = keras.Sequential([keras.Input((64,)), layers.Dense(10)])
        model.compile(optimizers.SGD(1.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model, X, self.LABELS

    def residuals(self):
        """The same without targets: they are inputs, so inputs cannot be exchanged."""
        x, y = keras.Input((16,)), keras.Input((1,))
        model = keras.Model((x, y), layers.Subtract()([layers.Dense(1)(x), y]))
        model.compile(optimizers.SGD(0.28), "mse")
        return model, (self.ROWS, self.NOISY), np.zeros_like(self.NOISY)

    def continued(self, build, first, second, weights=None):
        """Return the weights after a fit, and another one of the same or a new model, with these callbacks."""
        keras.utils.set_random_seed(1)
        model, *data = build()
        model.fit(*data, batch_size=8, epochs=3 if build == self.classifier else 1, verbose=0, callbacks=first)
        if weights is not None:
            model.save_weights(weights)
            model, *data = build()
            model.load_weights(weights)
        keras.utils.set_random_seed(5)
        model.fit(*data, batch_size=8, epochs=2, verbose=0, callbacks=second)
        return model.get_weights()

    @pytest.mark.daily("regression-a file")
    @pytest.mark.parametrize("how", ["two fits", "a file", "one guard"])
    @pytest.mark.parametrize("kind", ["regression", "classifier", "residuals"])
    def test_at_the_noise_floor(self, kind, how, tmp_path):
        """A lower rate would lower the loss, but the network is far better than untrained."""
        if (kind, how) == ("residuals", "a file"):
            pytest.skip("nothing tells that the weights are trained: the optimizer is new")
        guard, build = NanGuard(verbose=0), getattr(self, kind)
        path = str(tmp_path / "trained.weights.h5") if how == "a file" else None
        guarded = self.continued(build, [guard] if how == "one guard" else [], [guard], path)
        assert guard.incidents == []
        for one, two in zip(self.continued(build, [], [], path), guarded, strict=True):
            np.testing.assert_allclose(one, two, rtol=0 if zoo.BACKEND == "tensorflow" else 1e-3, atol=1e-5)

    @pytest.mark.slow
    def test_the_same_batch_at_each_step(self):
        """Its inputs cannot be exchanged with those of another batch."""
        rows, exact = self.ROWS[:64], self.ROWS[:64] @ np.ones((16, 1), "float32")
        guard = NanGuard(verbose=0)
        model = keras.Sequential([keras.Input((16,)), layers.Dense(1)])
        model.compile(optimizers.Adam(0.1), "mse")
        for callbacks in ([], [guard]):
            model.fit(rows, exact, batch_size=64, shuffle=False, epochs=400, verbose=0, callbacks=callbacks)
        assert guard.incidents == []

    @pytest.mark.daily("3.0")
    @pytest.mark.parametrize("rate", [0.3, 3.0])
    def test_destroyed(self, rate):
        """A rate that is far too high in the second fit: its loss rises far above the first one's."""

        def run(*callbacks):
            keras.utils.set_random_seed(0)
            model = mlp(adam(1e-3))()
            model.fit(X, Y, batch_size=BATCH, epochs=4, verbose=0)
            start = model.evaluate(X, Y, batch_size=256, verbose=0)[0]
            model.optimizer.learning_rate = rate
            model.fit(X, Y, batch_size=BATCH, epochs=4, verbose=0, callbacks=list(callbacks))
            return model, start

        stock, start = run()
        assert accuracy(stock) < 0.6 and stock.evaluate(X, Y, batch_size=256, verbose=0)[0] > 2 * start
        guard = NanGuard(verbose=0)
        model, _ = run(guard)
        assert accuracy(model) > 0.9 and changes(guard)[0] == ["rollback", "lower_lr"]

    @pytest.mark.slow
    def test_destroyed_without_targets(self):
        """If inputs cannot be exchanged, a kernel that has grown shows it."""

        def run(*callbacks):
            keras.utils.set_random_seed(1)
            model, *data = self.residuals()
            model.compile(optimizers.Adam(0.01), "mse")
            model.fit(*data, batch_size=8, epochs=4, verbose=0)
            model.optimizer.learning_rate = 1000.0
            model.fit(*data, batch_size=8, epochs=3, verbose=0, callbacks=list(callbacks))
            return model.evaluate(*data, verbose=0)

        guard = NanGuard(verbose=0)
        stock = run()
        assert stock > 20 and run(guard) < stock / 3 and changes(guard)[0] == ["rollback", "lower_lr"]


class OwnStep(keras.Model):
    """The train step of Keras, written by a user."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training)


class TestNoObjective:
    """If a lower loss need not be the goal, the guard never acts on finite numbers."""

    def lost(self, build, **options):
        guard = NanGuard(verbose=0)
        fit(build, guard, epochs=4, **options)
        return guard.incidents

    def test_a_loss_of_the_users_own(self, saturated):
        def build():
            inputs = keras.Input((64,))
            model = OwnStep(inputs, layers.Dense(10)(layers.Dense(64, "relu")(inputs)))
            model.compile(adam(3.0)(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
            return model

        assert self.lost(build) == []
        assert saturated[1].incidents, "the same with the loss that was compiled"

    def test_a_loss_with_negative_values(self):
        def build():
            model = mlp(adam(3.0))()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(adam(3.0)(), lambda y, p: loss(y, p) - 5.0)
            return model

        assert self.lost(build) == []

    def test_if_it_is_disabled(self):
        guard = NanGuard(verbose=0, divergence={"action": "off"})
        fit(mlp(adam(3.0)), guard, epochs=4)
        assert guard.incidents == []


def left_alone(build, **options):
    """Check that a guarded run has no incident, and the plain run's bits; return its History."""
    plain, history = fit(build, **options)
    guard = NanGuard(verbose=0)
    model, _ = fit(build, guard, **options)
    assert guard.incidents == []
    same(model, plain)
    return history


class TestHealthy:
    """Programs whose loss is not lower than at first, and that a lower rate would not help."""

    def test_nothing_to_learn(self):
        """Targets are noise: never better than untrained; left alone, with the plain run's bits."""
        y = np.random.default_rng(0).integers(0, 10, len(X))
        left_alone(mlp(adam(1e-3)), y=y)

    def test_an_easy_first_batch(self):
        """The loss of the first step is the lowest: targets grow a thousandfold over time."""
        y = (X.sum(1, keepdims=True) * np.geomspace(1, 1e3, len(X))[:, None]).astype("float32")
        history = left_alone(unscaled(adam(1e-2)), y=y, shuffle=False)
        assert history["loss"][-1] > 100.0

    def test_rare_classes(self):
        """Batches without a positive have a loss a thousand times lower than those with one."""
        y = (np.arange(len(X)) % 400 == 7).astype("float32")

        def build():
            model = keras.Sequential([keras.Input((64,)), layers.Dense(32, "relu"), layers.Dense(1, "sigmoid")])
            model.compile(adam(1e-2)(), "binary_crossentropy")
            return model

        left_alone(build, y=y)

    def test_a_loss_weight_that_a_callback_raises(self):
        """States are compared under the current weight of the loss, also if it is a variable."""
        noise = 0.3 * np.random.default_rng(0).normal(size=(len(X), 1))
        y = (X[:, 20:28].sum(1, keepdims=True) + noise).astype("float32")

        class Weighted(layers.Layer):
            def build(self, shape):
                self.weight = self.add_weight(shape=(), initializer="ones", trainable=False)

            def call(self, x):
                return x

        class Raises(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                self.model.layers[-1].weight.assign(1.0 if epoch < 7 else 1000.0)

        def build():
            weighted = Weighted()
            model = keras.Sequential([keras.Input((64,)), layers.Dense(1), weighted])
            model.compile(adam(1e-2)(), lambda y, p: weighted.weight * keras.ops.square(y - p))
            return model

        left_alone(build, y=y, epochs=10, callbacks=[Raises()])


STEPS = zoo.Tally()
"""The number of steps of a `CountsSteps`, with those of trials."""


class CountsSteps(keras.Model):
    """Counts its training steps, including those of trials."""

    def call(self, x, training=None):
        if training:
            STEPS.number += 1
        return super().call(x, training=training)


@pytest.mark.requires_backend("torch", reason="a compiled step cannot count its calls")
class TestTime:
    """The cost of trials for a healthy run, in steps."""

    def steps_of_trials(self, output, y, loss="mse", rate=0.01, epochs=20):
        """Return the number of steps of trials in a fit of 40 steps an epoch."""

        def model():
            inputs = keras.Input((64,))
            made = CountsSteps(inputs, output(inputs))
            made.compile(optimizers.Adam(rate), loss)
            return made

        STEPS.number = 0
        fit(model, NanGuard(), y=y.astype("float32"), epochs=epochs)
        return STEPS.number - 40 * epochs

    def hidden(self, inputs):
        return layers.Dense(8, "relu")(inputs)

    def regression(self, inputs):
        return layers.Dense(1)(self.hidden(inputs))

    @pytest.mark.daily("0.01-120")
    @pytest.mark.parametrize(("rate", "most"), [(1e-7, 1900), (0.01, 120)])
    def test_a_share_of_the_steps(self, rate, most):
        """Rare once a run has learned; else, after the first trials, at most half of its time."""
        target = X[:, 20:28].sum(1, keepdims=True) + np.random.default_rng(0).normal(size=(len(X), 1))
        steps = self.steps_of_trials(self.regression, target, rate=rate)
        assert 0 < steps <= most

    @pytest.mark.slow
    def test_the_first_trials_of_a_run_that_learns_nothing(self, set_limit):
        """They are not repeated before the run has made as many steps as they took.

        Their time is limited.
        """
        noise = np.random.default_rng(0).normal(size=(len(X), 1))
        first, more = (self.steps_of_trials(self.regression, noise, rate=0.0, epochs=n) for n in (2, 8))
        assert 320 < first == more
        set_limit("share of the time of trials", 0.0)
        set_limit("seconds of trials", 1e-6)  # too little for a proof
        assert 0 < self.steps_of_trials(self.regression, noise, rate=0.0, epochs=2) < 60
        set_limit("seconds of trials", 0.0)
        assert self.steps_of_trials(self.regression, noise, rate=0.0, epochs=2) == 0

    def test_many_short_fits(self):
        """The trials of earlier fits count: each fit would otherwise begin with its own."""
        target = X[:, 20:28].sum(1, keepdims=True) + np.random.default_rng(0).normal(size=(len(X), 1))
        inputs = keras.Input((64,))
        model = CountsSteps(inputs, self.regression(inputs))
        model.compile(optimizers.Adam(0.01), "mse")
        guard = NanGuard()

        def steps_of_trials():
            STEPS.number = 0
            model.fit(X, target.astype("float32"), batch_size=BATCH, epochs=2, verbose=0, callbacks=[guard])
            return STEPS.number - 2 * 40

        steps = [steps_of_trials() for _ in range(10)]
        assert steps[0] > 0 and sum(steps) <= 120
        model.compile(optimizers.Adam(0.01), "mse")  # a new choice
        assert steps_of_trials() > 0

    def test_a_loss_without_targets(self):
        """Targets are zeros, which any inputs fit: learned means better than untrained."""

        def residual(inputs):
            made = layers.Subtract()([layers.Dense(64)(self.hidden(inputs)), inputs])
            return layers.Rescaling(3.0)(made)

        assert 0 < self.steps_of_trials(residual, np.zeros((len(X), 64)), epochs=20) <= 120


def test_the_time_of_trials():
    """Half a minute and a tenth of the planned fit in all, no longer than the fit so far."""
    now = 0.0
    budget = Budget(lambda: now)
    budget.planned = 5000
    now = 100.0
    assert budget.left(1000) == 30.0 + 50.0
    assert budget.left(100) == 30.0 + 100.0  # a tenth of the plan is 500
    with budget.measured():
        now = 170.0
    assert budget.left(1000) == 80.0 - 70.0
    budget.planned = 0  # unknown: a tenth of the time so far
    assert budget.left(1000) == 40.0 - 70.0


class TestReplay:
    @pytest.mark.daily("100")
    @pytest.mark.parametrize("every", [100, 250])
    def test_the_epochs_show_the_steps_that_count(self, every):
        """The logs mean replayed steps, no undone ones; snapshot before (100) or within (250)."""
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
        guard = NanGuard(verbose=0, snapshot={"every": every, "verify_after": 1})
        model.fit(x, y, batch_size=32, epochs=10, verbose=0, callbacks=[guard, Losses()])
        assert changes(guard)
        for reported, mean in seen:
            assert reported == pytest.approx(mean, rel=1e-3)

    def test_bad_data_is_not_run_again(self):
        """A batch refused for its data stays refused when the steps around it are replayed."""
        x = X.copy()
        x[5 * BATCH] = np.nan

        def run(build, guard):
            keras.utils.set_random_seed(0)
            model = build()
            model.fit(x, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[guard])
            return model

        guard, lower = NanGuard(verbose=0), NanGuard(verbose=0)
        model = run(mlp(adam(3.0)), guard)
        rate = float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))
        best = run(mlp(adam(rate)), lower)
        assert [i.step for i in lower.incidents] == [5, 45]
        assert "80 steps, 2 skipped" in guard.summary()
        same(model, best)
