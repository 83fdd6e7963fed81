"""Rules about the optimizer: learning rate, epsilon, loss scaling, clipping."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from keras_nanguard._keras.optimizers import given_rate
from keras_nanguard._lint.rule import Site, rule
from keras_nanguard._lint.subject import Subject

_MAX_ADAPTIVE = 1.0
"""Adam and similar optimizers change every weight by about the learning rate per step; initial
weights are a few hundredths."""

_MAX_PLAIN = 100.0
"""Gradient descent diverges above 2 / curvature; a rate of 100 assumes a flatter loss than any in
practice.
"""

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


@rule("error", fix="Start with 1e-3 for Adam and similar optimizers, with 1e-2 for SGD.")
def learning_rate(subject: Subject) -> Iterator[Site]:
    """Learning rate negative, zero or too large."""
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
    fix="Keep variables in float32 (mixed_float16, not float16), or raise epsilon to 1e-4.",
)
def optimizer_epsilon(subject: Subject) -> Iterator[Site]:
    """Optimizer epsilon below the resolution of the variables."""
    epsilon = getattr(subject.optimizer, "epsilon", None)
    if not isinstance(epsilon, (int, float)):
        return
    for name in sorted({str(variable.dtype) for variable in subject.model.trainable_variables}):
        if epsilon == 0 or epsilon < _SMALLEST.get(name, 0.0):
            yield type(subject.optimizer).__name__, f"epsilon {epsilon:g} for variables of {name}"


@rule(
    "warning",
    fix=(
        "Compile with auto_scale_loss=True (the default), or wrap the optimizer in "
        "LossScaleOptimizer."
    ),
)
def loss_scaling_missing(subject: Subject) -> Iterator[Site]:
    """float16 without loss scaling."""
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
    fix="Wrap once, and set no loss_scale_factor on the inner optimizer of a LossScaleOptimizer.",
)
def loss_scaled_twice(subject: Subject) -> Iterator[Site]:
    """Loss scaled twice."""
    inner, wrapped = subject.optimizer, subject.scaler is not subject.optimizer
    if wrapped and (getattr(inner, "loss_scale_factor", None) or hasattr(inner, "inner_optimizer")):
        detail = "LossScaleOptimizer wraps an optimizer that scales the loss itself"
        yield type(inner).__name__, detail


@rule("note", fix="Set global_clipnorm=1.0 on the optimizer.")
def no_clipping(subject: Subject) -> Iterator[Site]:
    """A long recurrence without clipping."""
    # Its gradient is a product over the steps (Pascanu, Mikolov and Bengio, 2013).
    optimizer, names = subject.optimizer, ("clipnorm", "global_clipnorm", "clipvalue")
    if optimizer is None or any(getattr(optimizer, name, None) for name in names):
        return
    for placed in subject.operations:
        if placed.kind in _RECURRENT:
            steps = (*getattr(getattr(placed.layer, "input", None), "shape", ()), None, None)[1]
            if isinstance(steps, int) and steps > _LONG_RECURRENCE:
                yield placed.path, f"{steps} steps of recurrence and no gradient clipping"
