"""Recorded rates and loss scales that return, and a fit that begins with a later epoch."""

from __future__ import annotations

import math
import traceback

import keras
import numpy as np
import pytest
from support import zoo

from keras_nanguard import NanGuard, Recording
from keras_nanguard._keras import optimizers

QUIET = {"verbose": 0, "diagnose": False}


def acting(action):
    return NanGuard({"rules": [{"name": "act", "do": [action]}]}, **QUIET)


def test_rate_that_returns():
    """The return of a rate is an event; a change by the guard is not attributed to a callback."""
    guard = acting({"lower_lr": {"factor": 1e-4, "recover_after": 32}})
    moments = iter(range(10**6))
    guard._log.recorder._now = lambda: 0.02 * next(moments)
    data = zoo.poison(zoo.regression(batches=60), 5)
    zoo.run(lambda: zoo.plain(keras.optimizers.SGD(0.02)), data, guard=guard, epochs=1)
    first, *events = (e for e in guard.recording.events if e.kind == "learning_rate")
    assert first.data == {"factor_before": 1.0, "factor": 1e-4, "by": "guard"} and {e.data["by"] for e in events} == {"guard"}
    assert [(e.step, e.data["factor_before"], e.data["factor"]) for e in events] == [(37, 1e-4, 1.0)]


def test_first_epoch_is_another_one():
    """A fit that begins with a later epoch is recorded with that epoch, and so are its means."""
    data = zoo.regression()
    guard = NanGuard(**QUIET)
    model = zoo.plain(keras.optimizers.SGD(0.01))
    history = model.fit(*data.all, batch_size=zoo.BATCH, initial_epoch=2, epochs=4, verbose=0, callbacks=[guard]).history
    steps = guard.recording.steps
    assert steps["epoch"].tolist() == [2] * 12 + [3] * 12 and steps["batch"].tolist() == [*range(12)] * 2
    norms = [steps["gradient_norm"][steps["epoch"] == epoch].mean() for epoch in (2, 3)]
    assert history["nanguard/grad_norm"] == pytest.approx(norms)
    assert [event.epoch for event in guard.recording.events] == [2, 2, 3, 3]


def test_rates_of_an_earlier_process(tmp_path):
    """A run in a directory with an earlier one leaves the rates of the earlier one."""
    data = zoo.regression()
    for rate in (0.02, 0.01):
        guard = NanGuard(directory=tmp_path, **QUIET)
        zoo.plain(keras.optimizers.SGD(rate)).fit(*data.all, batch_size=zoo.BATCH, epochs=2, verbose=0, callbacks=[guard])
    expected = np.float32([0.02] * 24 + [0.01] * 24)
    for recording in (guard.recording, Recording.read(tmp_path)):
        np.testing.assert_array_equal(recording.steps["learning_rate"], expected)


def read_by_guard():
    """Whether the guard reads a rate now, and not a step of Keras."""
    return any(frame.filename == optimizers.__file__ for frame in traceback.extract_stack())


def train(rate, guard):
    """Train with a bad last batch."""
    data = zoo.poison(zoo.regression(), zoo.BATCHES - 1)
    eager = keras.backend.backend() != "jax"
    zoo.run(lambda: zoo.plain(keras.optimizers.SGD(rate), run_eagerly=eager), data, guard=guard, epochs=1)


def test_a_custom_function_is_not_read():
    """It may count its calls, so only steps call it, and a diagnosis, which needs its value."""
    reads = []

    def rate():
        if read_by_guard():
            reads.append("".join(traceback.format_stack()))
        return 0.01

    guard = NanGuard(**QUIET)
    train(rate, guard)
    assert len(guard.incidents) == 1 and reads == []


def test_a_schedule_that_raises_outside_of_a_step():
    """It does not end training, and the incident has no rate."""

    class Schedule(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            if read_by_guard():
                raise RuntimeError("no rate")
            return 0.01

    guard = NanGuard(**QUIET)
    train(Schedule(), guard)
    (incident,) = guard.incidents
    assert incident.refused and "learning_rate" not in incident.values


def test_a_custom_function_that_is_to_blame(capsys):
    """The line of its incident has no number, because the incident has none."""
    train(lambda: math.inf, NanGuard())
    lines = capsys.readouterr().out.splitlines()
    assert "the learning rate was out of range" in lines[0] and "nan." not in lines[0], lines
