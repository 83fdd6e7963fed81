"""Names that Keras gives to the variables of layers and to layers, and what follows from a name
alone: which variables are statistics, which cannot be negative, which start at 1, which slots are
second moments, and which layers are recurrent.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOVING = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")
"""The statistics of a BatchNormalization; the last three only if it renormalizes."""

STATISTIC = ("mean", "variance", "stddev")
"""Words in the name of a running statistic, also of a custom layer."""

SPREADS = ("variance", "stddev")
"""Words in the name of a statistic that cannot be negative."""

STARTS = {
    **dict.fromkeys(("moving_variance", "running_variance", "moving_stddev"), 1.0),
    **dict.fromkeys(("renorm_stddev", "variance", "gamma", "scale"), 1.0),
    **dict.fromkeys(("moving_mean", "running_mean", "renorm_mean", "mean", "beta", "bias"), 0.0),
}
"""Where variables start if nothing else is configured."""

SECOND_MOMENTS = {
    **dict.fromkeys(("adam", "adamw", "nadam", "lamb", "rmsprop"), "_velocity"),
    **dict.fromkeys(("muon", "adafactor"), "_velocity"),
    "adamax": "_norm",
    "adagrad": "_accumulator",
    "adadelta": "_accumulated_grad",
}
"""The end of the names of the slots that average or sum squared gradients, by the class of the
optimizer in lower case. Adamax keeps their largest magnitude."""

_INITIALIZERS = {
    "kernel": ("depthwise",),
    "recurrent_kernel": ("recurrent",),
    "depthwise_kernel": ("depthwise",),
    "pointwise_kernel": ("pointwise",),
}
"""Variables whose initializer a layer of Keras calls after something else, and after what."""

RECURRENT = frozenset(
    ("LSTM", "GRU", "SimpleRNN", "RNN", "Bidirectional", "ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D")
)
"""Classes of recurrent layers."""

CELLS = frozenset(("LSTMCell", "GRUCell", "SimpleRNNCell", "ConvLSTMCell", "StackedRNNCells"))
"""Classes of the cells that recurrent layers call in each step."""


def is_second_moment(slot: str, optimizer: str) -> bool:
    """Return whether only squared gradients change a slot, by its name and the name of the
    optimizer's class. The sum of gradients of several batches is another slot."""
    end = SECOND_MOMENTS.get(optimizer.lower())
    return end is not None and slot.endswith(end) and not slot.endswith("_gradient_accumulator")


def selected(only: tuple[str, ...], *names: str) -> bool:
    """Return whether a name matches one of the patterns; if there are none, everything does."""
    return not only or any(fnmatchcase(name, pattern) for name in names for pattern in only)


def initializer_names(variable: str) -> tuple[str, ...]:
    """Return the names under which a layer may have the initializer of a variable, as attributes
    and in its configuration.
    """
    return tuple(f"{word}_initializer" for word in (variable, *_INITIALIZERS.get(variable, ())))


def with_unit_forget_bias(bias: NDArray[Any]) -> NDArray[Any]:
    """Return the bias of an LSTM with 1 for its forget gates, the second of four quarters."""
    units = bias.shape[-1] // 4 if bias.ndim else 0
    changed = np.array(bias)
    changed[..., units : 2 * units] = 1.0
    return changed


def snake_case(name: str) -> str:
    """Return a class name in snake case, as Keras names groups
    (`keras.src.utils.naming.to_snake_case`)."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()
