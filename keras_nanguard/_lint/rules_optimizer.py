"""Rules about the optimizer: learning rate, epsilon, loss scaling, clipping."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_nanguard._files.arrays import named_dtype
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

_LONG_RECURRENCE = 100
"""Number of steps. A gradient that grows by 1% per step grows by a factor of 2.7 in 100 steps and
of 20,000 in 1,000."""

_RECURRENT = (
    "LSTM",
    "GRU",
    "SimpleRNN",
    "RNN",
    "ConvLSTM1D",
    "ConvLSTM2D",
    "ConvLSTM3D",
    "Bidirectional",
)

_MODEL = (
    "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])\n"
    "model.compile({optimizer}, 'mse')"
)

_FLOAT16 = "keras.config.set_dtype_policy('mixed_float16')\n"

_HALF = (
    "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1, "
    "dtype='float32')])\n"
    "model.compile({optimizer}, 'mse'{options})"
)

_RECURRENT_MODEL = (
    "model = keras.Sequential([keras.Input((500, 4)), keras.layers.GRU(8), "
    "keras.layers.Dense(1)])\n"
    "model.compile(keras.optimizers.Adam({options}), 'mse')"
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
    why=(
        "A negative rate increases the loss, with a rate of 0 the weights never change, and an "
        "optimizer that normalizes"
        " its updates changes every weight by about the rate, so that a rate of 1 overwrites the "
        "initial weights in one step."
    ),
    fix="Start with 1e-3 for Adam and similar optimizers, with 1e-2 for SGD.",
    invalid=_MODEL.format(optimizer="keras.optimizers.Adam(10.0)"),
    valid=_MODEL.format(optimizer="keras.optimizers.Adam(1e-3)"),
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
    why=(
        "Adam divides by sqrt(v) + epsilon. In float16 squared gradients below 6e-8 are 0 and an "
        "epsilon below 6e-5 is"
        " denormal or 0: the quotient overflows."
    ),
    fix="Keep variables in float32 (mixed_float16, not float16), or raise epsilon to 1e-4.",
    invalid=(
        "keras.config.set_dtype_policy('float16')\n"
        + _HALF.format(optimizer="keras.optimizers.Adam(loss_scale_factor=1024)", options="")
    ),
    valid=_FLOAT16 + _HALF.format(optimizer="keras.optimizers.Adam()", options=""),
)
def optimizer_epsilon(subject: Subject) -> Iterator[Site]:
    epsilon = getattr(subject.optimizer, "epsilon", None)
    if not isinstance(epsilon, (int, float)):
        return
    kinds = {str(variable.dtype) for variable in subject.model.trainable_variables}
    for name in sorted(kinds):
        dtype = named_dtype(name)
        if dtype is not None and (epsilon == 0 or epsilon < _smallest(name)):
            yield type(subject.optimizer).__name__, f"epsilon {epsilon:g} for variables of {name}"


def _smallest(name: str) -> float:
    return {"float16": 6.104e-05, "bfloat16": 1.175e-38, "float32": 1.175e-38}.get(name, 0.0)


def _computes_in_float16(subject: Subject) -> bool:
    return any(
        getattr(placed.layer, "compute_dtype", "") == "float16"
        for placed in subject.layers
        if placed.layer.weights
    )


@rule(
    "warning",
    "float16 without loss scaling",
    why=(
        "Gradients below 6e-8 are 0 in float16: without a loss scale, most gradients of most "
        "models."
    ),
    fix=(
        "Compile with auto_scale_loss=True (the default), or wrap the optimizer in "
        "LossScaleOptimizer."
    ),
    invalid=_FLOAT16 + _HALF.format(optimizer="'adam'", options=", auto_scale_loss=False"),
    valid=_FLOAT16 + _HALF.format(optimizer="'adam'", options=""),
)
def loss_scaling_missing(subject: Subject) -> Iterator[Site]:
    if subject.scaler is None or not _computes_in_float16(subject):
        return
    if subject.scaler is subject.optimizer and not getattr(
        subject.optimizer, "loss_scale_factor", None
    ):
        yield (
            type(subject.optimizer).__name__,
            "layers compute in float16 and the loss is not scaled",
        )


@rule(
    "error",
    "Loss scaled twice",
    why=(
        "Both scales multiply the loss, but only one divides the gradients: they are wrong by the "
        "other, or overflow."
    ),
    fix="Wrap once, and set no loss_scale_factor on the inner optimizer of a LossScaleOptimizer.",
    invalid=(
        _FLOAT16
        + _HALF.format(
            optimizer="keras.optimizers.LossScaleOptimizer("
            "keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))",
            options="",
        )
    ),
    valid=(
        _FLOAT16
        + _HALF.format(
            optimizer="keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())", options=""
        )
    ),
)
def loss_scaled_twice(subject: Subject) -> Iterator[Site]:
    inner, wrapped = subject.optimizer, subject.scaler is not subject.optimizer
    if wrapped and (getattr(inner, "loss_scale_factor", None) or hasattr(inner, "inner_optimizer")):
        yield (
            type(inner).__name__,
            "LossScaleOptimizer wraps an optimizer that scales the loss itself",
        )


@rule(
    "note",
    "A long recurrence without clipping",
    why=(
        "The gradient of a recurrence is a product over its steps, which grows or vanishes "
        "exponentially with their"
        " number (Pascanu, Mikolov and Bengio, 2013)."
    ),
    fix="Set global_clipnorm=1.0 on the optimizer.",
    invalid=_RECURRENT_MODEL.format(options=""),
    valid=_RECURRENT_MODEL.format(options="global_clipnorm=1.0"),
)
def no_clipping(subject: Subject) -> Iterator[Site]:
    optimizer = subject.optimizer
    if optimizer is None or any(
        getattr(optimizer, name, None) for name in ("clipnorm", "global_clipnorm", "clipvalue")
    ):
        return
    for path, operation in subject.operations:
        if type(operation).__name__ not in _RECURRENT:
            continue
        shape: tuple[Any, ...] = tuple(getattr(getattr(operation, "input", None), "shape", ()))
        if len(shape) > 1 and isinstance(shape[1], int) and shape[1] > _LONG_RECURRENCE:
            yield path, f"{shape[1]} steps of recurrence and no gradient clipping"
