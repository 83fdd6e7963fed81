"""Facts besides the step itself: the history of the fit, its optimizers, and targets that its
losses do not accept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median_low
from typing import Any

import keras
import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.evidence import Growth, OptimizerFacts, TargetFault
from keras_nanguard._core.history import History, magnitudes, sizes
from keras_nanguard._keras import (
    layers as keras_layers,
    losses as keras_losses,
    optimizers as keras_optimizers,
    variables as keras_variables,
)

__all__ = ["exponents", "growth", "negative_loss", "objective", "optimizer_facts", "target_fault"]

RECENT = 5
"""Number of last steps that are reported, and from which the magnitude before the incident is
taken.
"""

SETTINGS = (
    *(
        "weight_decay",
        "momentum",
        "beta_1",
        "beta_2",
        "rho",
        "epsilon",
        "clipnorm",
        "clipvalue",
        "global_clipnorm",
    ),
    *("centered", "gradient_accumulation_steps"),
)
"""Hyperparameters of optimizers that are reported with the learning rate, if they are in use."""

UNUSUAL = 100.0
"""Factor above which, or below whose inverse, a loss weight is reported."""

EXPONENTS = ("gamma", "exponent", "power")
"""Names of parameters of a loss that are exponents."""

PROBABILITIES = (
    "categorical_crossentropy",
    "binary_crossentropy",
    "categorical_focal_crossentropy",
    "binary_focal_crossentropy",
    "categorical_generalized_cross_entropy",
)
"""Losses whose targets are probabilities."""


def growth(history: History, step: int, own: tuple[float, float], weights: Sequence[Any]) -> Growth:
    """Return the history of loss, gradient norm and weights before a step.

    Args:
        history: the measurements of the last steps.
        step: the step.
        own: loss and gradient norm of the step itself, as far as they are finite.
        weights: the trainable weights, with their present values.
    """
    entries, first = history.before(step), history.first(step)
    losses = [e.loss for e in entries if math.isfinite(e.loss)]
    norms = [e.norm for e in entries if math.isfinite(e.norm)]
    first_losses, first_norms = magnitudes(e.loss for e in first), magnitudes(e.norm for e in first)
    last_losses, last_norms = losses[-RECENT:] + [own[0]], norms[-RECENT:] + [own[1]]
    now, before, largest, largest_before = 0.0, 0.0, 0.0, 0.0
    for variable in weights:
        norm, most = sizes(keras_variables.view(variable))
        largest = max(largest, most)
        if id(variable) in history.weights:
            now += norm**2
            before += history.weights[id(variable)][0] ** 2
            largest_before = max(largest_before, history.weights[id(variable)][1])
    return Growth(
        steps=len(entries),
        loss=_factor(first_losses, magnitudes(last_losses)),
        norm=_factor(first_norms, magnitudes(last_norms)),
        weights=math.sqrt(now / before) if before > 0 and now > 0 else 1.0,
        largest_weight=largest,
        largest_weight_before=largest_before,
        losses=tuple(losses[-RECENT:]),
        norms=tuple(norms[-RECENT:]),
        jump=history.jump(step),
    )


def _factor(first: list[float], last: list[float]) -> float:
    """Return the growth factor from the first values to the last ones, relative to the smallest of
    the first ones.

    A run that diverges at once has no healthy start; its first step is its smallest.
    """
    if not first or not last:
        return 1.0
    start = first[0] if len(first) < RECENT else min(first[0], median_low(first))
    return max(last) / start


def optimizer_facts(
    optimizers: Sequence[Any], committed: bool = False
) -> tuple[OptimizerFacts, ...]:
    """Return the hyperparameters of the optimizers; `committed`: the step in question has already
    been counted.
    """
    return tuple(_facts(optimizer, committed) for optimizer in optimizers)


def _facts(whole: Any, committed: bool) -> OptimizerFacts:
    optimizer = keras_optimizers.inner(whole)
    rate = (
        keras_optimizers.rate_before(whole) if committed else keras_optimizers.learning_rate(whole)
    )
    dtypes = {str(v.dtype) for v in keras_optimizers.trained_by(optimizer)}
    dtype = next((d for d in ("float16", "bfloat16", "float64") if d in dtypes), "float32")
    epsilon = getattr(optimizer, "epsilon", None)
    rounded = None
    if epsilon is not None:
        rounded = (
            float(np.asarray(epsilon, np.float16))
            if dtype == "float16"
            else float(np.float32(epsilon))
        )
    clips = any(
        getattr(optimizer, name, None) for name in ("clipnorm", "clipvalue", "global_clipnorm")
    )
    settings = {name: getattr(optimizer, name, None) for name in SETTINGS}
    known = {
        name: float(value)
        for name, value in settings.items()
        if isinstance(value, (int, float)) and value
    }
    return OptimizerFacts(
        name=type(optimizer).__name__,
        learning_rate=rate,
        epsilon=None if epsilon is None else float(epsilon),
        epsilon_in_dtype=rounded,
        dtype=dtype,
        clips=clips,
        momentum=known.get("momentum", 0.0),
        scaled=keras_optimizers.is_loss_scaled(whole),
        scheduled=keras_optimizers.has_schedule(optimizer),
        settings=tuple(known.items()),
        iteration=keras_optimizers.scheduled_iteration(optimizer, int(committed)),
    )


def objective(model: Any) -> tuple[tuple[str, float], ...]:
    """Return loss weights and regularizers of unusual size, in words, with their values."""
    found = [
        (f"The loss weight of {name!r}", weight)
        for name, weight in keras_losses.loss_weights(model)
    ]
    found = [(words, weight) for words, weight in found if not 1 / UNUSUAL < abs(weight) < UNUSUAL]
    for layer in keras_layers.layers_of(model):
        for name, regularizer in vars(layer).items():
            for norm in (
                ("l1", "l2") if isinstance(regularizer, keras.regularizers.Regularizer) else ()
            ):
                factor = getattr(regularizer, norm, 0.0)
                value = float(factor) if np.ndim(factor) == 0 and factor is not None else 0.0
                if value >= 1.0:
                    found.append((f"The {norm} of the {name} of {layer.path!r}", value))
    return tuple(found)


def exponents(model: Any) -> tuple[tuple[str, str, float], ...]:
    """Return loss, parameter and value of each exponent among the parameters of the compiled
    losses.
    """
    found = []
    for _, loss in keras_losses.losses_by_output(model):
        values = ((name, getattr(loss, name, None)) for name in EXPONENTS)
        found += [
            (str(loss.name), name, float(v)) for name, v in values if isinstance(v, (int, float))
        ]
    return tuple(found)


def target_fault(
    model: Any, targets: Sequence[np.ndarray[Any, Any]], widths: Sequence[int]
) -> TargetFault | None:
    """Return the first problem of the targets, given the arrays and the width of each output."""
    entries = keras_losses.losses_by_output(model)
    if len(entries) != len(targets):
        entries = entries[:1] if len(targets) == 1 else []
    for index, ((output, loss), array) in enumerate(zip(entries, targets)):
        width = widths[index] if index < len(widths) else 0
        found = _fault(loss, array, width)
        if found is not None:
            rows, words, fatal = found
            return TargetFault(
                str(loss.name), output if len(entries) > 1 else "", rows, words, fatal
            )
    return None


def negative_loss(model: Any, losses: Sequence[float]) -> TargetFault | None:
    """Return the problem of the targets that a negative loss implies, if no loss of the model can
    be negative.
    """
    entries = [loss for _, loss in keras_losses.losses_by_output(model)]
    if not entries or not any(loss < -1e-3 for loss in losses) or keras_layers.adds_losses(model):
        return None
    if not all(_kinds(loss) & set(PROBABILITIES) for loss in entries):
        return None
    lowest = min(losses)
    words = (
        "values that are not probabilities (with probabilities the loss cannot be negative, and it"
        f" is {lowest:.3g})"
    )
    return TargetFault(str(entries[0].name), "", (), words)


def _fault(
    loss: Any, array: np.ndarray[Any, Any], width: int
) -> tuple[tuple[int, ...], str, bool] | None:
    kinds = _kinds(loss)
    wide = finiteness.widen(array)
    if wide.dtype.kind not in "fiu" or not wide.size:
        return None
    if any("sparse_categorical" in kind for kind in kinds):
        ignored = getattr(loss, "ignore_class", None)
        wrong = ((wide < 0) | (wide >= width)) if width else wide < 0
        wrong = wrong if ignored is None else wrong & (wide != ignored)
        if wrong.any():
            shown = wide[wrong].flat[0]
            return _rows(wrong), f"class index {shown:g} with {width} classes", True
    elif kinds & set(PROBABILITIES):
        wrong = (wide < 0) | (wide > 1)
        if wrong.any():
            return (
                _rows(wrong),
                f"{wide[wrong].flat[0]:g} instead of a probability from 0 to 1",
                True,
            )
        smoothing = getattr(loss, "label_smoothing", 0.0)
        if isinstance(smoothing, (int, float)) and not 0.0 <= smoothing <= 1.0:
            return (), f"label_smoothing={smoothing:g}, which makes negative probabilities", True
    elif kinds & {"poisson", "kl_divergence", "mean_squared_logarithmic_error"}:
        wrong = wide < (0 if "mean_squared_logarithmic_error" not in kinds else -1)
        if wrong.any():
            shown = wide[wrong].flat[0]
            return _rows(wrong), f"the negative number {shown:g}", False
    return None


def _kinds(loss: Any) -> set[str]:
    """Return the names of this loss in Keras: that of its class in snake case, and that of the
    function it wraps.
    """
    names = {
        keras_layers.snake_case(type(loss).__name__),
        str(getattr(getattr(loss, "fn", None), "__name__", "")),
    }
    return {name for name in names if name}


def _rows(wrong: np.ndarray[Any, Any]) -> tuple[int, ...]:
    return (
        tuple(int(i) for i in np.flatnonzero(wrong.reshape(wrong.shape[0], -1).any(axis=1)))
        if wrong.ndim
        else ()
    )
