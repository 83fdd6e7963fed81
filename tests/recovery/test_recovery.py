"""The guarantees of the default policy in running fits."""

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard
from keras_nanguard.testing import inject

MANY = pytest.mark.requires_backend("tensorflow", "jax", reason="PyTorch runs one step per execution")


def actions_of(guard):
    """Return `(step, names of the performed actions)` for each incident, without skips."""
    return [
        (i.step, [o.action for o in i.outcomes if o.status == "done" and o.action != "skip"])
        for i in guard.incidents
    ]


def eager():
    return zoo.plain(run_eagerly=True)


class TestSeveralInARow:
    def test_back_and_slower(self):
        """The third bad step in a row restores a state, lowers the rate, and goes on after it."""
        guard = NanGuard(verbose=0, diagnose=False, snapshot={"every": 4, "verify_after": 2})
        steps = []
        count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
        run = zoo.run(eager, zoo.overflowing(7, 8, 9, count=16), guard=guard, epochs=1, callbacks=[count])
        assert actions_of(guard) == [(7, []), (8, []), (9, ["rollback", "lower_lr"])]
        assert guard.incidents[-1].outcomes[-2].detail == "restored the state after 4 steps; 3 committed steps undone"
        assert steps == list(range(16)), "no batch is seen twice"
        assert int(run.model.optimizer.iterations.numpy()) == 4 + 6
        assert float(run.model.optimizer.learning_rate.numpy()) == pytest.approx(1e-4)
        assert zoo.bad_entries(run.model) == []


def share(y_true, y_pred):
    """A loss that is NaN if all targets of a batch are 0."""
    return keras.ops.sum(y_true * keras.ops.square(y_pred - y_true)) / keras.ops.sum(y_true)


class TestThreeBadBatchesInEveryEpoch:
    """Three adjacent batches that are finite, but bad from any state, are only skipped."""

    def trained(self, loss, x, y, *callbacks, **options):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), loss, **options)
        history = model.fit(x, y, batch_size=8, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
        return model.get_weights(), history.history["loss"]

    @pytest.mark.daily("*-1", "mse-*")
    @pytest.mark.parametrize("steps", [1, pytest.param(4, marks=MANY)])
    @pytest.mark.parametrize(("loss", "cause"), [("mse", "input_scale"), (share, "loss_domain")])
    def test_only_skipped(self, loss, cause, steps):
        """The oracle is plain Keras without these batches."""
        rng = np.random.default_rng(0)
        x = rng.normal(size=(96, 4)).astype("float32")
        y = np.abs(x.sum(axis=1, keepdims=True)) + 0.1
        bad = slice(5 * 8, 8 * 8)
        if cause == "input_scale":
            x[bad] *= 1e30
        else:
            y[bad] = 0.0
        rest = [np.concatenate([data[: bad.start], data[bad.stop :]]) for data in (x, y)]
        weights, losses = self.trained(loss, *rest)
        guard = NanGuard(verbose=0)
        found, reported = self.trained(loss, x, y, guard, steps_per_execution=steps)
        assert {i.diagnosis.cause for i in guard.incidents} == {cause}
        assert len(guard.incidents) == 12 and not any(actions for _, actions in actions_of(guard))
        for one, other in zip(weights, found):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(losses, reported, rtol=1e-3)


class TestWarmup:
    def diverging(self, *callbacks):
        """Return the losses of a run whose warmup begins at 0 and ends at a rate that is far too high."""
        keras.utils.set_random_seed(0)
        x = np.random.default_rng(0).normal(size=(800, 8)).astype("float32")
        y = x.sum(axis=1, keepdims=True)
        layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        rate = keras.optimizers.schedules.CosineDecay(0.0, 200, warmup_target=20.0, warmup_steps=20)
        model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse")
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        return history.history["loss"]

    def test_lowered_from_the_rate_that_failed(self):
        """After a rollback to a schedule's rate of 0, the rate that has failed is lowered."""
        assert not np.isfinite(self.diverging()[-1]), "stock Keras diverges"
        guard = NanGuard(verbose=0)
        losses = self.diverging(guard)
        lowered = [o for i in guard.incidents for o in i.outcomes if o.action == "lower_lr" and o.status == "done"]
        assert lowered
        assert losses[-1] < 1.0, "8 for a network that predicts 0"


class TestMixedPrecision:
    def _run(self, bad, scale=2.0**10, batches=24, **options):
        keras.config.set_dtype_policy("mixed_float16")
        model = zoo.plain(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-3), initial_scale=scale), dropout=False)
        keras.config.set_dtype_policy("float32")
        guard = NanGuard(verbose=0, diagnose=False, **options)
        data = zoo.regression(batches=batches)
        with inject(model, site="gradients", kind="inf", step=bad) if bad else inject(model, site="gradients", kind="zero"):
            model.fit(data.x, data.y, batch_size=8, shuffle=False, verbose=0, callbacks=[guard])
        return model, guard

    def test_streak(self):
        model, guard = self._run(range(4, 16))
        assert guard.session.run.counts.overflows == 8 and guard.incidents[0].step == 12
        assert zoo.bad_entries(model) == []

    @pytest.mark.requires_backend("tensorflow", "torch", reason="an injected gradient calls the host on JAX, so no trial can run")
    def test_collapse(self):
        """A scale that cannot fall any further is an incident, and is reset."""
        model, guard = self._run(range(4, 8), scale=4.0)
        assert guard.incidents and float(model.optimizer.dynamic_scale.numpy()) >= 1.0
        assert zoo.bad_entries(model) == []
