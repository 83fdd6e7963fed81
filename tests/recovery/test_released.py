"""After a fit a guard keeps the data for its reports, but neither snapshots nor batches."""

import gc
import weakref

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard, NanGuardModel

OFTEN = {"every": 4, "verify_after": 1}


def arrays_of(guard):
    """Return weak references to the arrays of all snapshots."""
    found = [a for s in guard.session.run.ring.snapshots for a in s.arrays.values()]
    return [weakref.ref(a) for a in found if a.base is None]


class Looks(keras.callbacks.Callback):
    def __init__(self, guard):
        super().__init__()
        self.guard, self.arrays = guard, []

    def on_epoch_end(self, epoch, logs=None):
        self.arrays += arrays_of(self.guard)


def held(guard, looks):
    gc.collect()
    assert looks.arrays, "there were snapshots"
    return [ref for ref in looks.arrays if ref() is not None], guard.session.run.ring.snapshots


def test_after_fit(tmp_path):
    """No snapshot is kept, and the reports are complete."""
    guard = NanGuard(verbose=0, snapshot=OFTEN)
    looks = Looks(guard)
    run = zoo.run(zoo.plain, zoo.regression().with_poison([3]), guard=guard, callbacks=[looks])
    assert held(guard, looks) == ([], [])
    assert "2 skipped" in guard.summary() and len(guard.incidents) == 2
    assert guard.report(tmp_path / "run.html").stat().st_size > 10_000
    assert len(guard.recording.steps["loss"]) == 26
    run.model.fit(*zoo.regression().all, batch_size=zoo.BATCH, verbose=0, callbacks=[guard, looks])
    assert held(guard, looks) == ([], [])


def test_after_a_fit_of_a_guarded_model():
    """Nor in a `NanGuardModel`; its next step is guarded as before."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    model = NanGuardModel(inputs, keras.layers.Dense(1)(inputs), guard=NanGuard(verbose=0, snapshot=OFTEN))
    model.compile("adam", "mse")
    looks, data = Looks(model.nanguard), zoo.regression()
    model.fit(*data.all, batch_size=zoo.BATCH, verbose=0, callbacks=[looks])
    assert held(model.nanguard, looks) == ([], [])
    model.train_on_batch(data.x[:8] * np.nan, data.y[:8])
    assert model.nanguard.session.run.counts.refused == 1 and zoo.bad_entries(model) == []


def test_after_a_fit_that_fails():
    """Nor after an exception of another callback."""
    guard = NanGuard(verbose=0, snapshot=OFTEN)
    looks = Looks(guard)
    last = zoo.After(lambda model: looks.on_epoch_end(0), 9)
    fails = zoo.After(zoo.raising(RuntimeError("fails")), 9)
    with pytest.raises(RuntimeError, match="fails"):
        zoo.run(zoo.plain, zoo.regression(), guard=guard, callbacks=[last, fails])
    assert held(guard, looks) == ([], [])
