"""Rules about single layers: normalization, pooling, recurrence, initializers, and operations with
a limited domain."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_nanguard._files.arrays import float_name, statistics
from keras_nanguard._files.live import live_variables
from keras_nanguard._keras.structure import arguments_of, source_of
from keras_nanguard._lint.rule import Site, layers, operations, rule
from keras_nanguard._lint.subject import Placed, Subject, activation_name

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
"""Operations that are not defined for every number, and the place of the argument that counts."""

_SAFE = ("Softplus", "Exp", "Sigmoid", "Softmax", "Maximum", "Clip")
"""Operations whose result is positive (unless a sigmoid underflows), or that the user bounds away
from 0."""

_POSITIVE = ("softplus", "exponential", "sigmoid", "softmax")

_TOWER = (
    "layers = [keras.layers.Dense(8, trainable=%s), keras.layers.BatchNormalization(trainable={})]"
    "\nmodel = keras.Sequential([keras.Input((8,)), *layers])"
)


@rule(
    "error",
    "BatchNormalization with momentum 0 or 1",
    why="With momentum 1 the moving statistics never change, and inference ignores the data; with "
    "momentum 0 they are the statistics of the last batch.",
    fix="Use a momentum between 0.9 and 0.999.",
    program="layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(momentum={})]\n"
    "model = keras.Sequential([keras.Input((8,)), *layers])",
    invalid="1.0",
    valid="0.99",
    each=layers("BatchNormalization"),
)
def batchnorm_momentum(placed: Placed) -> str:
    momentum = float(placed.layer.momentum)
    return "" if 0.0 < momentum < 1.0 else f"momentum {momentum:g}"


@rule(
    "error",
    "BatchNormalization over a single value",
    why="The variance of one value is 0: in training every output equals beta, whatever the input.",
    fix="Use larger batches, or LayerNormalization.",
    program="inputs = keras.Input((8,), batch_size={})\n"
    "model = keras.Sequential([inputs, keras.layers.BatchNormalization()])",
    invalid="1",
    valid="32",
    each=operations("BatchNormalization"),
)
def batchnorm_batch_of_one(placed: Placed) -> str:
    shape: tuple[Any, ...] = getattr(getattr(placed.layer, "input", None), "shape", ())
    single = bool(shape) and shape[0] == 1 and all(length == 1 for length in shape[1:-1])
    return f"inputs of shape {tuple(shape)}: one value per channel" if single else ""


def _towers(subject: Subject) -> Iterator[tuple[str, list[Placed], list[Placed]]]:
    """Yield each model within the model (and the model itself) with its own BatchNorms and layers
    with kernels."""
    groups: dict[str, tuple[list[Placed], list[Placed]]] = {}
    for placed in subject.layers:
        norms, kernels = groups.setdefault(placed.path.rpartition("/")[0], ([], []))
        names = ("kernel", "depthwise_kernel")
        if placed.kind == "BatchNormalization":
            norms.append(placed)
        elif any(getattr(placed.layer, name, None) is not None for name in names):
            kernels.append(placed)
    for tower, (norms, kernels) in groups.items():
        if norms and kernels:
            yield tower or str(subject.model.name), norms, kernels


@rule(
    "warning",
    "Frozen BatchNormalization among trainable layers",
    why="A frozen BatchNormalization keeps the old statistics of its inputs, while the layers "
    "before it change them: activations drift and can overflow.",
    fix="Freeze all layers of the tower, or none.",
    program=_TOWER % "True",
    invalid="False",
    valid="True",
)
def batchnorm_frozen(subject: Subject) -> Iterator[Site]:
    for tower, norms, kernels in _towers(subject):
        frozen = [placed for placed in norms if not placed.layer.trainable]
        if frozen and all(placed.layer.trainable for placed in kernels):
            counted = f"{len(frozen)} frozen BatchNormalization layers"
            yield frozen[0].path, f"{counted} in {tower}, whose kernels are trained"


@rule(
    "warning",
    "Trainable BatchNormalization in a frozen tower",
    why="The statistics of a pretrained tower are overwritten by those of small new batches, while "
    "its kernels expect the old ones: training metrics look good, validation metrics do not.",
    fix="Call the tower with training=False, and freeze all of its layers.",
    program=_TOWER % "False",
    invalid="True",
    valid="False",
)
def batchnorm_thawed(subject: Subject) -> Iterator[Site]:
    for tower, norms, kernels in _towers(subject):
        thawed = [placed for placed in norms if placed.layer.trainable]
        if thawed and not any(placed.layer.trainable for placed in kernels):
            counted = f"{len(thawed)} trained BatchNormalization layers"
            yield thawed[0].path, f"{counted} in {tower}, whose kernels are frozen"


@rule(
    "error",
    "Normalization that was never adapted, or with zero variance",
    why="Without adapt() the layer does nothing, and inputs of any scale reach the model; a "
    "feature of zero variance is divided by 1e-7.",
    fix="Call adapt() on the training data, and drop constant features.",
    program="norm = keras.layers.Normalization()\n{}"
    "model = keras.Sequential([keras.Input((4,)), norm, keras.layers.Dense(1)])",
    invalid="",
    valid="norm.adapt(np.random.default_rng(0).normal(size=(99, 4)))\n",
)
def normalization_not_adapted(subject: Subject) -> Iterator[Site]:
    rescaled = any(placed.kind == "Rescaling" for placed in subject.layers)
    for placed in subject.layers:
        if placed.kind != "Normalization" or not getattr(placed.layer, "built", False):
            continue
        own = {str(variable.name): variable.numpy() for variable in placed.layer.variables}
        given = placed.layer.input_variance  # `None` unless mean and variance were given
        variance = np.asarray(own.get("variance", given), np.float64)
        if constant := int((variance == 0).sum()):
            yield placed.path, f"{constant} features are constant"
        elif own and not rescaled and (own["mean"] == 0).all() and (variance == 1).all():
            yield placed.path, "adapt() was never called: the layer returns its inputs unchanged"


@rule(
    "error",
    "NaN or Inf in weights, statistics or slots",
    why="Every step and every prediction computes NaN from such a value, and training never makes "
    "it finite again.",
    fix="Load a good file, or use keras_nanguard.repair; keras_nanguard.scan lists every bad "
    "value.",
    program="model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])\n{}",
    invalid="model.layers[0].kernel.assign(np.full((4, 2), np.inf))",
    valid="",
)
def nonfinite_weights(subject: Subject) -> Iterator[Site]:
    trained = {id(variable) for variable in subject.model.trainable_variables}
    for live in live_variables(subject.model) if getattr(subject.model, "built", True) else ():
        if live.identity.role not in ("statistics", "slot") and id(live.variable) not in trained:
            continue  # a mask of -Inf is intentional, and so may be a NaN marker
        values = live.read()
        found = statistics(values) if float_name(values.dtype) else None
        if found is not None and found.nonfinite:
            yield live.keras_path, f"{found.nonfinite} of {values.size} values are NaN or Inf"


@rule(
    "warning",
    "Pooling stride above its window",
    why="Rows and columns between two windows affect no output and get no gradient: usually two "
    "numbers were swapped.",
    fix="Make the stride at most the pool size.",
    program="pooling = keras.layers.MaxPooling2D({})\n"
    "model = keras.Sequential([keras.Input((9, 9, 1)), pooling])",
    invalid="2, strides=3",
    valid="3, strides=2",
    each=layers(),
)
def pooling_stride(placed: Placed) -> str:
    if "Pooling" not in placed.kind or placed.kind.startswith("Global"):
        return ""
    window, strides = _tuple(placed.layer.pool_size), _tuple(placed.layer.strides)
    subsampling = max(window) == 1  # which is intentional
    above = any(step > size for step, size in zip(strides, window, strict=False))
    if subsampling or not above:
        return ""
    return f"stride {strides} above the window {window}: values in between are never used"


def _tuple(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (int(value),)


@rule(
    "warning",
    "Unbounded activation in a recurrence",
    why="The state is multiplied by the recurrent kernel at every step; without an upper bound it "
    "grows exponentially with the length of the sequence.",
    fix="Use tanh (the default).",
    program="model = keras.Sequential([keras.Input((20, 4)), keras.layers.LSTM(8{})])",
    invalid=", activation='relu'",
    valid="",
    each=layers("LSTM", "GRU", "SimpleRNN", "ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D"),
)
def unbounded_recurrence(placed: Placed) -> str:
    name = activation_name(placed.layer.activation)
    bounded = name is None or name in _BOUNDED
    return "" if bounded else f"{placed.kind} with the activation {name}"


@rule(
    "warning",
    "Initializer variance far from 1 / fan",
    why="The variance of a layer's output is that of its input times fan-in times that of the "
    "kernel. If that factor is far from 1, the signal grows or vanishes exponentially with depth "
    "(Glorot and Bengio, 2010; He et al., 2015).",
    fix="Use GlorotUniform (the default), or HeNormal before relu.",
    program="dense = keras.layers.Dense(8, kernel_initializer={})\n"
    "model = keras.Sequential([keras.Input((512,)), dense])",
    invalid="keras.initializers.RandomNormal(stddev=1.0)",
    valid="'he_normal'",
    each=layers(),
)
def initialiser_variance(placed: Placed) -> str:
    given = getattr(placed.layer, "kernel_initializer", None)
    shape = tuple(getattr(getattr(placed.layer, "kernel", None), "shape", ()))
    if len(shape) < 2 or given is None or "Einsum" in placed.kind or "Depthwise" in placed.kind:
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
    if kind in ("RandomNormal", "TruncatedNormal"):
        return float(initializer.stddev) ** 2
    if kind == "RandomUniform":
        return (float(initializer.maxval) - float(initializer.minval)) ** 2 / 12
    return None


@rule(
    "warning",
    "Logarithm or division without epsilon",
    why="log(0) is -Inf, the log of a negative number NaN, x / 0 Inf or NaN, and their gradients "
    "are not finite either.",
    fix="Add a small constant, clip, or use softplus, log1p or divide_no_nan.",
    program="inputs = keras.Input((4,))\nhidden = keras.layers.Dense(4)(inputs)\n"
    "model = keras.Model(inputs, keras.ops.log({}))",
    invalid="hidden",
    valid="keras.ops.maximum(hidden, 1e-6)",
    each=operations(*_DOMAINS),
)
def unprotected_operation(placed: Placed) -> str:
    source = _argument(placed.layer, _DOMAINS[placed.kind])
    if source is None or _protected(source):
        return ""
    return f"{placed.kind} of the output of {source.name}, which may be 0 or negative"


def _argument(operation: Any, place: int) -> Any:
    """Return the operation that computes an argument, or `None` if it is a constant."""
    values = arguments_of(operation)
    source = source_of(values[place]) if place < len(values) else None
    return None if source is None else source[0]


def _protected(operation: Any) -> bool:
    kind = type(operation).__name__
    if kind in _SAFE:
        return True
    if kind == "Add" and any(isinstance(value, (int, float)) for value in arguments_of(operation)):
        return True
    return activation_name(getattr(operation, "activation", None)) in _POSITIVE
