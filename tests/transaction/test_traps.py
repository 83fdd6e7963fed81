"""Known failures of other guards, by their numbers in a common list."""

from __future__ import annotations

import functools
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers, ops
from support import zoo

from keras_nanguard import NanGuard
from keras_nanguard.testing import corrupt

OFTEN = {"every": 4, "verify_after": 2}


def eager(optimizer="adam", **options):
    return zoo.plain(optimizer, run_eagerly=True, **options)


def guarded(policy="recover", **options):
    return NanGuard(policy, **{"verbose": 0, "diagnose": False, "snapshot": OFTEN, **options})


def done(guard, action):
    return [i.step for i in guard.incidents for o in i.outcomes if o.action == action and o.status == "done"]


@pytest.mark.usefixtures("snapshots_kept")
def test_01_rolling_back_to_a_checkpoint_that_is_nan():
    """A state that is bad when a snapshot is due is not stored, so a rollback never restores it."""

    def late(model):
        """Damage the state when the step is over, so that only the snapshot can see it."""
        slot, promote = model.optimizer.variables[-1], guard.session.run.ring.promote

        def damaged(committed):
            guard.session.run.access.sync_variables()
            corrupt(slot)
            return promote(committed)

        guard.session.run.ring.promote = damaged  # the last that is done before a snapshot is taken

    guard = guarded()
    run = zoo.run(eager, zoo.regression(), guard=guard, epochs=1, callbacks=[zoo.Before(late, 8)])
    assert done(guard, "rollback")
    assert zoo.bad_entries(run.model) == []
    for snapshot in guard.session.run.ring.snapshots:
        assert all(zoo.finite(array) for array in snapshot.arrays.values() if array.dtype.kind == "f")


def test_04_restoring_in_inference_mode():
    """After a rollback training continues in training mode: statistics change, dropout drops."""
    seen = {}

    def note(name):
        return lambda model: seen.update({name: [v.numpy() for v in model.layers[1].weights[2:]]})

    guard = guarded()
    callbacks = [zoo.Before(note("restored"), 9), zoo.Before(note("after"), 10)]
    run = zoo.run(eager, zoo.overflowing(6, 7, 8), guard=guard, epochs=1, callbacks=callbacks)
    assert done(guard, "rollback") == [8]
    assert all((one != other).all() for one, other in zip(seen["restored"], seen["after"]))
    dropout = next(layer for layer in run.model.layers if isinstance(layer, layers.Dropout))
    assert dropout.seed_generator.state.numpy()[1] != 0


def test_06_silent_rollback_silent_skip(capsys):
    """Refused steps and rollbacks are in the output, History and incidents."""
    guard = guarded(verbose=1)
    run = zoo.run(eager, zoo.overflowing(6, 7, 8), guard=guard, epochs=1)
    reported = capsys.readouterr().out
    assert "skipped step 7 (epoch 1)" in reported and "rolled back at step 9 (epoch 1)" in reported
    assert len(guard.incidents) == 3 and "learning rate" in reported
    details = [o.detail for o in guard.incidents[2].outcomes if o.action == "rollback"]
    assert details == ["restored the state after 4 steps; 2 committed steps undone"]
    assert "skipped 3 of 12 steps" in reported and run.history["refused_steps"] == [3]
    assert "3 skipped" in guard.summary()


@functools.cache
def decided(mode):
    """Return the decisions in a run with four incidents, with their place."""
    guard = guarded()
    zoo.run(lambda: zoo.plain("sgd", **zoo.MODES[mode]), zoo.overflowing(3, 4, 5, 9), guard=guard, epochs=1)
    return [(i.step, i.epoch, i.batch, i.refused, i.decision) for i in guard.incidents]


@pytest.mark.daily("graph", "steps4")
@pytest.mark.parametrize("mode", ["graph", "xla", "steps4"])
def test_10_a_decision_for_each_replica(mode):
    """The same incidents lead to the same decisions, for each way of compiling."""
    assert decided(mode) == decided("eager") and len(decided("eager")) == 4


@pytest.mark.parametrize("policy", ["stop", "recover"])
def test_11_the_stop_path_on_a_bad_model(policy, tmp_path):
    """No callback receives or saves a bad model when training ends."""

    class Witness(keras.callbacks.Callback):
        def _look(self, *args, **kwargs):
            if not self.damaged:
                assert zoo.bad_entries(self.model) == []
            self.damaged = False

        damaged = False
        on_train_batch_begin = on_train_batch_end = on_epoch_end = on_train_end = _look

    vandal = zoo.Before(lambda model: corrupt(model.layers[0].kernel), 6)
    file = tmp_path / "last.weights.h5"
    callbacks = [Witness(), vandal, keras.callbacks.ModelCheckpoint(file, save_weights_only=True)]
    guard = guarded(policy)
    run = zoo.run(eager, zoo.overflowing(*range(8, 24), count=24), guard=guard, epochs=1, callbacks=callbacks)
    assert run.model.stop_training
    fresh = eager()
    fresh.load_weights(file)
    assert zoo.bad_entries(fresh) == []


@pytest.mark.parametrize(("where", "site"), [("x", "inputs"), ("y", "targets")])
def test_12_bad_data_is_not_an_ordinary_overflow(where, site):
    """Also with loss scaling, if the loss is finite and only the gradients are not."""
    keras.config.set_dtype_policy("mixed_float16")
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=64.0)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, activation="tanh"), layers.Dense(1, dtype="float32")])
    model.compile(scaled, lambda y, found: ops.tanh(ops.square(y - found)))
    data, guard = zoo.poison(zoo.regression(), 5, np.inf, where), NanGuard(verbose=0)
    zoo.fit(model, data, guard)
    (incident,) = guard.incidents
    assert (incident.step, incident.sites, guard.session.run.counts.overflows) == (5, (site, "gradients"), 0)


def test_14_forensics_on_the_wrong_batch(tmp_path):
    """The stored batch of shuffled data is the bad one, and the rows are the bad rows."""
    data = zoo.regression()
    data.x[37, 2] = np.nan
    guard = NanGuard(verbose=0, directory=tmp_path)
    model = eager(dropout=False)
    model.fit(data.x, data.y, batch_size=8, shuffle=True, verbose=0, callbacks=[guard])
    (incident,) = guard.incidents
    x, y = np.load(Path(incident.bundle, "batch.npz")).values()
    rows = np.flatnonzero(np.isnan(x).any(1))
    np.testing.assert_array_equal(x[rows[0]], data.x[37])
    np.testing.assert_array_equal(y[rows[0]], data.y[37])
    assert incident.diagnosis.samples == tuple(rows.tolist()) and incident.diagnosis.cause == "input_nonfinite"
