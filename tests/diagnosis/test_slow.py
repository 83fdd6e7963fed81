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


@pytest.mark.parametrize("verbose", [0, 1])
def test_a_slow_diagnosis_is_announced_before_its_line(capsys, set_limit, verbose):
    """The third batch has a bad row; a silent guard announces nothing."""
    set_limit("seconds until a diagnosis is slow", SECONDS / 2)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), Slow(), layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    x = np.random.default_rng(0).standard_normal((24, 4)).astype("float32")
    x[20] = np.nan
    guard = NanGuard(verbose=verbose)
    model.fit(x, x[:, :1] * 0, batch_size=8, shuffle=False, verbose=0, callbacks=[guard])
    out, line = capsys.readouterr().out, "NanGuard: diagnosing step 3 (epoch 1, batch 3) ..."
    assert len(guard.incidents) == 1 and out.count("diagnosing") == out.count(line) == verbose
    assert not verbose or out.index(line) < out.index("NanGuard: skipped step 3 (epoch 1)")
