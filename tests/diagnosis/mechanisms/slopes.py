"""Derivatives that are not finite, regularizers, complex numbers, outliers and unbounded rates."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from mechanisms.case import Case, compiled, data, linear, not_on, program, stack, unary

BATCH = 8
"""Rows of a batch."""


class Sparsity(keras.regularizers.Regularizer):
    """Divergence between an activity of 0.1 and the mean activity of each unit."""

    def __init__(self, epsilon: float):
        self.epsilon = epsilon

    def __call__(self, x: Any) -> Any:
        mean = ops.clip(ops.mean(x, axis=0), self.epsilon, 1.0 - 1e-3)
        return 1e-3 * ops.sum(0.1 * ops.log(0.1 / mean))


@program
def a_regularizer_of_outputs_leaves_its_domain(bad: bool) -> Case:
    """A unit is dead, and there are as many units as rows: no row is to blame."""
    bias = np.ones(BATCH, "float32")
    bias[3] = -100.0
    code = layers.Dense(
        BATCH,
        activation="relu",
        bias_initializer=lambda shape, dtype=None: ops.convert_to_tensor(bias),
        activity_regularizer=Sparsity(0.0 if bad else 1e-3),
        name="code",
    )
    model = stack(code, layers.Dense(1, name="head"))
    return Case(model, *data(), ("loss_domain",), "code", (), 0)


class GroupLasso(keras.regularizers.Regularizer):
    """Sum of the norms of the columns."""

    def __init__(self, epsilon: float):
        self.epsilon = epsilon

    def __call__(self, x: Any) -> Any:
        return 1e-3 * ops.sum(ops.sqrt(ops.sum(ops.square(x), axis=0) + self.epsilon))


@program
def the_slope_of_a_regularizer(bad: bool) -> Case:
    """The norm of a column of zeros has no derivative."""
    lasso = GroupLasso(0.0 if bad else 1e-6)
    copy = layers.Dense(6, kernel_initializer=keras.initializers.Identity(), kernel_regularizer=lasso, name="copy")
    model = stack(copy, layers.Dense(1, name="head"))
    return Case(model, *data(), ("gradient_domain",), "copy", None, 0)


@program
def the_slope_of_an_angle(bad: bool) -> Case:
    """The cosine of an angle of 0 is 1, at which acos has no derivative."""
    x, y = data()
    if bad:
        x[26] = 1e3
    model = unary(lambda t: ops.arccos(ops.clip(t, -1.0, 1.0)) if bad else t, "angle")
    return Case(model, x, y, ("gradient_domain",), "angle", (2,), 3)


@not_on("torch", "its arctan2 has the derivative 0 there")
def the_slope_of_a_direction(bad: bool) -> Case:
    """A vector of zeros has no direction."""
    x, y = data()
    if bad:
        x[26] = 0.0
    inputs = keras.Input((4,))
    vector = layers.Dense(2, use_bias=False, name="vector")(inputs)
    angle = layers.Lambda(lambda v: ops.arctan2(v[:, :1], v[:, 1:]), name="angle")(vector)
    model = compiled(keras.Model(inputs, angle), optimizer=keras.optimizers.SGD(1e-3))
    return Case(model, x, y, ("gradient_domain",), "angle", (2,), 3)


@not_on("torch", "its power with the exponent 0 has the derivative 0")
def the_slope_of_a_power_in_a_loss_of_keras(bad: bool) -> Case:
    """A focal loss with gamma=0 raises 0 to the power of 0."""
    loss = keras.losses.BinaryFocalCrossentropy(gamma=0.0 if bad else 2.0, from_logits=True, name="focal")
    sure = layers.Dense(1, bias_initializer=keras.initializers.Constant(30.0), name="head")
    model = stack(sure, optimizer=keras.optimizers.SGD(1e-4), loss=loss)
    x, _ = data()
    return Case(model, x, np.ones((len(x), 1), "float32"), ("gradient_domain",), "focal", None, 0)


@program
def a_bad_value_passes_through_complex_numbers(bad: bool) -> Case:
    """The logarithm in the first layer is to blame, not the later transform."""

    def spectrum(t: Any) -> Any:
        real, imaginary = ops.fft((t, ops.zeros_like(t)))
        return real + imaginary

    layer = layers.Lambda(lambda t: ops.log(t + 2.0), name="logarithm")
    x, y = data()
    x = np.maximum(x, -1.5)
    if bad:
        x[26] = -9.0
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(1, name="head")(layers.Lambda(spectrum, name="spectrum")(layer(inputs))))
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    return Case(model, x, y, ("forward_domain",), "logarithm", (2,), 3)


@program
def a_variance_that_rounds_to_zero_in_the_optimizer(bad: bool) -> Case:
    """Centered RMSprop divides by the root of a difference, which cancels for a constant gradient."""
    optimizer = keras.optimizers.RMSprop(1e-4, rho=0.5, epsilon=1e-12, centered=bad)
    x, _ = data(8)
    x = np.abs(x) + 100.0
    model = stack(layers.Dense(1, name="price"), optimizer=optimizer, loss="mae")
    return Case(model, x, np.full((8, 1), 5e5, "float32"), ("optimizer_domain",), "price", None, None, {"epochs": 80})


@keras.saving.register_keras_serializable("diagnosis")
class Pole(keras.optimizers.schedules.LearningRateSchedule):
    """An inverse root that begins one step too early."""

    def __init__(self, shift: float = 0.0):
        self.shift = shift

    def __call__(self, step: Any) -> Any:
        step = ops.cast(step, "float32")
        return 1e-3 * ops.rsqrt(ops.abs(step - 3.0) + self.shift)

    def get_config(self) -> dict[str, Any]:
        return {"shift": self.shift}


@program
def a_schedule_with_a_pole(bad: bool) -> Case:
    optimizer = keras.optimizers.SGD(Pole(0.0 if bad else 1.0))
    return Case(linear(optimizer), *data(), ("optimizer_domain",), "learning_rate", None, 3)
