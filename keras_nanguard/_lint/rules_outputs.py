"""Rules about the last layer, the loss and the metrics, which have to match."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from keras_nanguard._keras.structure import loss_options
from keras_nanguard._lint.rule import Site, rule
from keras_nanguard._lint.subject import Output, Subject, as_loss

_CROSSENTROPIES = ("CategoricalCrossentropy", "SparseCategoricalCrossentropy", "BinaryCrossentropy")

_FOCAL = ("CategoricalFocalCrossentropy", "BinaryFocalCrossentropy")

_PROBABILITIES = ("softmax", "sigmoid", "hard_sigmoid", "sparsemax")

_NONNEGATIVE = (*_PROBABILITIES, "softplus", "exponential", "exp", "relu", "relu6")

_POSITIVE = ("softmax", "sigmoid", "softplus", "exponential", "exp")

_KINDS = {
    name.lower(): name
    for name in (
        *_CROSSENTROPIES,
        *_FOCAL,
        "KLDivergence",
        "MeanSquaredLogarithmicError",
        "Poisson",
    )
}

_KINDS["kullbackleiblerdivergence"] = "KLDivergence"
"""Classes of losses that rules name, by their names in lower case without underscores."""

_HEAD = (
    "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, {layer})])\n"
    "model.compile('adam', {loss})"
)


def _sample(layer: str, loss: str) -> str:
    return _HEAD.format(layer=layer, loss=loss)


def kind_of(loss: Any) -> str:
    """Return the class name of a loss or metric: `"KLDivergence"` for `kl_divergence`, `"kld"` and
    `KLDivergence()`."""
    named = _function_of(as_loss(loss) or loss)
    words = (
        named
        if isinstance(named, str)
        else getattr(named, "__name__", None) or type(named).__name__
    )
    plain = words.replace("_", "")
    return _KINDS.get(
        plain.lower(), words if words[:1].isupper() else words.title().replace("_", "")
    )


def _function_of(loss: Any) -> Any:
    """Return the function of a `functools.partial`, anything else as it is."""
    return loss.func if isinstance(loss, functools.partial) else loss


def option_of(loss: Any, name: str) -> Any:
    """Return an option of a loss or metric, such as `from_logits` or `ignore_class`; `None` if it
    has no such option."""
    value = getattr(loss, name, None)
    if value is None:
        value = loss_options(loss).get(name)
    return (
        loss.keywords.get(name) if value is None and isinstance(loss, functools.partial) else value
    )


def _from_logits(loss: Any) -> bool | None:
    """Return whether a loss expects logits; `None` if that is not known."""
    value = option_of(loss, "from_logits")
    return False if value is None and kind_of(loss) in (*_CROSSENTROPIES, *_FOCAL) else value


@rule(
    "warning",
    "Outputs or loss in float16",
    why=(
        "The largest float16 is 65504 and the smallest positive one 6e-8: a softmax rounds small "
        "probabilities to 0,"
        " whose logarithm is infinite, and a mean over many values overflows."
    ),
    fix="Set dtype='float32' on the last layer; the rest of the model stays in float16.",
    invalid=(
        "keras.config.set_dtype_policy('mixed_float16')\n"
        + _sample("activation='softmax'", "'categorical_crossentropy'")
    ),
    valid=(
        "keras.config.set_dtype_policy('mixed_float16')\n"
        + _sample("activation='softmax', dtype='float32'", "'categorical_crossentropy'")
    ),
)
def low_precision_output(subject: Subject) -> Iterator[Site]:
    for output in subject.outputs:
        if output.dtype == "float16" and (
            output.loss is not None or output.activation in _PROBABILITIES
        ):
            yield (
                output.path,
                f"the output {output.name!r} and the loss on it are computed in float16",
            )


@rule(
    "error",
    "Softmax or sigmoid before a loss that expects logits",
    why=(
        "The loss applies softmax or sigmoid again: gradients shrink, the loss cannot reach 0, "
        "training stalls."
    ),
    fix="Remove the activation of the last layer, or from_logits=True.",
    invalid=(
        _sample("activation='softmax'", "keras.losses.CategoricalCrossentropy(from_logits=True)")
    ),
    valid=_sample("", "keras.losses.CategoricalCrossentropy(from_logits=True)"),
)
def probabilities_as_logits(subject: Subject) -> Iterator[Site]:
    for output in subject.outputs:
        if output.activation in _PROBABILITIES and _expects_logits(output) is True:
            yield (
                output.path,
                f"{output.activation} is followed by {kind_of(output.loss)}(from_logits=True)",
            )


@rule(
    "error",
    "No activation before a loss that expects probabilities",
    why=(
        "The loss takes the logarithm of numbers that are not probabilities. Keras clips them to "
        "[1e-7, 1 - 1e-7], so"
        " negative logits give a constant loss and zero gradients; normalizing by a sum near 0 "
        "gives Inf or NaN."
    ),
    fix="Pass from_logits=True to the loss.",
    invalid=_sample("", "'categorical_crossentropy'"),
    valid=_sample("", "keras.losses.CategoricalCrossentropy(from_logits=True)"),
)
def logits_as_probabilities(subject: Subject) -> Iterator[Site]:
    for output in subject.outputs:
        if output.activation == "linear" and _expects_logits(output) is False:
            yield (
                output.path,
                "a layer without activation is followed by "
                f"{kind_of(output.loss)}(from_logits=False)",
            )


def _expects_logits(output: Output) -> bool | None:
    kinds = (*_CROSSENTROPIES, *_FOCAL)
    return (
        _from_logits(output.loss)
        if output.loss is not None and kind_of(output.loss) in kinds
        else None
    )


@rule(
    "error",
    "Last activation and loss do not match",
    why=(
        "The loss takes the logarithm of values that the last activation allows to be 0, negative "
        "or above 1."
    ),
    fix="Use softmax or sigmoid for crossentropy, softplus or exponential for Poisson.",
    invalid=_sample("activation='relu'", "'categorical_crossentropy'"),
    valid=_sample("activation='softmax'", "'categorical_crossentropy'"),
)
def activation_does_not_fit(subject: Subject) -> Iterator[Site]:
    for output in subject.outputs:
        sentence = _misfit(output, output.loss) if output.loss is not None else None
        if sentence:
            yield output.path, sentence


def _misfit(output: Output, loss: Any) -> str | None:
    kind, activation = kind_of(loss), output.activation
    if activation is None:
        return None
    if kind in (*_CROSSENTROPIES, *_FOCAL) and activation not in (*_PROBABILITIES, "linear"):
        return (
            f"{kind} takes the logarithm of the output of {activation}, which is not a probability"
        )
    if (
        kind in ("CategoricalCrossentropy", "SparseCategoricalCrossentropy")
        and activation == "sigmoid"
    ):
        return None if (output.units or 2) > 1 else f"{kind} on one unit: use BinaryCrossentropy"
    if kind == "Poisson" and activation not in _POSITIVE:
        return (
            f"Poisson takes the logarithm of the output of {activation}, which can be 0 or negative"
        )
    if kind == "KLDivergence" and activation not in _PROBABILITIES:
        taken = f"KLDivergence takes the logarithm of the output of {activation}"
        return f"{taken}, which is not a probability"
    if kind == "MeanSquaredLogarithmicError" and activation not in _NONNEGATIVE:
        treated = f"MeanSquaredLogarithmicError treats negative outputs of {activation} as 0"
        return f"{treated}, where the gradient is 0"
    return None


@rule(
    "error",
    "Softmax over a single unit",
    why=(
        "Softmax normalizes over the last axis; over one unit it is always 1, and its gradient "
        "always 0."
    ),
    fix="Use sigmoid with BinaryCrossentropy, or one unit per class.",
    invalid=(
        "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation='softmax')])"
    ),
    valid=(
        "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, activation='sigmoid')])"
    ),
)
def softmax_of_one(subject: Subject) -> Iterator[Site]:
    for output in subject.outputs:
        if output.activation == "softmax" and output.units == 1:
            yield output.path, "softmax over one unit is 1 for any weights"


@rule(
    "warning",
    "A metric that may become NaN",
    why=(
        "A metric is a running mean: one NaN or Inf in one batch persists until the epoch ends. "
        "Metrics that take the"
        " logarithm or a quotient of unbounded outputs produce one sooner or later."
    ),
    fix="Set from_logits=True on the metric, or use one that matches the last activation.",
    invalid=(
        _sample(
            "",
            "keras.losses.CategoricalCrossentropy(from_logits=True), "
            "metrics=['categorical_crossentropy']",
        )
    ),
    valid=(
        _sample(
            "",
            "keras.losses.CategoricalCrossentropy(from_logits=True),\n"
            "              metrics=[keras.metrics.CategoricalCrossentropy(from_logits=True)]",
        )
    ),
)
def metric_does_not_fit(subject: Subject) -> Iterator[Site]:
    for output in subject.outputs:
        for metric in output.metrics:
            kind = kind_of(metric)
            if kind == "MeanRelativeError":
                yield kind, "MeanRelativeError divides by its normalizer, which may contain 0"
                continue
            sentence = _misfit(output, metric)
            if (
                kind in _CROSSENTROPIES
                and output.activation == "linear"
                and not _from_logits(metric)
            ):
                sentence = f"{kind} gets logits and expects probabilities"
            if sentence:
                yield kind, f"the metric on {output.name!r}: {sentence}"
