"""Initial values of a variable from its layer's configuration, drawn with NumPy: no model, no backend.

Constants are those of Keras. Random values have the same distribution, but not the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["initial_value"]

_BY_NAME = {
    **dict.fromkeys(("moving_mean", "renorm_mean", "mean", "beta", "bias"), 0.0),
    **dict.fromkeys(("moving_variance", "moving_stddev", "renorm_stddev", "variance", "gamma"), 1.0),
}
"""Default initial values of these variables of layers."""

_SCALING = {
    "GlorotUniform": (1.0, "fan_avg", "uniform"),
    "GlorotNormal": (1.0, "fan_avg", "truncated_normal"),
    "HeUniform": (2.0, "fan_in", "uniform"),
    "HeNormal": (2.0, "fan_in", "truncated_normal"),
    "LecunUniform": (1.0, "fan_in", "uniform"),
    "LecunNormal": (1.0, "fan_in", "truncated_normal"),
}
"""The named cases of `keras.initializers.VarianceScaling`: scale, mode, distribution."""

_TRUNCATED_STDDEV = 0.87962566103423978
"""Standard deviation of a unit normal distribution truncated at 2, by which Keras divides."""


def initial_value(name: str, shape: tuple[int, ...], settings: Mapping[str, Any], draw: np.random.Generator) -> NDArray[Any] | str:
    """Return initial values for a variable, or the reason why there are none.

    Args:
        name: name of the variable within its layer; its initializer is the setting `<name>_initializer`.
        shape: shape of the variable.
        settings: the layer's configuration, empty if there is none.
        draw: random number generator.

    Returns:
        An array of float64, or a reason.
    """
    node = settings.get("depthwise_initializer") if name == "depthwise_kernel" else settings.get(f"{name}_initializer")
    if name == "moving_stddev":
        node = None  # derived from the initializer of the variance, whose default has the same square root
    if not isinstance(node, dict):
        value = _BY_NAME.get(name)
        return f"its initial value is not in the file ({name})" if value is None else np.full(shape, value)
    kind, given = str(node.get("class_name")), node.get("config")
    options: Mapping[str, Any] = given if isinstance(given, dict) else {}
    try:
        return _drawn(kind, shape, options, draw)
    except (TypeError, ValueError, KeyError, ArithmeticError, MemoryError) as error:
        return f"its initializer {kind!r} could not be evaluated ({error})"


def _drawn(kind: str, shape: tuple[int, ...], options: Mapping[str, Any], draw: np.random.Generator) -> NDArray[Any] | str:
    if kind in ("Zeros", "Ones"):
        return np.full(shape, float(kind == "Ones"))
    if kind == "Constant":
        return np.full(shape, float(options.get("value", 0.0)))
    if kind == "RandomUniform":
        return draw.uniform(float(options.get("minval", -0.05)), float(options.get("maxval", 0.05)), shape)
    if kind in ("RandomNormal", "TruncatedNormal"):
        mean, stddev = float(options.get("mean", 0.0)), float(options.get("stddev", 0.05))
        return mean + stddev * (_truncated_normal(shape, draw) if kind == "TruncatedNormal" else draw.standard_normal(shape))
    if kind == "VarianceScaling" or kind in _SCALING:
        scale, mode, distribution = _SCALING.get(kind, (1.0, "fan_in", "truncated_normal"))
        return _scaled(
            shape,
            float(options.get("scale", scale)),
            str(options.get("mode", mode)),
            str(options.get("distribution", distribution)),
            draw,
        )
    return f"its initializer {kind!r} is not supported"


def _scaled(shape: tuple[int, ...], scale: float, mode: str, distribution: str, draw: np.random.Generator) -> NDArray[Any]:
    """Draw with variance `scale / fan` (`keras.initializers.VarianceScaling`)."""
    fan_in, fan_out = _fans(shape)
    fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[mode]
    variance = scale / max(1.0, fan)
    if distribution == "uniform":
        bound = math.sqrt(3.0 * variance)
        return draw.uniform(-bound, bound, shape)
    if distribution == "untruncated_normal":
        return math.sqrt(variance) * draw.standard_normal(shape)
    return math.sqrt(variance) / _TRUNCATED_STDDEV * _truncated_normal(shape, draw)


def _fans(shape: tuple[int, ...]) -> tuple[float, float]:
    if len(shape) < 2:
        length = float(shape[0] if shape else 1)
        return length, length
    field = math.prod(shape[:-2])
    return float(shape[-2] * field), float(shape[-1] * field)


def _truncated_normal(shape: tuple[int, ...], draw: np.random.Generator) -> NDArray[Any]:
    values = draw.standard_normal(shape)
    while (outside := np.abs(values) > 2.0).any():
        values[outside] = draw.standard_normal(int(outside.sum()))
    return values
