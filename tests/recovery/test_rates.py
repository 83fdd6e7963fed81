"""The learning rate is a factor times what others set, however often they set it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from keras import optimizers

from keras_nanguard import NanGuard
from keras_nanguard._fit.learning_rates import Rate


def test_factor_is_applied_once():
    """A callback that sets the rate before each batch meets the same factor each time."""
    optimizer = optimizers.SGD(3.0)
    rate = Rate(optimizer)
    rate.lower(0.1, 0.0)
    for step in range(2000):
        optimizer.learning_rate = 3.0 * (1 - step / 4000)
        rate.hold()
        rate.hold()
        assert rate.value == pytest.approx(0.3 * (1 - step / 4000), rel=1e-5)
        assert rate.factor == pytest.approx(0.1, rel=1e-5)
    rate.give_back()
    assert rate.value == pytest.approx(1.50075, rel=1e-4)


@given(st.lists(st.tuples(st.sampled_from(["lower", "set"]), st.floats(0.05, 0.95)), max_size=12))
@settings(max_examples=40)
def test_rate_of_a_callback_that_computes_it(actions):
    """Against the closed form: a factor, and the rate that the callback has set last."""
    optimizer = optimizers.SGD(1.0)
    rate, base, factor = Rate(optimizer), 1.0, 1.0
    rate._absolute = True  # known from an earlier change
    for action, number in actions:
        now = base * factor
        if action == "lower":
            rate.lower(number, 0.0)
            factor *= number
        elif abs(number / now - 1) > 1e-3:  # else nobody can tell that it was set
            optimizer.learning_rate = base = number
            rate.hold()
        assert rate.value == pytest.approx(base * factor, rel=1e-4)
        assert rate.factor == pytest.approx(factor, rel=1e-4)


def test_rate_that_a_callback_scales_is_taken_at_its_word():
    """A callback that halves the rate it finds continues from the lowered one."""
    optimizer = optimizers.SGD(1.0)
    rate = Rate(optimizer)
    rate.lower(0.1, 0.0)
    optimizer.learning_rate = 0.05
    rate.hold()
    assert rate.value == pytest.approx(0.05) and rate.factor == pytest.approx(0.1)


class EachBatch(keras.callbacks.Callback):
    """Sets the rate before each batch, as if nobody else did."""

    seen = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.seen += 1
        self.model.optimizer.learning_rate = 3.0 * (1 - self.seen / 4000)


def test_rate_set_before_each_batch_of_a_run_that_diverges():
    """A fit whose rate was lowered ends, however often another callback sets it."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, 8)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(16, activation="relu")
    model = keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(1)])
    model.compile(optimizers.SGD(3.0), "mse")
    each, guard = EachBatch(), NanGuard(verbose=0, diagnose=False)
    model.fit(x, y, epochs=25, shuffle=False, verbose=0, callbacks=[each, guard])
    assert each.seen <= 400 and all(np.isfinite(w).all() for w in model.get_weights())
