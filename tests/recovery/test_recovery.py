"""The guarantees of the default policy in running fits."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import ops
from support import zoo

from keras_nanguard import NanGuard
from keras_nanguard.testing import corrupt, inject


def actions_of(guard):
    """Return `(step, names of the performed actions)` for each incident, without skips and
    warnings.
    """
    return [
        (i.step, [o.action for o in i.outcomes if o.status == "done" and o.action not in ("skip", "warn")])
        for i in guard.incidents
    ]


def overflowing(*batches, count=12):
    """Return data whose loss overflows in some batches although inputs and targets are finite."""
    data = zoo.regression(batches=count)
    for batch in batches:
        data.y[batch * zoo.BATCH + 2] = 1e38
    return data


def eager():
    return zoo.plain(run_eagerly=True)


class TestOneBadBatch:
    def test_left_out(self, capsys, tmp_path):
        """After one bad batch, which is refused, training continues; one line is printed, logs and
        History are finite and correct.
        """
        log = tmp_path / "log.csv"
        data = zoo.poison(zoo.regression(), 5)
        guard = NanGuard(verbose=1, diagnose=False)
        run = zoo.run(zoo.plain, data, guard=guard, callbacks=[keras.callbacks.CSVLogger(log)])
        reported = [line for line in capsys.readouterr().out.splitlines() if "NanGuard: skipped step" in line]
        assert len(reported) == 1
        assert reported[0].startswith("NanGuard: skipped step 6 (epoch 1): NaN in inputs x.")
        assert run.history["refused_steps"] == [1, 1]
        assert np.isfinite(list(run.history.values())).all()
        rows = list(csv.DictReader(log.open()))
        assert [row["refused_steps"] for row in rows] == ["1", "1"]
        oracle = zoo.run(zoo.plain, zoo.regression().without([5]))
        assert run.history["loss"] == oracle.history["loss"], "the means are over the other steps"


class TestSeveralInARow:
    def test_back_and_slower(self):
        """The third bad step in a row restores a verified state, lowers the rate, and continues
        after the failed batches.
        """
        guard = NanGuard(verbose=0, diagnose=False, snapshot={"every": 4, "verify_after": 2})
        steps = []
        count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
        run = zoo.run(eager, overflowing(7, 8, 9, count=16), guard=guard, epochs=1, callbacks=[count])
        assert actions_of(guard) == [(7, []), (8, []), (9, ["rollback", "lower_lr"])]
        assert guard.incidents[-1].outcomes[-2].detail == "restored the state after 4 steps; 3 committed steps undone"
        assert steps == list(range(16)), "no batch is seen twice"
        assert int(run.model.optimizer.iterations.numpy()) == 4 + 6
        assert float(run.model.optimizer.learning_rate.numpy()) == pytest.approx(1e-4)
        assert zoo.bad_entries(run.model) == []

    def test_bounded(self, capsys):
        """A program that fails from the start at any rate stops at the tenth step, untrained, at
        its original rate, with the diagnosis.
        """
        guard = NanGuard(verbose=1)
        x = zoo.regression(batches=24)
        model = eager()
        model.compile("adam", loss=lambda y, p: ops.mean(ops.log(p * 0.0 - 1.0)), run_eagerly=True)
        before = [v.numpy() for v in model.trainable_variables]
        model.fit(x.x, x.y, batch_size=8, epochs=3, verbose=0, callbacks=[guard])
        assert guard.session.run.step == 10 and model.stop_training
        assert actions_of(guard) == [*((step, []) for step in range(9)), (9, ["stop"])]
        assert float(model.optimizer.learning_rate.numpy()) == pytest.approx(1e-3)
        assert guard.incidents[-1].diagnosis.cause == "loss_domain"
        assert "loss_domain" in capsys.readouterr().out
        for one, other in zip(before, model.trainable_variables):
            np.testing.assert_array_equal(one, other.numpy())

    def test_bad_data_lowers_no_rate(self):
        """NaN in the inputs of several batches in a row is skipped, because neither a rollback nor
        a lower rate helps.
        """
        data = zoo.regression(batches=16)
        for batch in range(4, 9):
            zoo.poison(data, batch)
        guard = NanGuard(verbose=0, diagnose=False)
        zoo.run(eager, data, guard=guard, epochs=1)
        assert actions_of(guard) == [(step, []) for step in range(4, 9)]


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
        """After a rollback to the first step the rate of the schedule is 0. The guard lowers it all
        the same, from the rate of the step that has failed.
        """
        assert not np.isfinite(self.diverging()[-1]), "stock Keras diverges"
        guard = NanGuard(verbose=0)
        losses = self.diverging(guard)
        lowered = [o for i in guard.incidents for o in i.outcomes if o.action == "lower_lr" and o.status == "done"]
        assert lowered
        assert losses[-1] < 1.0, "8 for a network that predicts 0"


class TestDamagedState:

    def test_before_training(self, capsys):
        """A model that is bad before training is reported before the first step, and not trained.
        """
        model = eager()
        corrupt(model.layers[0].kernel)
        guard = NanGuard(verbose=1)
        data = zoo.regression()
        model.fit(data.x, data.y, batch_size=8, verbose=0, callbacks=[guard])
        assert guard.session.run.step == 0 and model.stop_training
        assert guard.incidents[0].sites == ("state",) and "dense" in capsys.readouterr().out


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

    def test_ordinary_overflow(self):
        """An overflow that dynamic scaling handles is never an incident."""
        model, guard = self._run(range(0, 24, 3))
        assert guard.incidents == [] and guard.session.run.counts.overflows == 8
        assert float(model.optimizer.dynamic_scale.numpy()) == 4.0

    def test_streak(self):
        """A streak of overflows is an incident."""
        model, guard = self._run(range(4, 16))
        assert guard.session.run.counts.overflows == 8 and guard.incidents[0].step == 12
        assert zoo.bad_entries(model) == []

    def test_collapse(self):
        """A scale that cannot fall any further is an incident, and is reset."""
        model, guard = self._run(range(4, 8), scale=4.0)
        assert guard.incidents and float(model.optimizer.dynamic_scale.numpy()) >= 1.0
        assert zoo.bad_entries(model) == []


@pytest.mark.slow
@pytest.mark.requires_backend("tensorflow", reason="the script is the same on each backend")
def test_benchmark_in_short():
    """Two scenarios of the recovery benchmark run from the command line and recover."""
    script = Path(__file__).parents[2] / "benchmarks" / "recovers.py"
    command = [sys.executable, str(script), "--count", "2", "--only", "NanGuard()"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| **all** | 2 | 2 |" in done.stdout
