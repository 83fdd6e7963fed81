"""Names of stored arrays as a Keras user knows them: layer, variable and role.

A `.weights.h5` file numbers the variables of each layer and names a layer by its class
(`layers/batch_normalization_1/vars/2`). The name of the layer is an attribute of the group of its
variables (since Keras 3.9); the name of a variable follows from the class and the flags of the
layer, read from the configuration if the file has one, and from the name of the group otherwise. If
that is ambiguous the number remains: nothing is guessed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_nanguard._files.config_tree import (
    ConfigTree,
    class_name,
    optimizer_settings,
    own_name,
    settings_of,
    snake_case,
)
from keras_nanguard._files.stored import Contents, StoredArray, plain_text

__all__ = ["ROLES", "Identity", "identities", "role_of"]

ROLES = ("weight", "statistics", "slot", "other")
"""The roles of variables.

`weight`: trained, or set by the user. `statistics`: moving averages of BatchNormalization, mean and
variance of Normalization. `slot`: belongs to an optimizer. `other`: counters, seeds, metrics.
"""

_STATISTICS = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")

_KERNEL = (("kernel", ""), ("bias", "use_bias"))
_RECURRENT = (("kernel", ""), ("recurrent_kernel", ""), ("bias", "use_bias"))
_AFFINE = (("gamma", "scale"), ("beta", "center"))

_VARIABLES: Mapping[str, tuple[tuple[str, str], ...]] = {
    **dict.fromkeys(
        (
            "Dense",
            "EinsumDense",
            "Conv1D",
            "Conv2D",
            "Conv3D",
            "DepthwiseConv1D",
            "DepthwiseConv2D",
        ),
        _KERNEL,
    ),
    **dict.fromkeys(("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose"), _KERNEL),
    **dict.fromkeys(("LSTMCell", "GRUCell", "SimpleRNNCell", "ConvLSTMCell"), _RECURRENT),
    **dict.fromkeys(("LayerNormalization", "GroupNormalization"), _AFFINE),
    "BatchNormalization": (
        *_AFFINE,
        ("moving_mean", ""),
        ("moving_variance", ""),
        ("moving_stddev", "renorm"),
        ("renorm_mean", "renorm"),
        ("renorm_stddev", "renorm"),
    ),
    **dict.fromkeys(
        ("SeparableConv1D", "SeparableConv2D"),
        (("depthwise_kernel", ""), ("pointwise_kernel", ""), ("bias", "use_bias")),
    ),
    "Normalization": (("mean", ""), ("variance", ""), ("count", "")),
    "RMSNormalization": (("scale", ""),),
    "Embedding": (("embeddings", ""),),
    "PReLU": (("alpha", ""),),
}
"""Variables of a layer in the order in which Keras saves them, each with the flag that enables
it."""

_CONTAINERS = frozenset({"layers", "_layer_checkpoint_dependencies"})

_OFF_BY_DEFAULT = frozenset({"renorm"})

_CELLS = {"LSTM": "LSTMCell", "GRU": "GRUCell", "SimpleRNN": "SimpleRNNCell"}
_CELLS |= dict.fromkeys(("ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D"), "ConvLSTMCell")

_DENSE_OF_ATTENTION = ("query_dense", "key_dense", "value_dense", "output_dense")


_BY_SNAKE_CASE = {snake_case(name): name for name in _VARIABLES}


@dataclass(frozen=True, slots=True)
class Identity:
    """The names and the role of a stored array.

    Attributes:
        layer: names of the layers that contain it, outermost first, joined by `/`.
        name: name of the variable, or its number if the name is not known.
        role: one of `ROLES`.
        layer_class: class of the layer, or `""` if it is not known.
        settings: the layer's configuration, empty if the file has none.
    """

    layer: str
    name: str
    role: str
    layer_class: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Layer and variable, as one path."""
        return f"{self.layer}/{self.name}" if self.layer else self.name


def role_of(name: str, layer_class: str = "") -> str:
    """Return the role of a variable of a layer: `"statistics"`, `"weight"` or `"other"`."""
    if name in _STATISTICS or (layer_class == "Normalization" and name in ("mean", "variance")):
        return "statistics"
    return "other" if name in ("count", "seed_generator_state") else "weight"


def identities(contents: Contents) -> list[Identity]:
    """Return the identity of each array of a file, in the order of its arrays."""
    if contents.kind == "h5":
        tree = ConfigTree()
        return [_legacy(array.location, contents.config, tree) for array in contents.arrays]
    if contents.kind == "orbax":
        return [_orbax(array.location) for array in contents.arrays]
    if contents.kind == "npz":
        return [_flat(array.location) for array in contents.arrays]
    return _grouped(contents)


def _flat(location: str) -> Identity:
    layer, _, name = location.rpartition("/")
    return Identity(layer, name, role_of(name), settings={})


def _legacy(location: str, config: Mapping[str, Any] | None, tree: ConfigTree) -> Identity:
    parts = [part.removesuffix(":0") for part in location.split("/")]
    if parts[0] == "optimizer_weights":
        return Identity("optimizer", "/".join(parts[1:]), "slot", "Optimizer", {})
    if parts[0] == "model_weights" and len(parts) > 1:
        parts = parts[1:]
    if len(parts) > 1 and parts[0] == parts[1]:
        parts = parts[1:]
    layers, name = parts[:-1], parts[-1]
    node = tree.descend(config or {}, layers)
    layer_class = class_name(node)
    return Identity(
        "/".join(layers), name, role_of(name, layer_class), layer_class, settings_of(node)
    )


def _orbax(location: str) -> Identity:
    parts = location.split("/")
    role = {"optimizer_variables": "slot", "metrics_variables": "other"}.get(parts[0], "")
    layers = parts[1:-1]
    if role == "slot":
        return Identity("optimizer", "/".join(parts[1:]), "slot", "Optimizer", {})
    return Identity("/".join(layers), parts[-1], role or role_of(parts[-1]), settings={})


def _grouped(contents: Contents) -> list[Identity]:
    """Name the arrays of a Keras 3 file: all arrays in one `<group>/vars` belong to one layer."""
    groups: dict[str, list[StoredArray]] = {}
    for array in contents.arrays:
        groups.setdefault(array.location.rpartition("/")[0], []).append(array)
    namer = _Namer(contents)
    found: dict[str, Identity] = {}
    for group, arrays in groups.items():
        arrays.sort(key=lambda array: _number(array.location))
        for array, identity in zip(arrays, namer.name(group, arrays), strict=True):
            found[array.location] = identity
    return [found[array.location] for array in contents.arrays]


def _number(location: str) -> tuple[int, str]:
    last = location.rpartition("/")[2]
    return (int(last), "") if last.isascii() and last.isdigit() and len(last) < 9 else (-1, last)


class _Namer:
    """Names the arrays of the groups of one file."""

    def __init__(self, contents: Contents):
        self._names = contents.names
        self._config: Mapping[str, Any] = contents.config or {}
        self._tree = ConfigTree()

    def name(self, group: str, arrays: Sequence[StoredArray]) -> list[Identity]:
        """Return the identities of the arrays of one group, in order."""
        parts = group.split("/") if group else []
        parts = parts[:-1] if parts[-1:] == ["vars"] else parts
        labels = [array.location.rpartition("/")[2] for array in arrays]
        if _is_optimizer(parts, arrays):
            named = _optimizer_names(
                arrays, self._config, self._names.get("/".join(parts), ""), labels
            )
            return [Identity("/".join(parts), name, "slot", "Optimizer", {}) for name in named]
        layer, node, layer_class = self._layer(parts)
        names = _variable_names(layer_class, settings_of(node), arrays) or labels
        settings = settings_of(node)
        return [
            Identity(layer, name, role_of(name, layer_class), layer_class, settings)
            for name in names
        ]

    def _layer(self, parts: Sequence[str]) -> tuple[str, Mapping[str, Any], str]:
        """Return the names of the layers along the path of a group, and configuration and class of
        the last one."""
        node = self._config
        layer_class = class_name(node)
        shown = [] if parts else [self._names.get("") or own_name(node)]
        for depth, part in enumerate(parts):
            own = self._names.get("/".join(parts[: depth + 1]), "")
            if not own and (self._names or part in _CONTAINERS):
                continue
            child = self._tree.child(node, part, own)
            outer, node = layer_class, child
            layer_class = class_name(child) or _guessed_class(part, own, outer)
            shown.append(own or own_name(child) or part)
        return plain_text("/".join(filter(None, shown))), node, layer_class


def _guessed_class(part: str, own: str, outer: str) -> str:
    """Return the class of a layer without configuration, from names that Keras derives from the
    class."""
    if part == "cell" and outer in _CELLS:
        return _CELLS[outer]
    if part in _DENSE_OF_ATTENTION:
        return "EinsumDense"
    for name in (part, own):
        known = _BY_SNAKE_CASE.get(re.sub(r"_\d+$", "", name))
        if known:
            return known
    return ""


def _is_optimizer(parts: Sequence[str], arrays: Sequence[StoredArray]) -> bool:
    """Return whether a group is that of an optimizer: by its location, or by its first variable.

    Every Keras optimizer saves its integer step count first; the first variable of no Keras layer
    is an integer scalar.
    """
    if parts[:1] == ["optimizer"]:
        return True
    first = arrays[0]
    return (
        first.location.endswith("vars/0")
        and first.shape == ()
        and first.dtype in ("int32", "int64")
    )


def _optimizer_names(
    arrays: Sequence[StoredArray], config: Mapping[str, Any], own: str, labels: Sequence[str]
) -> list[str]:
    """Return names for the scalars at the start of an optimizer's variables; its slots keep their
    numbers.

    An optimizer starts with its step count and, unless it has a schedule, its learning rate. A
    `LossScaleOptimizer` has its own of these, its step counter and scale, and then those of its
    inner optimizer.
    """
    rate = (
        ["learning_rate"]
        if isinstance(optimizer_settings(config).get("learning_rate", 0.0), (int, float))
        else []
    )
    header = ["iteration", *rate]
    if own.startswith("loss_scale_optimizer"):
        header = [
            "iteration",
            *rate,
            "step_counter",
            "dynamic_scale",
            "inner/iteration",
            *(f"inner/{n}" for n in rate),
        ]
    scalars = list(itertools.takewhile(lambda array: array.shape == (), arrays))
    header = header[: len(scalars)]
    return [*header, *labels[len(header) :]]


def _variable_names(
    layer_class: str, settings: Mapping[str, Any], arrays: Sequence[StoredArray]
) -> list[str]:
    """Return the names of the variables, where class and number of arrays determine them.

    Every combination of flags that gives the right number of arrays is tried (only the configured
    one if there is a configuration); a position at which they disagree keeps its number.
    """
    order = _VARIABLES.get(layer_class)
    if order is None or (
        layer_class == "BatchNormalization" and len({array.shape for array in arrays}) > 1
    ):
        return []
    flags = sorted({flag for _, flag in order if flag})
    candidates = []
    for values in itertools.product((True, False), repeat=len(flags)):
        chosen = dict(zip(flags, values, strict=True))
        if settings and any(
            bool(settings.get(f, f not in _OFF_BY_DEFAULT)) != on for f, on in chosen.items()
        ):
            continue
        names = [name for name, flag in order if not flag or chosen[flag]]
        if len(names) == len(arrays):
            candidates.append(names)
    columns = [set(column) for column in zip(*candidates, strict=True)]
    return [
        column.pop() if len(column) == 1 else str(place) for place, column in enumerate(columns)
    ]
