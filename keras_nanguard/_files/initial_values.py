"""Initial values of the variables in a file, from the configuration in it. Imports no backend.

Only constants: the initializers of Keras draw random values, for a loaded model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core.plain_values import plain_text
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

_CONSTANTS = {"Zeros": 0.0, "Ones": 1.0}
"""Initializers of Keras whose value is a constant."""


def initial_value(name: str, settings: Mapping[str, Any]) -> NDArray[Any] | str:
    """Return the initial value of a variable of a layer, a scalar, or the reason why there is none:
    only Keras draws random values.

    Args:
        name: name of the variable within its layer; its initializer is the setting
            `<name>_initializer`.
        settings: the layer's configuration, empty if there is none.
    """
    prefix = "depthwise" if name == "depthwise_kernel" else name
    node = settings.get(f"{prefix}_initializer")
    if name == "moving_stddev" or not isinstance(node, dict):
        if name in ONES or name in _ZEROS:
            return np.asarray(float(name in ONES))
        return f"its initial value is not in the file ({name})"
    kind = str(node.get("class_name"))
    if kind in _CONSTANTS:
        return np.asarray(_CONSTANTS[kind])
    return f"only Keras can run its initializer {plain_text(kind)!r}: repair the loaded model"
