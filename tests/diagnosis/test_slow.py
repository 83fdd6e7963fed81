"""A slow diagnosis is announced once, unless printing is off."""

import time

import keras
import numpy as np
import pytest
from keras import layers

from keras_nanguard import NanGuard

pytestmark = pytest.mark.requires_backend("tensorflow", "torch", reason="a layer that sleeps")

SECONDS = 0.4
"""How long a row takes in a slow layer."""


class Slow(layers.Layer):
    """Is slow for each batch after a bad one."""

    bad = False

    def call(self, x):
        if self.bad:
            time.sleep(SECONDS)
        self.bad = self.bad or not np.isfinite(keras.ops.convert_to_numpy(x)).all()
        return x


def fit(capsys, set_limit, layer, verbose=1):
    """Fit with one bad row in the third batch. Return the output and the guard."""
    set_limit("seconds until a diagnosis is slow", SECONDS / 2)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layer, layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    x = np.random.default_rng(0).standard_normal((24, 4)).astype("float32")
    x[20] = np.nan
    guard = NanGuard(verbose=verbose)
    model.fit(x, x[:, :1] * 0, batch_size=8, shuffle=False, verbose=0, callbacks=[guard])
    return capsys.readouterr().out, guard


def test_a_slow_diagnosis_is_announced_before_its_line(capsys, set_limit):
    out, guard = fit(capsys, set_limit, Slow())
    line = "NanGuard: diagnosing step 3 (epoch 1, batch 3) ..."
    assert out.count(line) == 1 == len(guard.incidents)
    assert out.index(line) < out.index("NanGuard: skipped step 3 (epoch 1)")


def test_a_silent_guard_prints_nothing(capsys, set_limit):
    """Not even about a slow diagnosis."""
    out, guard = fit(capsys, set_limit, Slow(), verbose=0)
    assert "diagnosing" not in out and len(guard.incidents) == 1
