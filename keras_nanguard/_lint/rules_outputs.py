"""Rules about the last layer, the loss and the metrics, which have to match."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from keras_nanguard._keras.losses import option_of
from keras_nanguard._lint.rule import Site, outputs, rule
from keras_nanguard._lint.subject import Output, Subject, as_loss

_CROSSENTROPIES = (
    *("CategoricalCrossentropy", "SparseCategoricalCrossentropy", "BinaryCrossentropy"),
    *("CategoricalFocalCrossentropy", "BinaryFocalCrossentropy"),
)

_PROBABILITIES = ("softmax", "sigmoid", "hard_sigmoid", "sparsemax")

_NONNEGATIVE = (*_PROBABILITIES, "softplus", "exponential", "exp", "relu", "relu6")

_POSITIVE = ("softmax", "sigmoid", "softplus", "exponential", "exp")

_KINDS = {
    **{name.lower(): name for name in (*_CROSSENTROPIES, "KLDivergence", "Poisson")},
    "meansquaredlogarithmicerror": "MeanSquaredLogarithmicError",
    "kullbackleiblerdivergence": "KLDivergence",
}
"""Classes of losses that rules name, by their names in lower case without underscores."""


def kind_of(loss: Any) -> str:
    """Return the class name of a loss or metric: `"KLDivergence"` for `kl_divergence`, `"kld"` and
    `KLDivergence()`."""
    named = as_loss(loss) or loss
    if isinstance(named, functools.partial):
        named = named.func
    if not isinstance(named, str):
        named = getattr(named, "__name__", None) or type(named).__name__
    name = str(named)
    other = name if name[:1].isupper() else name.title().replace("_", "")
    return _KINDS.get(name.replace("_", "").lower(), other)


def _expects_logits(loss: Any) -> bool | None:
    """Return whether a crossentropy expects logits; `None` for any other loss."""
    if loss is None or kind_of(loss) not in _CROSSENTROPIES:
        return None
    return bool(option_of(loss, "from_logits"))


@rule(
    "warning",
    fix="Set dtype='float32' on the last layer; the rest of the model stays in float16.",
    each=outputs,
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
    each=outputs,
)
def probabilities_as_logits(output: Output) -> str:
    """Softmax or sigmoid before a loss that expects logits."""
    if output.activation not in _PROBABILITIES or _expects_logits(output.loss) is not True:
        return ""
    return f"{output.activation} is followed by {kind_of(output.loss)}(from_logits=True)"


@rule("error", fix="Pass from_logits=True to the loss.", each=outputs)
def logits_as_probabilities(output: Output) -> str:
    """No activation before a loss that expects probabilities."""
    if output.activation != "linear" or _expects_logits(output.loss) is not False:
        return ""
    followed = f"{kind_of(output.loss)}(from_logits=False)"
    return f"a layer without activation is followed by {followed}"


@rule(
    "error",
    fix="Use softmax or sigmoid for crossentropy, softplus or exponential for Poisson.",
    each=outputs,
)
def activation_does_not_fit(output: Output) -> str:
    """Last activation and loss do not match."""
    return "" if output.loss is None else _misfit(output, output.loss)


def _misfit(output: Output, loss: Any) -> str:
    """Return why a loss or metric does not fit the last activation, `""` if it does."""
    kind, activation = kind_of(loss), output.activation
    if activation is None:
        return ""
    logarithm = f"{kind} takes the logarithm of the output of {activation}"
    if kind in _CROSSENTROPIES and activation not in (*_PROBABILITIES, "linear"):
        return f"{logarithm}, which is not a probability"
    of_classes = kind in ("CategoricalCrossentropy", "SparseCategoricalCrossentropy")
    if of_classes and activation == "sigmoid" and output.units == 1:
        return f"{kind} on one unit: use BinaryCrossentropy"
    if kind == "Poisson" and activation not in _POSITIVE:
        return f"{logarithm}, which can be 0 or negative"
    if kind == "KLDivergence" and activation not in _PROBABILITIES:
        return f"{logarithm}, which is not a probability"
    if kind == "MeanSquaredLogarithmicError" and activation not in _NONNEGATIVE:
        return f"{kind} treats negative outputs of {activation} as 0, where the gradient is 0"
    return ""


@rule("error", fix="Use sigmoid with BinaryCrossentropy, or one unit per class.", each=outputs)
def softmax_of_one(output: Output) -> str:
    """Softmax over a single unit."""
    single = output.activation == "softmax" and output.units == 1
    return "softmax over one unit is 1 for any weights" if single else ""


@rule(
    "warning",
    fix="Set from_logits=True on the metric, or use one that matches the last activation.",
)
def metric_does_not_fit(subject: Subject) -> Iterator[Site]:
    """A metric that may become NaN."""
    for output in subject.outputs:
        for metric in output.metrics:
            kind = kind_of(metric)
            if kind == "MeanRelativeError":
                yield kind, "MeanRelativeError divides by its normalizer, which may contain 0"
                continue
            sentence = _misfit(output, metric)
            if output.activation == "linear" and _expects_logits(metric) is False:
                sentence = f"{kind} gets logits and expects probabilities"
            if sentence:
                yield kind, f"the metric on {output.name!r}: {sentence}"
