"""Defects of stock Keras on one device, which do not occur with the guard."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers
from support import zoo

from keras_nanguard import NanGuard


def half(scale=2.0**15, growth=2000):
    """Return a mixed_float16 model with BatchNormalization and dynamic loss scaling."""
    dtype = "mixed_float16"
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, dtype=dtype),
            layers.BatchNormalization(dtype=dtype),
            layers.Dense(1, dtype="float32"),
        ]
    )
    inner = keras.optimizers.Adam(0.01)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=scale, dynamic_growth_steps=growth)
    model.compile(optimizer, "mse")
    return model


def fit(build, data, *callbacks):
    keras.utils.set_random_seed(0)
    model = build()
    return model, zoo.fit(model, data, *callbacks)


def test_skipped_update_ruins_batchnorm():
    """The scaler skips the update, but stock BatchNorm and the loss stay NaN."""
    data = zoo.poison(zoo.regression(), 3, np.inf)
    model, history = fit(half, data)
    assert np.isnan(history["loss"][0])
    assert any("moving" in path for path in zoo.bad_entries(model))
    assert np.isnan(model.predict(zoo.draw(1), verbose=0)).all()

    guard = NanGuard(verbose=0)
    model, history = fit(half, data, guard)
    assert np.isfinite(history["loss"][0]) and zoo.bad_entries(model) == []
    assert np.isfinite(model.predict(zoo.draw(1), verbose=0)).all()
    assert [i.step for i in guard.incidents] == [3]


def test_loss_scale_falls_to_zero():
    """After 165 bad steps it is 0, and a clean batch writes NaN into the weights."""
    bad, clean = zoo.regression(batches=170), zoo.regression(batches=1)
    bad.y[:] = np.inf
    data = zoo.Data(np.concatenate([bad.x, clean.x]), np.concatenate([bad.y, clean.y]))
    dense = lambda: _without_batchnorm()  # noqa: E731
    model, _ = fit(dense, data)
    assert float(model.optimizer.dynamic_scale.numpy()) == 0.0
    assert any("kernel" in path for path in zoo.bad_entries(model))

    guard = NanGuard(verbose=0)
    model, _ = fit(dense, data, guard)
    scale = float(model.optimizer.dynamic_scale.numpy())
    assert scale > 0 and np.isfinite(scale) and zoo.bad_entries(model) == []


def _without_batchnorm():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1, dtype="mixed_float16")])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)), "mse")
    return model


@pytest.mark.parametrize("value", [0.0, np.inf, np.nan])
def test_invalid_loss_scale_stays_invalid(value):
    """Training learns nothing or is lost; the guard resets the scale."""

    data = zoo.regression()
    model, _ = fit(_without_batchnorm, data, zoo.Before(lambda model: model.optimizer.dynamic_scale.assign(value), 3))
    scale = float(model.optimizer.dynamic_scale.numpy())
    assert zoo.bad_entries(model) or not (scale > 0 and np.isfinite(scale))

    guard = NanGuard(verbose=0)
    model, _ = fit(_without_batchnorm, data, zoo.Before(lambda model: model.optimizer.dynamic_scale.assign(value), 3), guard)
    scale = float(model.optimizer.dynamic_scale.numpy())
    assert scale > 0 and np.isfinite(scale) and zoo.bad_entries(model) == []
    assert guard.incidents[0].step == 3 and "loss_scale" in guard.incidents[0].sites


def test_adam_stops_after_a_huge_gradient():
    """Adam's second moment is Inf, and that weight never changes again."""

    def build():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    data = zoo.regression()
    data.x[3 * zoo.BATCH] = 3e10
    model, _ = fit(build, data)
    assert any("velocity" in path for path in zoo.bad_entries(model))
    guard = NanGuard(verbose=0)
    model, _ = fit(build, data, guard)
    assert zoo.bad_entries(model) == [] and guard.incidents[0].step == 3
