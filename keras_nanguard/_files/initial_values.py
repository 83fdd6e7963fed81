"""Initial values of the variables in a file, from the configuration in it: constants only, as the
process that reads a file imports no backend that could draw others.
"""

from __future__ import annotations

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
    name: str, shape: tuple[int, ...], settings: Mapping[str, Any]
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
    options = given if isinstance(given, dict) else {}
    constants = {"Zeros": 0.0, "Ones": 1.0, "Constant": _number(options.get("value", 0.0))}
    value = constants.get(str(kind))
    if value is None:
        named = f"its initializer {plain_text(kind, 60)!r} is not evaluated for a file"
        if str(kind) in constants:
            named = f"its initializer {kind!r} has no single finite value"
        raise NotRepaired(f"{named}: load the model and repair that")
    if name == "bias" and settings.get("unit_forget_bias") and shape:
        return with_unit_forget_bias(np.broadcast_to(value, shape))
    return value


def _number(value: Any) -> float | None:
    """Return a value of a configuration as a finite number, or `None` if it is not one."""
    is_finite = isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
    return float(value) if is_finite else None
