"""Initial values of the variables in a file, from the configuration in it. Imports no backend.

Constants are those of Keras, and random values are drawn with NumPy, so they have the same
distribution, but not the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core.variable_names import ONES

_ZERO_SLOTS = frozenset(("Adam", "AdamW", "SGD", "RMSprop", "Adamax", "Lion", "Lamb", "Adadelta"))
"""Optimizers of Keras whose slots are all initialized with 0 (`keras.src.optimizers`; Adagrad, Ftrl
and Nadam differ)."""

_INITIAL_SCALE = 2.0**15
"""Default initial scale of a `LossScaleOptimizer`."""

_START_SETTINGS = {"dynamic_scale": "initial_scale", "learning_rate": "learning_rate"}
"""Settings of an optimizer with the initial values of its variables that do not start at 0."""


def initial_slot(name: str, settings: Mapping[str, Any]) -> NDArray[Any] | str:
    """Return the initial value of a variable of an optimizer, or the reason why there is none.

    Args:
        name: name of the variable, or its number.
        settings: the optimizer's configuration, from `names.optimizer_settings`.
    """
    optimizer = settings.get("class_name")
    if optimizer not in (*_ZERO_SLOTS, "LossScaleOptimizer"):
        named = optimizer or "(which the file does not name)"
        unknown = f"the initial slots of the optimizer {named} are not known"
        return f"{unknown}: reset those of the loaded model"
    if settings.get("use_ema"):
        averages = "the optimizer has moving averages of the weights, which must not become 0"
        return f"{averages}: reset the loaded model"
    last = name.rpartition("/")[2]
    if last not in _START_SETTINGS:
        return np.zeros(())
    given = settings.get(_START_SETTINGS[last])
    if isinstance(given, (int, float)) and 0.0 < given < math.inf:
        return np.asarray(given)
    is_scale = last == "dynamic_scale"
    return np.asarray(_INITIAL_SCALE) if is_scale else "its initial value is not in the file"


_ZEROS = ("moving_mean", "renorm_mean", "mean", "beta", "bias")
"""Variables of layers that start at 0 if the configuration does not say otherwise; see `ONES`."""

_SCALING = {
    "VarianceScaling": (1.0, "fan_in", "truncated_normal"),
    "GlorotUniform": (1.0, "fan_avg", "uniform"),
    "GlorotNormal": (1.0, "fan_avg", "truncated_normal"),
    "HeUniform": (2.0, "fan_in", "uniform"),
    "HeNormal": (2.0, "fan_in", "truncated_normal"),
    "LecunUniform": (1.0, "fan_in", "uniform"),
    "LecunNormal": (1.0, "fan_in", "truncated_normal"),
}
"""`keras.initializers.VarianceScaling` and its named cases: scale, mode, distribution."""

_TRUNCATED_STDDEV = 0.87962566103423978
"""Standard deviation of a unit normal distribution truncated at 2, by which Keras divides."""


def initial_value(
    name: str, shape: tuple[int, ...], settings: Mapping[str, Any], draw: np.random.Generator
) -> NDArray[Any] | str:
    """Return initial values for a variable, or the reason why there are none.

    Args:
        name: name of the variable within its layer; its initializer is the setting
            `<name>_initializer`.
        shape: shape of the variable.
        settings: the layer's configuration, empty if there is none.
        draw: random number generator.

    Returns:
        An array of float64, or a reason.
    """
    prefix = "depthwise" if name == "depthwise_kernel" else name
    node = settings.get(f"{prefix}_initializer")
    if name == "moving_stddev" or not isinstance(node, dict):
        if name in ONES or name in _ZEROS:
            return np.full(shape, float(name in ONES))
        return f"its initial value is not in the file ({name})"
    kind, given = str(node.get("class_name")), node.get("config")
    try:
        return _drawn(kind, shape, given if isinstance(given, dict) else {}, draw)
    except (TypeError, ValueError, KeyError, ArithmeticError, MemoryError) as error:
        return f"its initializer {kind!r} could not be evaluated ({error})"


def _drawn(
    kind: str, shape: tuple[int, ...], options: Mapping[str, Any], draw: np.random.Generator
) -> NDArray[Any] | str:
    def number(name: str, default: float) -> float:
        return float(options.get(name, default))

    if kind in ("Zeros", "Ones", "Constant"):
        return np.full(shape, number("value", 0.0) if kind == "Constant" else float(kind == "Ones"))
    if kind == "RandomUniform":
        return draw.uniform(number("minval", -0.05), number("maxval", 0.05), shape)
    if kind == "RandomNormal":
        return draw.normal(number("mean", 0.0), number("stddev", 0.05), shape)
    if kind == "TruncatedNormal":
        units = _truncated_normal(shape, draw)
        return number("mean", 0.0) + number("stddev", 0.05) * units
    if kind not in _SCALING:
        return f"its initializer {kind!r} is not supported"
    scale, mode, distribution = _SCALING[kind]
    fan = _fan(shape, str(options.get("mode", mode)))
    stddev = math.sqrt(number("scale", scale) / max(1.0, fan))
    distribution = str(options.get("distribution", distribution))
    if distribution == "uniform":
        return draw.uniform(-math.sqrt(3.0) * stddev, math.sqrt(3.0) * stddev, shape)
    if distribution == "untruncated_normal":
        return draw.normal(0.0, stddev, shape)
    return stddev / _TRUNCATED_STDDEV * _truncated_normal(shape, draw)


def _fan(shape: tuple[int, ...], mode: str) -> float:
    """Return the number of inputs or outputs of a unit, or their mean, by the mode of Keras."""
    fan_in = fan_out = float(shape[0] if shape else 1)
    if len(shape) > 1:
        field = math.prod(shape[:-2])
        fan_in, fan_out = float(shape[-2] * field), float(shape[-1] * field)
    return {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[mode]


def _truncated_normal(shape: tuple[int, ...], draw: np.random.Generator) -> NDArray[Any]:
    values = draw.standard_normal(shape)
    while (outside := np.abs(values) > 2.0).any():
        values[outside] = draw.standard_normal(int(outside.sum()))
    return values
