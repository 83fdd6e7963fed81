"""What a run records of rates and loss scales that it brings back, and of a fit that begins with a later epoch."""

from __future__ import annotations

import keras
import pytest
from support import zoo

from keras_nanguard import NanGuard

QUIET = {"verbose": 0, "diagnose": False}


def acting(action):
    """Return a guard that does this about each incident."""
    return NanGuard({"rules": [{"name": "act", "do": [action]}]}, **QUIET)


def test_rate_that_returns():
    """While a rate returns it is an event once in an interval, and when it has; no change of the guard's is that of a callback."""
    guard = acting({"lower_lr": {"factor": 1e-4, "recover_after": 2, "ramp": 30}})
    moments = iter(range(10**6))
    guard._recorder._now = lambda: 0.02 * next(moments)
    data = zoo.poison(zoo.regression(batches=60), 5)
    zoo.run(lambda: zoo.plain(keras.optimizers.SGD(0.02)), data, guard=guard, epochs=1)
    first, *events = (e for e in guard.recording.events if e.kind == "learning_rate")
    assert first.data == {"factor_before": 1.0, "factor": 1e-4, "by": "guard"} and {e.data["by"] for e in events} == {"guard"}
    factors = [1e-4, *(e.data["factor"] for e in events)]
    assert factors == sorted(factors) and factors[-1] == 1.0 and [e.data["factor_before"] for e in events] == factors[:-1]
    assert 2 <= len(events) <= 12 and events[-1].step == 37


def test_first_epoch_is_another_one():
    """A fit that begins with a later epoch is recorded as that one, and so are its means."""
    data = zoo.regression()
    guard = NanGuard(**QUIET)
    model = zoo.plain(keras.optimizers.SGD(0.01))
    history = model.fit(*data.all, batch_size=zoo.BATCH, initial_epoch=2, epochs=4, verbose=0, callbacks=[guard]).history
    steps = guard.recording.steps
    assert steps["epoch"].tolist() == [2] * 12 + [3] * 12 and steps["batch"].tolist() == [*range(12)] * 2
    norms = [steps["gradient_norm"][steps["epoch"] == epoch].mean() for epoch in (2, 3)]
    assert history["nanguard/grad_norm"] == pytest.approx(norms)
    assert [event.epoch for event in guard.recording.events] == [2, 2, 3, 3]
