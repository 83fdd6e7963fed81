"""What a run records of rates and loss scales that it brings back, and of a fit that begins with a later epoch."""

from __future__ import annotations

import keras
import pytest
from support import zoo

from keras_nanguard import NanGuard

QUIET = {"verbose": 0, "diagnose": False}


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
