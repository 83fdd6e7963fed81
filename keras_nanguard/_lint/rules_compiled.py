"""Rules about how a model is compiled and what it is trained on: the last layer, the loss and the
metrics, which have to match; the optimizer; the data, if they are given."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_nanguard._core.finiteness import float_limits
from keras_nanguard._core.variable_names import RECURRENT
from keras_nanguard._diagnose.targets import class_axis, classes_of, rejected
from keras_nanguard._files.scan import statistics
from keras_nanguard._keras.losses import class_of, option_of
from keras_nanguard._keras.optimizers import given_rate
from keras_nanguard._lint.rule import Site, rule
from keras_nanguard._lint.subject import POSITIVE, Output, Subject

_CROSSENTROPIES = (
    *("CategoricalCrossentropy", "SparseCategoricalCrossentropy", "BinaryCrossentropy"),
    *("CategoricalFocalCrossentropy", "BinaryFocalCrossentropy"),
)

_PROBABILITIES = ("softmax", "sigmoid", "hard_sigmoid", "sparsemax")

_NONNEGATIVE = (*_PROBABILITIES, "softplus", "exponential", "exp", "relu", "relu6")

_FITTING = {
    **dict.fromkeys(_CROSSENTROPIES, (*_PROBABILITIES, "linear")),  # for which there is a rule
    "KLDivergence": _PROBABILITIES,
    "Poisson": POSITIVE,
    "MeanSquaredLogarithmicError": _NONNEGATIVE,
}
"""The last activations that fit losses and metrics of probabilities or of positive numbers."""


def _expects_logits(loss: Any) -> bool | None:
    """Return whether a crossentropy expects logits; `None` for any other loss."""
    if loss is None or class_of(loss) not in _CROSSENTROPIES:
        return None
    return bool(option_of(loss, "from_logits"))


@rule(
    "warning",
    fix="Set dtype='float32' on the last layer; the rest of the model stays in float16.",
    each="outputs",
)
def low_precision_output(output: Output) -> str:
    """Outputs or loss in float16."""
    counts = output.loss is not None or output.activation in _PROBABILITIES
    if output.dtype != "float16" or not counts:
        return ""
    return f"the output {output.name!r} and the loss on it are computed in float16"


@rule(
    "error",
    fix="Remove the activation of the last layer, or remove from_logits=True.",
    each="outputs",
)
def probabilities_as_logits(output: Output) -> str:
    """Softmax or sigmoid before a loss that expects logits."""
    if output.activation not in _PROBABILITIES or _expects_logits(output.loss) is not True:
        return ""
    return f"{output.activation} is followed by {class_of(output.loss)}(from_logits=True)"


@rule("error", fix="Pass from_logits=True to the loss.", each="outputs")
def logits_as_probabilities(output: Output) -> str:
    """No activation before a loss that expects probabilities."""
    if output.activation != "linear" or _expects_logits(output.loss) is not False:
        return ""
    followed = f"{class_of(output.loss)}(from_logits=False)"
    return f"a layer without activation is followed by {followed}"


@rule(
    "error",
    fix="Use softmax or sigmoid for crossentropy, softplus or exponential for Poisson.",
    each="outputs",
)
def activation_does_not_fit(output: Output) -> str:
    """Last activation and loss do not match."""
    return "" if output.loss is None else _misfit(output, output.loss)


def _misfit(output: Output, loss: Any) -> str:
    """Return why a loss or metric does not fit the last activation, `""` if it does."""
    kind, activation = class_of(loss), output.activation
    of_classes = kind in ("CategoricalCrossentropy", "SparseCategoricalCrossentropy")
    if of_classes and activation == "sigmoid" and classes_of(loss, output.shape) == 1:
        return f"{kind} on one unit: use BinaryCrossentropy"
    fits = activation is None or activation in _FITTING.get(kind, (activation,))
    if fits or _expects_logits(loss):
        return ""
    if kind == "MeanSquaredLogarithmicError":
        return f"{kind} treats negative outputs of {activation} as 0, where the gradient is 0"
    wrong = "can be 0 or negative" if kind == "Poisson" else "is not a probability"
    return f"{kind} takes the logarithm of the output of {activation}, which {wrong}"


@rule("error", fix="Use sigmoid with BinaryCrossentropy, or one unit per class.", each="outputs")
def softmax_of_one(output: Output) -> str:
    """Softmax over a single unit."""
    return "softmax over one unit is 1 for any weights" if output.of_one else ""


@rule(
    "warning",
    fix="Set from_logits=True on the metric, or use one that matches the last activation.",
)
def metric_does_not_fit(subject: Subject) -> Iterator[Site]:
    """A metric that may become NaN."""
    for output in subject.outputs:
        for metric in output.metrics:
            kind = class_of(metric)
            sentence = _misfit(output, metric)
            if output.activation == "linear" and _expects_logits(metric) is False:
                sentence = f"{kind} gets logits and expects probabilities"
            if sentence:
                yield kind, f"the metric on {output.name!r}: {sentence}"


# The optimizer: learning rate, epsilon, loss scaling, clipping

_MAX_ADAPTIVE = 1.0
"""Adam and similar optimizers change every weight by about the learning rate per step; initial
weights are a few hundredths."""

_MAX_PLAIN = 100.0
"""Gradient descent diverges above 2 / curvature; a rate of 100 assumes a flatter loss than any in
practice.
"""

_PLAIN = ("SGD", "Adadelta", "Adagrad", "Ftrl")

_LONG_RECURRENCE = 100
"""Number of steps. A gradient that grows by 1% per step grows by a factor of 2.7 in 100 steps and
of 20,000 in 1,000."""


def _rates(subject: Subject) -> list[float]:
    """Return the learning rate, or several values of a schedule, at its first steps and later; none
    if reading it raises.
    """
    optimizer = subject.optimizer
    if optimizer is None:
        return []
    given = given_rate(optimizer)
    try:
        if callable(given) and not hasattr(given, "numpy"):
            return [float(np.asarray(given(step))) for step in (0, 1, 100, 10_000, 1_000_000)]
        return [float(np.asarray(optimizer.learning_rate))]
    except Exception:  # noqa: BLE001  a custom schedule may raise anything outside of a step
        return []


@rule("error", fix="Start with 1e-3 for Adam and similar optimizers, with 1e-2 for SGD.")
def learning_rate(subject: Subject) -> Iterator[Site]:
    """Learning rate negative, zero or too large."""
    rates, kind = _rates(subject), type(subject.optimizer).__name__
    if not rates:
        return
    if wrong := [rate for rate in rates if not (math.isfinite(rate) and rate >= 0)]:
        yield kind, f"a learning rate of {wrong[0]:g}"
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
        if epsilon == 0 or epsilon < float_limits(name)[0]:
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
    if subject.outermost is None or subject.outermost is not optimizer:
        return
    half = any(
        layer.weights and getattr(layer, "compute_dtype", "") == "float16" for layer in layers
    )
    if half and not getattr(optimizer, "loss_scale_factor", None):
        yield type(optimizer).__name__, "layers compute in float16 and the loss is not scaled"


@rule(
    "error",
    fix="Wrap once, and set no loss_scale_factor on the inner optimizer of a LossScaleOptimizer.",
)
def loss_scaled_twice(subject: Subject) -> Iterator[Site]:
    """Loss scaled twice."""
    inner, wrapped = subject.optimizer, subject.outermost is not subject.optimizer
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
        if placed.kind in RECURRENT:
            steps = (*getattr(getattr(placed.layer, "input", None), "shape", ()), None, None)[1]
            if isinstance(steps, int) and steps > _LONG_RECURRENCE:
                yield placed.path, f"{steps} steps of recurrence and no gradient clipping"


# The data: inputs of the first layer, and targets of the loss

_MAX_INPUT = 1e3
"""Maximum magnitude of an input. Pixels reach 255; initializers assume inputs of about 1, and
outputs scale with them."""

_NORMS = ("BatchNormalization", "LayerNormalization", "GroupNormalization", "RMSNormalization")
"""Layers that scale what they are given, and so the inputs if they are first."""

_OF_CLASSES = ("CategoricalCrossentropy", "CategoricalFocalCrossentropy", "KLDivergence")
"""Losses whose targets are a probability for each class."""


@rule(
    "error",
    fix="Check the pipeline for missing values and divisions by 0; drop or fill those rows.",
)
def data_nonfinite(subject: Subject) -> Iterator[Site]:
    """NaN or Inf in the data."""
    for name, array in subject.data():
        if array.dtype.kind == "f" and (bad := statistics([array]).nonfinite):
            yield name, f"{bad} of {array.size} values are NaN or Inf"


@rule("warning", fix="Add an adapted Normalization, or a Rescaling, as the first layer.")
def input_scale(subject: Subject) -> Iterator[Site]:
    """Inputs that are not scaled."""
    scaling = {"Normalization", "Rescaling", "Embedding"}
    if any(scaling & {placed.kind, type(placed.layer).__name__} for placed in subject.layers):
        return
    if any(one.kind in _NORMS and subject.takes_input(one) for one in subject.operations):
        return
    for name, array in subject.inputs():
        found = statistics([array]) if array.dtype.kind == "f" else None
        if found and (largest := max(-(found.min or 0.0), found.max or 0.0)) > _MAX_INPUT:
            yield name, f"values up to {largest:.3g}, and no layer scales them"


@rule("error", fix="Count classes from 0, and give the last layer one unit per class.")
def labels_out_of_range(subject: Subject) -> Iterator[Site]:
    """Targets that the loss does not accept."""
    for output, array in subject.targets():
        if output.loss is None or not np.isfinite(array.astype(np.float64)).all():
            continue
        if found := rejected(output.loss, array, classes_of(output.loss, output.shape)):
            kind = class_of(output.loss)
            yield output.name, f"targets with {found.clause}, which {kind} does not accept"
        elif class_of(output.loss) in _OF_CLASSES and array.ndim == len(output.shape) > 1:
            total = array.astype(np.float64).sum(class_axis(output.loss))
            ignored = total == 0.0  # rows without a class, whose loss is 0
            total = total if ignored.all() else total[~ignored]
            if np.abs(total - 1).max() > 0.01:
                sums = f"{total.min():g} to {total.max():g}"
                yield output.name, f"rows of targets that add up to {sums} instead of 1"
