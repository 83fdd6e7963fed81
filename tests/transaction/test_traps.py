"""Known failures of other guards, by their numbers in a common list."""

from __future__ import annotations

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
