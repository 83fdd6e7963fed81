"""Initial values of a variable from its layer's configuration, drawn with NumPy: no model, no
backend.

Constants are those of Keras. Random values have the same distribution, but not the same numbers;
for a live model the layer's own initializer is called (`_keras.layers.initial_value`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ONES = ("moving_variance", "moving_stddev", "renorm_stddev", "variance", "gamma")
_ZEROS = ("moving_mean", "renorm_mean", "mean", "beta", "bias")
"""Variables of layers that start with 1 or 0 if the configuration does not say otherwise."""

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
        if name in _ONES or name in _ZEROS:
            return np.full(shape, float(name in _ONES))
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
