"""Loss scales far from 1 that dynamic scaling has found are healthy."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_nanguard import NanGuard

LossScale = keras.optimizers.LossScaleOptimizer


def data(scale):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 8)).astype("float32")
    return x * scale, np.abs(x[:, :1]) * scale


def squared_error(y_true, y_pred):
    return keras.ops.mean((y_true - y_pred) ** 2)


def tiny_error(y_true, y_pred):
    return squared_error(y_true, y_pred) * 1e-13


HIGH = {"initial_scale": 2.0**30, "dynamic_growth_steps": 40}
PROGRAMS = {
    "below 1": (1000.0, squared_error, 1e-7, {}, lambda scale: scale < 1.0),
    "above 2^32": (1.0, tiny_error, 1e-20, HIGH, lambda scale: scale > 2.0**32),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_training_is_that_of_plain_keras(name):
    """The guard does not act, and the run has the weights and the scale of plain Keras."""
    factor, loss, epsilon, options, is_expected = PROGRAMS[name]
    x, y = data(factor)
    results, guard = [], NanGuard(verbose=0)
    for callbacks in ([], [guard]):
        keras.utils.set_random_seed(0)
        body = [layers.Dense(16, "relu", dtype="mixed_float16"), layers.Dense(1, dtype="float32")]
        model = keras.Sequential([keras.Input((8,)), *body])
        optimizer = LossScale(keras.optimizers.Adam(0.01, epsilon=epsilon), **options)
        model.compile(optimizer, loss)
        model.fit(x, y, batch_size=8, epochs=40, verbose=0, callbacks=callbacks)
        scale = float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))
        results.append([scale, *model.get_weights()])
    plain, guarded = results
    assert is_expected(plain[0])
    assert not guard.incidents
    for one, other in zip(plain, guarded):
        np.testing.assert_array_equal(one, other)


def test_needlessly_low():
    """A scale below 1, set by other code, is a collapse if the step is finite at a higher one."""
    x, y = data(1.0)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(1, dtype="mixed_float16")])
    optimizer = LossScale(keras.optimizers.SGD(0.01), initial_scale=2.0**-10)
    model.compile(optimizer, "mse")
    guard = NanGuard(verbose=0)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[guard])
    (incident,) = guard.incidents
    assert incident.diagnosis.cause == "loss_scale_collapsed"
    assert float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)) == 1024.0


def test_a_low_scale_after_a_change_that_is_built_into_the_step():
    """An action has created the step again, so the arguments of the last step are gone when the
    scale is checked: whether it overflows at a higher one is unknown, and training continues.
    """
    x, y = data(1.0)
    x[0, 0] = np.nan
    model = keras.Sequential([keras.Input((8,)), layers.Dense(1, dtype="mixed_float16")])
    optimizer = LossScale(keras.optimizers.SGD(0.01), initial_scale=2.0**-10)
    model.compile(optimizer, "mse")
    guard = NanGuard(verbose=0, rules=[{"name": "clip", "do": ["clip"]}])
    model.fit(x, y, batch_size=8, verbose=0, shuffle=False, callbacks=[guard])
    assert [incident.changes for incident in guard.incidents] == [("clip",)]
    assert guard.summary().startswith("NanGuard: 8 steps, 1 skipped, 1 incident.")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_scale_before_training(value, capsys):
    """It is reported and reset before the first step: no step is refused, and a snapshot is kept."""
    x, y = data(1.0)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(1, dtype="mixed_float16")])
    optimizer = LossScale(keras.optimizers.SGD(0.01), initial_scale=2.0**10)
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    optimizer.dynamic_scale.assign(value)
    guard, kept = NanGuard(), []
    see = keras.callbacks.LambdaCallback(on_train_end=lambda logs: kept.append(guard.session.run.ring.start))
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[see, guard])
    (incident,) = guard.incidents
    assert [(f.site, f.kind) for f in incident.findings] == [("loss_scale", "collapse")]
    assert incident.diagnosis.cause == "loss_scale_collapsed" and incident.changes == ("fix_loss_scale",)
    assert float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)) == 1024.0
    assert guard.summary().startswith("NanGuard: 8 steps, 0 skipped, 1 incident.") and kept[0] is not None
    assert "the loss scale collapsed; loss scale reset" in capsys.readouterr().out


def test_far_too_high():
    """A scale that other code has raised beyond the ceiling is named, and lowered to it."""

    class Raise(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3:
                self.model.optimizer.dynamic_scale.assign(2.0**100)  # on JAX, `model` reads the state

    x, y = data(1.0)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(1, dtype="mixed_float16")])
    optimizer = LossScale(keras.optimizers.SGD(0.01))
    model.compile(optimizer, "mse")
    guard = NanGuard(verbose=0)
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[guard, Raise()])
    (incident,) = guard.incidents
    assert ("loss_scale", "out_of_range", 2.0**100) in [(f.site, f.kind, f.value) for f in incident.findings]
    assert 1.0 <= float(keras.ops.convert_to_numpy(optimizer.dynamic_scale)) <= guard.policy.loss_scale.ceiling
