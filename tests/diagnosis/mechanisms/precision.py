"""Values outside of the range of float16."""

import keras
from keras import layers, ops

from mechanisms.case import Case, data, program, stack


@program
def activation_beyond_float16(bad: bool) -> Case:
    x, y = data()
    if bad:
        x[19] *= 40000.0
    policy = "mixed_float16"
    model = stack(
        layers.Dense(8, kernel_initializer="ones", dtype=policy, name="wide"),
        layers.Activation("tanh", dtype=policy),
        layers.Dense(1, dtype="float32"),
        auto_scale_loss=False,
    )
    return Case(model, x, y, ("float16_overflow", "input_scale"), "wide", (3,), 2)


@program
def variance_in_float16(bad: bool) -> Case:
    x, y = data()
    model = stack(
        layers.Rescaling(300.0, dtype="float32"),
        layers.Lambda(
            lambda t: ops.mean(ops.square(t), -1, keepdims=True),
            dtype="float16" if bad else "float32",
            name="power",
        ),
        layers.Rescaling(1e-5, dtype="float32"),
        layers.Dense(1, dtype="float32"),
        auto_scale_loss=False,
    )
    return Case(model, x, y, ("float16_overflow",), "power")


@program
def difference_that_underflows_in_float16(bad: bool) -> Case:
    x, y = data()
    dtype = "float16" if bad else "float32"
    model = stack(
        layers.Dense(4, activation="sigmoid", dtype=dtype),
        layers.Lambda(lambda t: 1e-6 / (t * 1e-8 + 1e-9), dtype=dtype, name="ratio"),
        layers.Rescaling(1e-3, dtype="float32"),
        layers.Dense(1, dtype="float32"),
        optimizer=keras.optimizers.SGD(1e-6),
        auto_scale_loss=False,
    )
    return Case(model, x, y, ("float16_underflow",), "ratio")


@program
def epsilon_that_is_zero_in_float16(bad: bool) -> Case:
    x, y = data()
    x[:, 3] = 0.0
    model = keras.Sequential([keras.Input((4,), dtype="float16"), layers.Dense(1, dtype="float16", name="head")])
    model.compile(keras.optimizers.Adam(1e-3, epsilon=1e-8 if bad else 1e-3), "mse", auto_scale_loss=False)
    return Case(model, x.astype("float16"), y.astype("float16"), ("optimizer_domain", "float16_underflow"), "head")


@program
def loss_scale_too_high(bad: bool) -> Case:
    x, y = data(512)
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, dtype="mixed_float16", name="half"), layers.Dense(1, dtype="float32")]
    )
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**100 if bad else 2.0**10)
    model.compile(scaled, "mse")
    return Case(model, x, y, ("loss_scale_collapsed",))


@program
def gradients_that_are_zero_in_float16(bad: bool) -> Case:
    x, y = data(512)
    model = stack(
        layers.Dense(4, dtype="float16" if bad else "float32", name="half"),
        layers.Rescaling(1e-8 if bad else 1.0, dtype="float32"),
        layers.Dense(1, dtype="float32", use_bias=False, trainable=False),
        auto_scale_loss=False,
    )
    return Case(model, x, y, ("float16_underflow",))
