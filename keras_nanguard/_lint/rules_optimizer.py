"""Rules about the optimizer: learning rate, epsilon, loss scaling, clipping."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from keras_nanguard._keras.structure import given_rate
from keras_nanguard._lint.rule import Site, rule
from keras_nanguard._lint.subject import Subject

_MAX_ADAPTIVE = 1.0
"""Adam and similar optimizers change every weight by about the learning rate per step; initial
weights are a few hundredths."""

_MAX_PLAIN = 100.0
"""Gradient descent diverges above 2 / curvature; a rate of 100 presumes a flatter loss than any in
use."""

_PLAIN = ("SGD", "Adadelta", "Adagrad", "Ftrl")

_SMALLEST = {"float16": 6.104e-05, "bfloat16": 1.175e-38, "float32": 1.175e-38}
"""Smallest normal numbers."""

_LONG_RECURRENCE = 100
"""Number of steps. A gradient that grows by 1% per step grows by a factor of 2.7 in 100 steps and
of 20,000 in 1,000."""

_RECURRENT = (
    *("LSTM", "GRU", "SimpleRNN", "RNN", "Bidirectional"),
    *("ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D"),
)

_FLOAT16 = "keras.config.set_dtype_policy('mixed_float16')\n"

_MODEL = (
    "layers = [keras.layers.Dense(8), keras.layers.Dense(1, dtype='float32')]\n"
    "model = keras.Sequential([keras.Input((4,)), *layers])\n"
    "model.compile(%s, 'mse'%s)"
)


def _rates(subject: Subject) -> list[float]:
    """Return the learning rate, or several values of a schedule, at its first steps and later."""
    optimizer = subject.optimizer
    if optimizer is None:
        return []
    given = given_rate(optimizer)
    try:
        if callable(given) and not hasattr(given, "numpy"):
            return [float(np.asarray(given(step))) for step in (0, 1, 100, 10_000, 1_000_000)]
        return [float(np.asarray(optimizer.learning_rate))]
    except (TypeError, ValueError, AttributeError):
        return []


@rule(
    "error",
    "Learning rate negative, zero or too large",
    why="A negative rate increases the loss. With a rate of 0 the weights never change. Adam and "
    "similar optimizers change every weight by about the rate, so a rate of 1 overwrites the "
    "initial weights in one step.",
    fix="Start with 1e-3 for Adam and similar optimizers, with 1e-2 for SGD.",
    program="model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])\n"
    "model.compile(keras.optimizers.Adam({}), 'mse')",
    invalid="10.0",
    valid="1e-3",
)
def learning_rate(subject: Subject) -> Iterator[Site]:
    rates, kind = _rates(subject), type(subject.optimizer).__name__
    if not rates:
        return
    if not all(np.isfinite(rates)) or min(rates) < 0:
        yield kind, f"a learning rate of {min(rates):g}"
    elif max(rates) == 0:
        yield kind, "a learning rate of 0: weights never change"
    elif max(rates) > (_MAX_PLAIN if kind in _PLAIN else _MAX_ADAPTIVE):
        yield kind, f"a learning rate of {max(rates):g}"


@rule(
    "warning",
    "Optimizer epsilon below the resolution of the variables",
    why="Adam divides by sqrt(v) + epsilon. In float16 squared gradients below 6e-8 are 0, and an "
    "epsilon below 6e-5 is denormal or 0. The quotient then overflows.",
    fix="Keep variables in float32 (mixed_float16, not float16), or raise epsilon to 1e-4.",
    invalid="keras.config.set_dtype_policy('float16')\n"
    + _MODEL % ("keras.optimizers.Adam(loss_scale_factor=1024)", ""),
    valid=_FLOAT16 + _MODEL % ("'adam'", ""),
)
def optimizer_epsilon(subject: Subject) -> Iterator[Site]:
    epsilon = getattr(subject.optimizer, "epsilon", None)
    if not isinstance(epsilon, (int, float)):
        return
    for name in sorted({str(variable.dtype) for variable in subject.model.trainable_variables}):
        if epsilon == 0 or epsilon < _SMALLEST.get(name, 0.0):
            yield type(subject.optimizer).__name__, f"epsilon {epsilon:g} for variables of {name}"


@rule(
    "warning",
    "float16 without loss scaling",
    why="Gradients below 6e-8 are 0 in float16. Without a loss scale, most models have mostly "
    "such gradients.",
    fix="Compile with auto_scale_loss=True (the default), or wrap the optimizer in "
    "LossScaleOptimizer.",
    program=_FLOAT16 + _MODEL % ("'adam'", ", auto_scale_loss={}"),
    invalid="False",
    valid="True",
)
def loss_scaling_missing(subject: Subject) -> Iterator[Site]:
    optimizer, layers = subject.optimizer, [placed.layer for placed in subject.layers]
    if subject.scaler is None or subject.scaler is not optimizer:
        return
    half = any(layer.weights and _computes_in_float16(layer) for layer in layers)
    if half and not getattr(optimizer, "loss_scale_factor", None):
        yield type(optimizer).__name__, "layers compute in float16 and the loss is not scaled"


def _computes_in_float16(layer: object) -> bool:
    return getattr(layer, "compute_dtype", "") == "float16"


@rule(
    "error",
    "Loss scaled twice",
    why="Both scales multiply the loss, but only one divides the gradients. They are too large by "
    "the factor of the other, and may overflow.",
    fix="Wrap once, and set no loss_scale_factor on the inner optimizer of a LossScaleOptimizer.",
    program="scaled = keras.optimizers.LossScaleOptimizer\n" + _FLOAT16 + _MODEL % ("{}", ""),
    invalid="scaled(scaled(keras.optimizers.Adam()))",
    valid="scaled(keras.optimizers.Adam())",
)
def loss_scaled_twice(subject: Subject) -> Iterator[Site]:
    inner, wrapped = subject.optimizer, subject.scaler is not subject.optimizer
    if wrapped and (getattr(inner, "loss_scale_factor", None) or hasattr(inner, "inner_optimizer")):
        detail = "LossScaleOptimizer wraps an optimizer that scales the loss itself"
        yield type(inner).__name__, detail


@rule(
    "note",
    "A long recurrence without clipping",
    why="The gradient of a recurrence is a product over its steps, which grows or vanishes "
    "exponentially with their number (Pascanu, Mikolov and Bengio, 2013).",
    fix="Set global_clipnorm=1.0 on the optimizer.",
    program="layers = [keras.layers.GRU(8), keras.layers.Dense(1)]\n"
    "model = keras.Sequential([keras.Input((500, 4)), *layers])\n"
    "model.compile(keras.optimizers.Adam({}), 'mse')",
    invalid="",
    valid="global_clipnorm=1.0",
)
def no_clipping(subject: Subject) -> Iterator[Site]:
    optimizer, names = subject.optimizer, ("clipnorm", "global_clipnorm", "clipvalue")
    if optimizer is None or any(getattr(optimizer, name, None) for name in names):
        return
    for placed in subject.operations:
        if placed.kind in _RECURRENT:
            steps = (*getattr(getattr(placed.layer, "input", None), "shape", ()), None, None)[1]
            if isinstance(steps, int) and steps > _LONG_RECURRENCE:
                yield placed.path, f"{steps} steps of recurrence and no gradient clipping"
