"""Trouble that stays finite is reported, by tests that no healthy run can meet."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers
from support.calls import calls_of

from keras_nanguard import NanGuard
from keras_nanguard._core.history import START_STEPS, History, sizes


def test_frozen_and_pretrained_statistics_may_stand_still():
    keras.utils.set_random_seed(0)
    base = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.BatchNormalization()], name="base")
    base.layers[-1].moving_mean.assign([0.1] * 4)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1)(base(inputs, training=False)))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x = np.random.default_rng(0).standard_normal((800, 4)).astype("float32")
    guard = NanGuard(verbose=0)
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[guard])
    assert guard.incidents == []


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-25, 1e-8, 1.0, 1e8, 1e25, 1e37])
def test_sizes(scale):
    """They are those of the closed form, at magnitudes whose squares overflow float32."""
    array = (np.random.default_rng(0).normal(size=(40, 50)) * scale).astype("float32")
    wide = array.astype("float64")
    assert sizes(array) == pytest.approx((np.linalg.norm(wide), np.abs(wide).max()), rel=1e-5)


def test_sizes_of_what_is_not_finite():
    assert sizes(np.array([1.0, np.inf])) == (np.inf, np.inf)
    assert sizes(np.array([1.0, np.nan]))[0] == np.inf
    assert sizes(np.array([3, 4])) == (0.0, 0.0) == sizes(np.zeros(0))
    assert sizes(np.array([3j, 4.0])) == (5.0, 4.0)


def test_remembering_a_step_appends_and_does_nothing_else():
    """All arithmetic waits until an incident needs it; the first few steps are kept a second time."""
    history = History()
    calls = [calls_of(history.push, step, 1.0, 2.0, 1.0) for step in range(500)]
    assert calls == [["push", "append", "append"]] * START_STEPS + [["push", "append"]] * (500 - START_STEPS)


def test_history_gives_back_the_last_steps_in_order():
    history = History()
    for step in range(300):
        history.push(step, float(step + 1), 2.0, 2.0)
    kept = history.before(250)
    assert [e.step for e in kept] == list(range(122, 250))
    assert [e.step for e in history.first(3)] == [0, 1, 2]
    assert kept[0].norm == 1.0
    assert history.jump(300)[0] == 300.0
