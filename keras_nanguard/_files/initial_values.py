"""Initial values of the variables in a file, from the configuration in it. Imports no backend.

Constants are those of Keras, and random values are drawn with NumPy, so they have the same
distribution, but not the same numbers: the process that reads a file has no memory for a backend.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._core.variable_names import STARTS, initializer_names, with_unit_forget_bias
from keras_nanguard._files.repair_arrays import NotRepaired

_ZERO_SLOTS = frozenset(("Adam", "AdamW", "SGD", "RMSprop", "Adamax", "Lion", "Lamb", "Adadelta"))
"""Optimizers of Keras whose slots are all initialized with 0 (`keras.src.optimizers`; Adagrad, Ftrl
and Nadam differ)."""

_INITIAL_SCALE = 2.0**15
"""Default initial scale of a `LossScaleOptimizer`."""

_START_SETTINGS = {"dynamic_scale": "initial_scale", "learning_rate": "learning_rate"}
"""Settings of an optimizer with the initial values of its variables that do not start at 0."""

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


def initial_slot(name: str, settings: Mapping[str, Any]) -> float:
    """Return the initial value of a variable of an optimizer.

    Args:
        name: name of the variable, or its number.
        settings: the optimizer's configuration, from `names.optimizer_settings`.

    Raises:
        NotRepaired: if it does not follow from the file.
    """
    optimizer = settings.get("class_name")
    if optimizer not in (*_ZERO_SLOTS, "LossScaleOptimizer"):
        named = optimizer or "(which the file does not name)"
        unknown = f"the initial slots of the optimizer {named} are not known"
        raise NotRepaired(f"{unknown}: reset those of the loaded model")
    if settings.get("use_ema"):
        averages = "the optimizer has moving averages of the weights, which must not become 0"
        raise NotRepaired(f"{averages}: reset the loaded model")
    last = name.rpartition("/")[2]
    if last not in _START_SETTINGS:
        return 0.0
    given = _number(settings.get(_START_SETTINGS[last]))
    if given is not None and given > 0.0:
        return given
    if last == "dynamic_scale":
        return _INITIAL_SCALE
    raise NotRepaired("its initial value is not in the file")


def initial_value(
    name: str, shape: tuple[int, ...], settings: Mapping[str, Any], draw: np.random.Generator
) -> NDArray[Any] | float:
    """Return initial values of a variable of a layer, of its shape or one for all.

    Args:
        name: name of the variable within its layer.
        settings: the layer's configuration, empty if there is none.

    Raises:
        NotRepaired: if they do not follow from the file.
    """
    nodes = map(settings.get, initializer_names(name))
    node = next((node for node in nodes if isinstance(node, dict)), None)
    if name == "moving_stddev" or node is None:
        if name in STARTS:
            return STARTS[name]
        raise NotRepaired(f"its initial value is not in the file ({name})")
    kind, given = node.get("class_name"), node.get("config")
    try:
        drawn = _drawn(str(kind), shape, given if isinstance(given, dict) else {}, draw)
        if name == "bias" and settings.get("unit_forget_bias"):
            return with_unit_forget_bias(np.broadcast_to(drawn, shape))
        return drawn
    except (TypeError, ValueError, KeyError, ArithmeticError, MemoryError) as error:
        named = f"its initializer {plain_text(kind, 60)!r} could not be evaluated"
        raise NotRepaired(f"{named} ({plain_text(error, 100)})") from error


def _drawn(
    kind: str, shape: tuple[int, ...], options: Mapping[str, Any], draw: np.random.Generator
) -> NDArray[Any] | float:
    def number(name: str, default: float) -> float:
        value = _number(options.get(name, default))
        if value is None:
            raise ValueError(f"{name} is not a finite number")
        return value

    if kind in ("Zeros", "Ones", "Constant"):
        return number("value", 0.0) if kind == "Constant" else float(kind == "Ones")
    if kind == "RandomUniform":
        return draw.uniform(number("minval", -0.05), number("maxval", 0.05), shape)
    if kind == "RandomNormal":
        return draw.normal(number("mean", 0.0), number("stddev", 0.05), shape)
    if kind == "TruncatedNormal":
        return number("mean", 0.0) + number("stddev", 0.05) * _truncated_normal(shape, draw)
    if kind not in _SCALING:
        raise ValueError("it is not supported: load the model and repair that")
    scale, mode, distribution = _SCALING[kind]
    fan = _fan(shape, options.get("mode", mode))
    stddev = math.sqrt(number("scale", scale) / max(1.0, fan))
    distribution = options.get("distribution", distribution)
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


def _number(value: Any) -> float | None:
    """Return a value of a configuration as a finite number, or `None` if it is not one."""
    is_finite = isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
    return float(value) if is_finite else None
