"""Rules about single layers: normalization, pooling, recurrence, initializers, and operations with
a limited domain."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_nanguard._core.plain_values import times
from keras_nanguard._files.live import live_arrays
from keras_nanguard._files.scan import statistics
from keras_nanguard._keras.layers import arguments_of, class_of, source_of
from keras_nanguard._keras.variables import read
from keras_nanguard._lint.rule import Site, rule
from keras_nanguard._lint.subject import (
    POSITIVE,
    Placed,
    Subject,
    activation_name,
    last_activation,
)

_BOUNDED = ("tanh", "sigmoid", "hard_sigmoid", "softsign", "softmax", "hard_tanh", "sparsemax")

_MAX_GAIN = 25.0
"""Maximum of the variance of the initializer times fan-in. At 1 (Glorot) or 2 (He) signals keep
their scale; at 25 they grow by a factor of five per layer, and of two million in nine layers."""

_MIN_GAIN = 1e-4
"""Minimum. At 1e-4 signals shrink by a factor of a hundred per layer."""

_DOMAINS = {
    **dict.fromkeys(("Log", "Log2", "Log10", "Rsqrt", "Reciprocal"), 0),
    **dict.fromkeys(("Divide", "TrueDivide"), 1),
}
"""Operations that are not defined for every number, and the index of the argument that matters."""

_SAFE = ("Softplus", "Exp", "Sigmoid", "Softmax", "Cosh", "Maximum", "Clip")
"""Operations whose result is positive (unless a sigmoid underflows), or that the user bounds away
from 0."""

_KEEP_SIGN = ("Sqrt", "Sum", "Mean", "Prod", "Max", "Min", "Reshape", "ExpandDims", "Squeeze")
"""Operations whose result is positive if their first argument is."""

_OF_SEVERAL = ("Add", "Multiply", "Divide", "TrueDivide", "Where")
"""Operations whose result is positive if all of their arguments are."""

_MAX_DEPTH = 8
"""Number of operations through which a positive number is followed."""


@rule(
    "error", fix="Use a momentum between 0.9 and 0.999.", each="layers", of=("BatchNormalization",)
)
def batchnorm_momentum(placed: Placed) -> str:
    """BatchNormalization with momentum 0 or 1."""
    momentum = getattr(placed.layer, "momentum", None)
    if not isinstance(momentum, (int, float)) or 0.0 < momentum < 1.0:
        return ""
    return f"momentum {momentum:g}"


@rule(
    "error",
    fix="Use larger batches, or LayerNormalization.",
    each="operations",
    of=("BatchNormalization",),
)
def batchnorm_batch_of_one(placed: Placed) -> str:
    """BatchNormalization over a single value."""
    shape: tuple[Any, ...] = getattr(getattr(placed.layer, "input", None), "shape", ())
    single = bool(shape) and shape[0] == 1 and all(length == 1 for length in shape[1:-1])
    return f"inputs of shape {tuple(shape)}: one value per channel" if single else ""


def _unlike_kernels(subject: Subject, trained: bool) -> Iterator[Site]:
    """Yield each model within the model (and the model itself) whose own BatchNorms are trained,
    some or all of them, and whose layers with kernels are all frozen; or the reverse."""
    groups: dict[str, tuple[list[Placed], list[Placed]]] = {}
    for placed in subject.layers:
        norms, kernels = groups.setdefault(placed.path.rpartition("/")[0], ([], []))
        names = ("kernel", "depthwise_kernel")
        if placed.kind == "BatchNormalization":
            norms.append(placed)
        elif any(getattr(placed.layer, name, None) is not None for name in names):
            kernels.append(placed)
    word, other = ("trained", "frozen") if trained else ("frozen", "trained")
    for base, (norms, kernels) in groups.items():
        found = [placed for placed in norms if placed.layer.trainable == trained]
        if found and kernels and all(placed.layer.trainable != trained for placed in kernels):
            whose = f"{base or subject.model.name}, whose kernels are {other}"
            yield found[0].path, f"{len(found)} {word} BatchNormalization layers in {whose}"


@rule("warning", fix="Freeze all layers of the base model, or none.")
def batchnorm_frozen(subject: Subject) -> Iterator[Site]:
    """Frozen BatchNormalization among trainable layers."""
    return _unlike_kernels(subject, trained=False)


@rule("warning", fix="Call the base model with training=False, and freeze all of its layers.")
def batchnorm_thawed(subject: Subject) -> Iterator[Site]:
    """Trainable BatchNormalization in a frozen base model."""
    return _unlike_kernels(subject, trained=True)


@rule("error", fix="Call adapt() on the training data, and drop constant features.")
def normalization_not_adapted(subject: Subject) -> Iterator[Site]:
    """Normalization that was never adapted, or with zero variance."""
    rescaled = any(placed.kind == "Rescaling" for placed in subject.layers)
    for placed in subject.layers:
        if placed.kind != "Normalization" or not getattr(placed.layer, "built", False):
            continue
        own = {str(variable.name): read(variable) for variable in placed.layer.variables}
        # `None` unless mean and variance were given.
        given = getattr(placed.layer, "input_variance", None)
        variance = np.asarray(own.get("variance", given), np.float64)
        if constant := int((variance == 0).sum()):
            verb = "is" if constant == 1 else "are"
            yield placed.path, f"{times(constant, 'feature')} {verb} constant"
        elif "mean" not in own or rescaled:
            continue
        elif (own["mean"] == 0).all() and (variance == 1).all():
            yield placed.path, "adapt() was never called: the layer returns its inputs unchanged"


@rule(
    "error",
    fix=(
        "Load a good file, or use keras_nanguard.repair; keras_nanguard.scan lists every bad value."
    ),
)
def nonfinite_weights(subject: Subject) -> Iterator[Site]:
    """NaN or Inf in weights, statistics or slots."""
    trained = {id(variable) for variable in subject.model.trainable_variables}
    for live in live_arrays(subject.model) if getattr(subject.model, "built", True) else ():
        if live.who.role not in ("statistics", "slot") and id(live.variable) not in trained:
            continue  # a mask of -Inf is intentional, and so may be a NaN marker
        found = statistics(live.pieces()) if live.is_float else None
        if found is not None and found.nonfinite:
            yield live.location, f"{found.nonfinite} of {found.size} values are NaN or Inf"


@rule("warning", fix="Make the stride at most the pool size.", each="layers")
def pooling_stride(placed: Placed) -> str:
    """Pooling stride above its window."""
    pool_size = getattr(placed.layer, "pool_size", None)
    if "Pooling" not in placed.kind or pool_size is None:  # global, or adaptive
        return ""
    window, strides = _tuple(pool_size), _tuple(placed.layer.strides)
    subsampling = max(window) == 1  # which is intentional
    above = any(step > size for step, size in zip(strides, window, strict=False))
    if subsampling or not above:
        return ""
    return f"stride {strides} above the window {window}: values in between are never used"


def _tuple(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


@rule(
    "warning",
    fix="Use tanh (the default).",
    each="layers",
    of=("LSTM", "GRU", "SimpleRNN", "ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D"),
)
def unbounded_recurrence(placed: Placed) -> str:
    """Unbounded activation in a recurrence."""
    name = activation_name(placed.layer.activation)
    bounded = name is None or name in _BOUNDED
    return "" if bounded else f"{placed.kind} with the activation {name}"


@rule("warning", fix="Use GlorotUniform (the default), or HeNormal before relu.", each="layers")
def initializer_variance(placed: Placed) -> str:
    """Initializer variance far from 1 / fan."""
    # The variance of a layer's output is that of its input times fan-in times that of the kernel
    # (Glorot and Bengio, 2010; He et al., 2015).
    given = getattr(placed.layer, "kernel_initializer", None)
    shape = tuple(getattr(getattr(placed.layer, "kernel", None), "shape", ()))
    names = f"{placed.kind} {type(placed.layer).__name__}"
    if len(shape) < 2 or given is None or "Einsum" in names or "Depthwise" in names:
        return ""
    variance, fan_in = _variance(given), math.prod(shape[:-1])
    if variance is None or _MIN_GAIN <= variance * fan_in <= _MAX_GAIN:
        return ""
    times = f"{variance * fan_in:.3g} times the variance 1 / {fan_in}"
    return f"{type(given).__name__} has {times}"


def _variance(initializer: Any) -> float | None:
    """Return the variance of an initializer that is independent of the fan, or `None` for any other
    initializer."""
    kind = type(initializer).__name__
    if not type(initializer).__module__.startswith("keras."):
        return None
    if kind in ("RandomNormal", "TruncatedNormal"):
        return float(initializer.stddev) ** 2
    if kind == "RandomUniform":
        return (float(initializer.maxval) - float(initializer.minval)) ** 2 / 12
    return None


@rule(
    "warning",
    fix="Add a small constant, clip, or use softplus, log1p or divide_no_nan.",
    each="operations",
    of=_DOMAINS,
)
def unprotected_operation(placed: Placed) -> str:
    """Logarithm or division without epsilon."""
    source = _argument(placed.layer, _DOMAINS[placed.kind])
    if source is None or _protected(source):
        return ""
    return f"{placed.kind} of the output of {source.name}, which may be 0 or negative"


def _argument(operation: Any, place: int) -> Any:
    """Return the operation that computes an argument, or `None` if it is a constant."""
    values = arguments_of(operation)
    source = source_of(values[place]) if place < len(values) else None
    return None if source is None else source[0]


def _protected(operation: Any, depth: int = _MAX_DEPTH) -> bool:
    """Whether the result of an operation is positive, or bounded away from 0 by a constant."""
    kind = class_of(operation)
    if kind in _SAFE or last_activation(operation) in POSITIVE:
        return True
    if kind not in (*_KEEP_SIGN, *_OF_SEVERAL) or not depth:
        return False
    values = keras.tree.flatten(arguments_of(operation))
    if kind in _KEEP_SIGN:
        return _is_positive(values[0], depth)
    values = values[1:] if kind == "Where" else values
    bounded = kind in ("Add", "Where") and any(map(_is_bound, values))
    return bounded or all(_is_positive(value, depth) for value in values)


def _is_positive(value: Any, depth: int) -> bool:
    source = source_of(value)
    return _is_bound(value) if source is None else _protected(source[0], depth - 1)


def _is_bound(value: Any) -> bool:
    """Whether an argument is a constant other than 0."""
    is_number = isinstance(value, (int, float)) or hasattr(value, "dtype")
    if not is_number or source_of(value) is not None:
        return False
    return bool(np.all(keras.ops.convert_to_numpy(value) != 0))
