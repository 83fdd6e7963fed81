"""Divergence, and updates that overflow."""

import keras
import numpy as np
from keras import layers, ops

from mechanisms.case import Case, compiled, data, linear, program, stack


@program
def rate_too_high_for_sgd(bad: bool) -> Case:
    x, y = data(256)
    return Case(linear(keras.optimizers.SGD(3.0 if bad else 0.01)), x * 3, y, ("divergence",))


@program
def rate_too_high_for_adam_ends_in_exp(bad: bool) -> Case:
    x, y = data(512)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8), layers.Dense(1, activation="exponential", name="rate")]
    )
    model.compile(keras.optimizers.Adam(20.0 if bad else 1e-3), "poisson")
    return Case(model, x, np.abs(y), ("divergence",))


@program
def unbounded_recurrence(bad: bool) -> Case:
    constant, activation = keras.initializers.Constant, "relu" if bad else "tanh"
    start = {"recurrent_initializer": constant(0.6), "kernel_initializer": constant(0.3)}
    rnn = layers.SimpleRNN(16, activation, **start, name="rnn")
    model = stack(rnn, layers.Dense(1), shape=(60, 2))
    x = np.abs(np.random.default_rng(0).standard_normal((16, 60, 2))).astype("float32")
    return Case(model, x, np.ones((16, 1), "float32"), ("divergence",), "")


@program
def squared_gradient_overflows_in_adam(bad: bool) -> Case:
    x, y = data()
    model = linear(keras.optimizers.Adam(1e-3), loss=lambda a, b: ops.mean(ops.abs(a - b)) * (1e21 if bad else 1.0))
    return Case(model, x, y, ("optimizer_domain",), "velocity", None, 0)


@program
def optimizer_without_epsilon(bad: bool) -> Case:
    x, y = data()
    x[:, 2] = 0.0
    return Case(linear(keras.optimizers.RMSprop(1e-3, epsilon=0.0 if bad else 1e-7)), x, y, ("optimizer_domain",))


@program
def normalisation_of_a_feature_that_was_constant(bad: bool) -> Case:
    scale = layers.Normalization(mean=[0.0] * 4, variance=[1.0, 1.0, 1.0, 0.0 if bad else 1.0], name="normalise")
    model = stack(scale, layers.Dense(8), layers.Dense(1))
    x, y = data(256)
    return Case(model, x, y, ("input_scale",), "normalise", ())


@program
def one_outlier_ruins_the_moving_variance(bad: bool) -> Case:
    inputs = keras.Input((4,))
    h = layers.BatchNormalization(name="bn")(inputs)
    model = compiled(keras.Model(inputs, layers.Dense(1)(h)))
    x, y = data(800)
    if bad:
        x[77 * 8 + 3, 2] = 1e7
    return Case(model, x, y, ("batchnorm_statistics",), "bn", ())
