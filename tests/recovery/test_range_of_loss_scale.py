"""Large loss scales that dynamic scaling has found are healthy."""

import keras
import numpy as np
from keras import layers

from keras_nanguard import NanGuard

LossScale = keras.optimizers.LossScaleOptimizer


def data():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 8)).astype("float32")
    return x, np.abs(x[:, :1])


def tiny_error(y_true, y_pred):
    return keras.ops.mean((y_true - y_pred) ** 2) * 1e-13


def test_training_is_that_of_plain_keras():
    """The guard does not act, and the run has the weights and the scale of plain Keras."""
    x, y = data()
    results, guard = [], NanGuard(verbose=0)
    for callbacks in ([], [guard]):
        keras.utils.set_random_seed(0)
        body = [layers.Dense(16, "relu", dtype="mixed_float16"), layers.Dense(1, dtype="float32")]
        model = keras.Sequential([keras.Input((8,)), *body])
        adam = keras.optimizers.Adam(0.01, epsilon=1e-20)
        optimizer = LossScale(adam, initial_scale=2.0**30, dynamic_growth_steps=40)
        model.compile(optimizer, tiny_error)
        model.fit(x, y, batch_size=8, epochs=40, verbose=0, callbacks=callbacks)
        scale = float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))
        results.append([scale, *model.get_weights()])
    plain, guarded = results
    assert plain[0] > 2.0**32
    assert not guard.incidents
    for one, other in zip(plain, guarded):
        np.testing.assert_array_equal(one, other)
