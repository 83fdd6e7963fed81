"""Losses outside of their domain, and derivatives that are not finite."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from mechanisms.case import Case, classes, data, mlp, program, stack


@program
def one_bad_loss_of_two_outputs(bad: bool) -> Case:
    def log_error(y_true: Any, y_pred: Any) -> Any:
        return ops.square(ops.log(y_true) - y_pred)

    inputs = keras.Input((4,))
    h = layers.Dense(8, activation="tanh")(inputs)
    model = keras.Model(inputs, {"main": layers.Dense(1, name="main")(h), "side": layers.Dense(1, name="side")(h)})
    model.compile("sgd", {"main": "mse", "side": log_error})
    x, y = data()
    side = np.abs(y) + 0.1
    if bad:
        side[26] = 0.0
    return Case(model, x, {"main": y, "side": side}, ("loss_domain",), "log_error", (2,), 3)


@program
def divergence_of_probabilities_with_zeros(bad: bool) -> Case:
    def kl(p: Any, q: Any) -> Any:
        p = p if bad else ops.maximum(p, 1e-7)
        return ops.sum(p * ops.log(p / q), axis=-1)

    x, y = classes()
    y = keras.utils.to_categorical(y, 3)
    return Case(mlp(out=3, activation="softmax", loss=kl), x, y, ("loss_domain",), "kl", None, 0)


@program
def added_loss_is_nan(bad: bool) -> Case:
    class Entropy(layers.Layer):
        def call(self, t: Any) -> Any:
            p = ops.relu(t)
            self.add_loss(0.01 * ops.mean(p * ops.log(p if bad else p + 1e-6)))
            return t

    x, y = data()
    return Case(mlp(Entropy(name="entropy")), x, y, ("loss_domain", "forward_domain"), "entropy", None, 0)


@program
def regulariser_overflows(bad: bool) -> Case:
    init = keras.initializers.Constant(1e20 if bad else 0.1)
    bias = layers.Dense(4, kernel_initializer="zeros", bias_initializer=init, bias_regularizer="l2", name="big")
    model = stack(bias, layers.Activation("tanh"), layers.Dense(1))
    x, y = data()
    return Case(model, x, y, ("loss_domain",), "big/bias", (), 0)


@program
def mean_over_an_empty_mask(bad: bool) -> Case:
    def masked(y_true: Any, y_pred: Any) -> Any:
        keep = ops.cast(y_true > -9.0, "float32")
        count = ops.sum(keep)
        return ops.sum(keep * ops.square(y_true - y_pred)) / (count if bad else ops.maximum(count, 1.0))

    x, y = data()
    y[24:32] = -10.0
    return Case(mlp(loss=masked), x, y, ("loss_domain",), "masked", (), 3)


@program
def loss_of_exponentials(bad: bool) -> Case:
    def nll(y_true: Any, log_variance: Any) -> Any:
        s = log_variance if bad else ops.clip(log_variance, -10.0, 10.0)
        return 0.5 * (ops.exp(-s) * ops.square(y_true) + s)

    x, y = data()
    x[30] *= 5000.0 if bad else 1.0
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(1, kernel_initializer=keras.initializers.Constant(-0.5), name="s")]
    )
    model.compile(keras.optimizers.SGD(1e-4), nll)
    if bad:
        x[30] = np.abs(x[30])
    return Case(model, x, y, ("loss_domain",), "nll", (6,), 3)


@program
def square_root_at_zero(bad: bool) -> Case:
    x, y = data()
    x[17] = 0.0

    def length(t: Any) -> Any:
        return ops.sqrt(ops.sum(ops.square(t), -1, keepdims=True) + (0.0 if bad else 1e-6))

    model = stack(
        layers.Dense(4, use_bias=False), layers.Lambda(length, name="length"), layers.Dense(1)
    )
    return Case(model, x, y, ("gradient_domain",), "length", (1,), 2)


@program
def the_where_trap(bad: bool) -> Case:
    def safe_log(t: Any) -> Any:
        positive = t > 0.0
        return ops.where(positive, ops.log(t if bad else ops.where(positive, t, 1.0)), 0.0)

    x, y = data()
    x[33] = 0.0
    model = stack(
        layers.Dense(4, use_bias=False, name="first"),
        layers.Lambda(safe_log, name="safe"),
        layers.Dense(1),
    )
    return Case(model, x, y, ("gradient_domain",), "safe")


@program
def power_below_one_at_zero(bad: bool) -> Case:
    x, y = data()
    x[9] = 0.0
    power = layers.Lambda(lambda t: ops.power(ops.abs(t) + (0.0 if bad else 1e-3), 0.5), name="power")
    model = stack(layers.Dense(4, use_bias=False), power, layers.Dense(1))
    return Case(model, x, y, ("gradient_domain",), "power", (1,), 1)


@program
def masked_targets_that_are_nan(bad: bool) -> Case:
    def masked(y_true: Any, y_pred: Any) -> Any:
        known = ops.logical_not(ops.isnan(y_true))
        return ops.where(known, ops.square((y_true if bad else ops.where(known, y_true, 0.0)) - y_pred), 0.0)

    x, y = data()
    y[10] = np.nan
    return Case(mlp(loss=masked), x, y, ("gradient_domain", "target_nonfinite"), "", (2,), 1)
