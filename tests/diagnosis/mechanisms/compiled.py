"""The same mechanisms in other modes: eager, XLA, several steps per execution, custom steps."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from mechanisms.case import Case, data, linear, mlp, not_on, program, tensorflow_alone, tf, unary


def _log(bad: bool, **compile_: Any) -> Case:
    log = (lambda t: ops.log(t - 0.2)) if bad else (lambda t: ops.log(ops.abs(t) + 1.0))
    return Case(unary(log, "logs", **compile_), *data(), ("forward_domain",), "logs", None, 0)


@program
def log_eagerly(bad: bool) -> Case:
    return _log(bad, run_eagerly=True)


def _nan_row(bad: bool, **compile_: Any) -> Case:
    x, y = data()
    if bad:
        x[43] = np.nan
    model = mlp(steps_per_execution=4, **compile_)
    return Case(model, x, y, ("input_nonfinite",), "inputs", (3,), 5)


@not_on("torch", "Keras runs no several steps in one execution there")
def nan_row_several_steps_at_once(bad: bool) -> Case:
    return _nan_row(bad)


class Sharpness(keras.Model):
    """A model that moves its weights, computes a second gradient there, and moves them back."""

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, weights)
        for weight, gradient in zip(weights, gradients):
            weight.assign_add(0.01 * gradient)
        with tf.GradientTape() as tape:
            second = self.compute_loss(x, y, self(x, training=True))
        there = tape.gradient(second, weights)
        for weight, gradient in zip(weights, gradients):
            weight.assign_sub(0.01 * gradient)
        self.optimizer.apply_gradients(zip(there, weights))
        return {"loss": loss}


@tensorflow_alone("its train step is written with tf.GradientTape")
def bad_row_in_a_step_that_writes_its_weights(bad: bool) -> Case:
    inputs = keras.Input((4,))
    h = layers.Lambda(lambda t: ops.sqrt(ops.abs(t) + 0.1) if not bad else ops.sqrt(t + 9.0), name="root")(inputs)
    model = Sharpness(inputs, layers.Dense(1)(h))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x, y = data()
    if bad:
        x[50, 1] = -10.0
    return Case(model, x, y, ("forward_domain",), "root", (2,), 6)


@tensorflow_alone("its train step is written with tf.GradientTape")
def bad_target_in_a_step_of_ones_own(bad: bool) -> Case:
    class Mine(keras.Model):
        def __init__(self, **kwargs: Any):
            super().__init__(**kwargs)
            self.error = keras.losses.MeanSquaredError(name="my_error")

        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = self.error(y, self(x, training=True))
            self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
            return {"loss": loss}

    inputs = keras.Input((4,))
    model = Mine(inputs=inputs, outputs=layers.Dense(1)(inputs))
    model.compile("sgd")
    x, y = data()
    if bad:
        y[9] = np.inf
    return Case(model, x, y, ("target_nonfinite",), "targets", (1,), 1)


@program
def schedule_that_jumps(bad: bool) -> Case:
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([20], [0.01, 30.0 if bad else 0.005])
    x, y = data(512)
    return Case(linear(keras.optimizers.SGD(rate)), x, y, ("divergence",))


@program
def accumulation_with_a_bad_row(bad: bool) -> Case:
    x, y = data()
    if bad:
        x[25, 0] = np.inf
    model = mlp(optimizer=keras.optimizers.Adam(0.01, gradient_accumulation_steps=3, use_ema=True))
    return Case(model, x, y, ("input_nonfinite",), "inputs", (1,), 3)


@tensorflow_alone("its train step is written with tf.GradientTape")
def clipping_by_a_norm_of_zero(bad: bool) -> Case:
    class Clipped(keras.Model):
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            norm = tf.sqrt(tf.add_n([tf.reduce_sum(g * g) for g in gradients]))
            gradients = [g / (norm if bad else tf.maximum(norm, 1e-9)) for g in gradients]
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return {"loss": loss}

    inputs = keras.Input((4,))
    model = Clipped(inputs, layers.Dense(1, kernel_initializer="zeros")(inputs))
    model.compile("sgd", "mse")
    x, y = data()
    y[:] = 0.0
    return Case(model, x, y, ("gradient_domain", "loss_domain"), "", None, 0)


@not_on("jax", "every step on JAX is compiled by XLA, which keeps this slope there")
def root_whose_slope_only_xla_loses(bad: bool) -> Case:
    def root(t: Any) -> Any:
        square = ops.sum(ops.square(t), -1, keepdims=True)
        there = square > 0.0
        return ops.where(there, ops.sqrt(square if bad else ops.where(there, square, 1.0)), 0.0)

    first = layers.Dense(4, use_bias=False, name="first")
    model = keras.Sequential([keras.Input((4,)), first, layers.Lambda(root, name="root"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.001), "mse", jit_compile=True)
    x, y = data()
    x[17] = 0.0
    return Case(model, x, y, ("gradient_domain",), "root", (1,), 2)


@program
def hardware_that_fails_once(bad: bool) -> Case:
    class Flaky(layers.Layer):
        calls = 0

        def call(self, t: Any) -> Any:
            self.calls += 1
            return t * float("nan") if bad and self.calls == 6 else t

    x, y = data()
    return Case(mlp(Flaky(name="flaky"), run_eagerly=True), x, y, ("transient",), "", (), None)
