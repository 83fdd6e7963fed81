"""Names of stored arrays as a Keras user knows them: layer, variable and role.

A `.weights.h5` file numbers the variables of each layer and names a layer by its class
(`layers/batch_normalization_1/vars/2`). The name of the layer is an attribute of the group of its
variables (since Keras 3.9); the name of a variable follows from the class and the flags of the
layer, read from the configuration if the file has one, and from the name of the group otherwise. If
that is ambiguous the number remains: nothing is guessed. The configuration is read as data: nothing
is built or imported from it.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._core.variable_names import MOVING, snake_case
from keras_nanguard._files.formats.contents import Contents, Identity, ModelArray


class LayerConfig:
    """The configuration of a layer, empty if a file has none.

    Args:
        node: the configuration as Keras serializes it; anything else counts as empty.

    Attributes:
        name: its name, or `""`.
        class_name: its class, or `""`.
    """

    def __init__(self, node: Any = None):
        node = node if isinstance(node, dict) else {}
        settings = node.get("config")
        self.settings: Mapping[str, Any] = settings if isinstance(settings, dict) else {}
        self.name, self.class_name = _text(self.settings.get("name")), _text(node.get("class_name"))

    def child(self, key: str, name: str) -> LayerConfig:
        """Return the configuration of a layer within this one, or an empty one.

        Args:
            key: the key under which it is saved: an attribute, or its class and number.
            name: its name, `""` if that is not known.
        """
        place = ("name", name) if name else ("key", key)
        return self._children.get(("attribute", key)) or self._children.get(place) or LayerConfig()

    @cached_property
    def _children(self) -> dict[tuple[str, str], LayerConfig]:
        found: dict[tuple[str, str], LayerConfig] = {}
        for attribute, value in self.settings.items():
            if _is_layer(value):
                found[("attribute", attribute)] = LayerConfig(value)
            counts: Counter[str] = Counter()
            listed = value if isinstance(value, list) else []
            for child in map(LayerConfig, filter(_is_layer, listed)):
                key = snake_case(child.class_name)
                number = f"_{counts[key]}" if counts[key] else ""
                counts[key] += 1
                found.setdefault(("key", key + number), child)
                found.setdefault(("name", child.name), child)
        if inner := found.get(("attribute", "layer")):  # of a Bidirectional
            found.setdefault(("attribute", "forward_layer"), inner)
        if cell := _CELLS.get(self.class_name):  # it is configured by its layer
            settings = {**self.settings, "name": ""}
            found[("attribute", "cell")] = LayerConfig({"class_name": cell, "config": settings})
        return found


def _text(value: Any) -> str:
    return plain_text(value) if isinstance(value, str) else ""


def _is_layer(node: Any) -> bool:
    """Return whether a node of the configuration is a layer, not an operation such as
    `keras.ops.add`."""
    if not isinstance(node, dict) or not isinstance(node.get("config"), dict):
        return False
    return not str(node.get("module", "")).startswith(("keras.ops", "keras.src.ops"))


def optimizer_settings(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the optimizer's settings from a model's configuration, with `class_name`; those of a
    `LossScaleOptimizer` are below those of its inner optimizer. Empty if there is none."""
    compiled = (config or {}).get("compile_config")
    node = compiled.get("optimizer") if isinstance(compiled, dict) else None
    outer = LayerConfig(node)
    inner = LayerConfig(outer.settings.get("inner_optimizer"))
    name = inner.class_name or outer.class_name
    return {**outer.settings, **inner.settings, "class_name": name} if node else {}


_KERNEL = ("kernel", "bias?use_bias")
_RECURRENT = ("kernel", "recurrent_kernel", "bias?use_bias")
_SEPARABLE = ("depthwise_kernel", "pointwise_kernel", "bias?use_bias")
_AFFINE = ("gamma?scale", "beta?center")

_VARIABLES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("Dense", "Conv1D", "Conv2D", "Conv3D"), _KERNEL),
    "EinsumDense": ("kernel", "bias?bias_axes"),
    **dict.fromkeys(("DepthwiseConv1D", "DepthwiseConv2D"), _KERNEL),
    **dict.fromkeys(("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose"), _KERNEL),
    **dict.fromkeys(("LSTMCell", "GRUCell", "SimpleRNNCell", "ConvLSTMCell"), _RECURRENT),
    **dict.fromkeys(("SeparableConv1D", "SeparableConv2D"), _SEPARABLE),
    **dict.fromkeys(("LayerNormalization", "GroupNormalization"), _AFFINE),
    "BatchNormalization": (
        *(*_AFFINE, *MOVING[:2]),
        *(f"{name}?renorm" for name in MOVING[2:]),
    ),
    "Normalization": ("mean", "variance", "count"),
    "RMSNormalization": ("scale",),
    "Embedding": ("embeddings",),
    "PReLU": ("alpha",),
}
"""Variables of a layer in the order in which Keras saves them; after a question mark the flag that
enables one."""

_BY_SNAKE_CASE = {snake_case(name): name for name in _VARIABLES}

_OFF_BY_DEFAULT = frozenset({"renorm"})

_CONTAINERS = frozenset({"layers", "_layer_checkpoint_dependencies"})

_CELLS = {"LSTM": "LSTMCell", "GRU": "GRUCell", "SimpleRNN": "SimpleRNNCell"}
_CELLS |= dict.fromkeys(("ConvLSTM1D", "ConvLSTM2D", "ConvLSTM3D"), "ConvLSTMCell")

_DENSE_OF_ATTENTION = ("query_dense", "key_dense", "value_dense", "output_dense")


def role_of(name: str, layer_class: str = "") -> str:
    """Return the role of a variable of a layer: `"statistics"`, `"weight"` or `"other"`."""
    if name in MOVING or (layer_class == "Normalization" and name in ("mean", "variance")):
        return "statistics"
    return "other" if name in ("count", "seed_generator_state") else "weight"


def named_arrays(contents: Contents) -> list[ModelArray]:
    """Return the arrays of a file, each with its identity."""
    config = LayerConfig(contents.config)
    alone = {"h5": _legacy, "orbax": _orbax, "npz": _by_path}.get(contents.kind)
    if alone is not None:
        return [replace(array, who=alone(array.location, config)) for array in contents.arrays]
    groups: dict[str, list[ModelArray]] = {}
    for array in sorted(contents.arrays, key=_number):
        groups.setdefault(array.location.rpartition("/")[0], []).append(array)
    who: dict[int, Identity] = {}
    for group, arrays in groups.items():
        found = _of_group(contents, config, group, arrays)
        who.update(zip(map(id, arrays), found, strict=True))
    return [replace(array, who=who[id(array)]) for array in contents.arrays]


def _number(array: ModelArray) -> int:
    last = array.location.rpartition("/")[2]
    return int(last) if last.isascii() and last.isdigit() and len(last) < 9 else -1


def _by_path(location: str, config: LayerConfig) -> Identity:
    layer, _, name = location.rpartition("/")
    role = role_of(name, config.class_name)
    return Identity(layer, name, role, config.class_name, config.settings)


def _legacy(location: str, config: LayerConfig) -> Identity:
    parts = [part.removesuffix(":0") for part in location.split("/")]
    if parts[0] == "optimizer_weights":
        return _slot(parts[1:])
    if parts[0] == "model_weights" and len(parts) > 1:
        parts = parts[1:]
    if config.name and parts[1:2] == [config.name]:  # Keras 3 may add the name of the model
        parts = [parts[0], *parts[2:]]
    if len(parts) > 1 and parts[0] == parts[1]:
        parts = parts[1:]
    for layer in parts[:-1]:
        config = config.child("", plain_text(layer))
    return _by_path("/".join(parts), config)


def _slot(parts: Sequence[str]) -> Identity:
    """Name a slot by its path, which contains the name of the optimizer: that of its class, if the
    user gave none."""
    return Identity("optimizer", "/".join(parts), "slot", "".join(parts[-2:-1]))


def _orbax(location: str, config: LayerConfig) -> Identity:
    kind, *rest = location.split("/")
    if kind == "optimizer_variables":
        return _slot(rest)
    found = _by_path("/".join(rest or [kind]), config)
    return replace(found, role="other") if kind == "metrics_variables" else found


def _of_group(
    contents: Contents, config: LayerConfig, group: str, arrays: Sequence[ModelArray]
) -> list[Identity]:
    """Name the arrays of one `<group>/vars`: those of one layer, in the order in which it saved
    them."""
    parts = [part for part in group.split("/") if part]
    parts = parts[:-1] if parts[-1:] == ["vars"] else parts
    numbers = [array.location.rpartition("/")[2] for array in arrays]
    # Every Keras optimizer saves its integer step count first; so may a layer of the user.
    first, named = arrays[0], any("optimizer" in part for part in parts)
    counts = first.location.endswith("vars/0") and first.dtype in ("int32", "int64")
    if parts[:1] == ["optimizer"] or (named and counts and first.shape == ()):
        own = contents.names.get("/".join(parts), "")
        names = _optimizer_names(arrays, contents.config, own, numbers)
        return [Identity("/".join(parts), name, "slot", "Optimizer") for name in names]
    layer, layer_class, settings = _layer(parts, contents.names, config)
    names = _variable_names(layer_class, settings, arrays) or numbers
    roles = [role_of(name, layer_class) for name in names]
    return [Identity(layer, name, role, layer_class, settings) for name, role in zip(names, roles)]


def _layer(
    parts: Sequence[str], names: Mapping[str, str], config: LayerConfig
) -> tuple[str, str, Mapping[str, Any]]:
    """Return the names of the layers along the path of a group, and class and settings of the last
    one."""
    layer_class = config.class_name
    found = [] if parts else [names.get("") or config.name]
    for depth, part in enumerate(parts):
        own = names.get("/".join(parts[: depth + 1]), "")
        if not own and (names or part in _CONTAINERS):
            continue
        config = config.child(part, own)
        layer_class = config.class_name or _guessed_class(part, own, layer_class)
        found.append(own or config.name or part)
    unnamed = "/".join(part for part in parts if part not in _CONTAINERS)  # as in a later shard
    return "/".join(filter(None, found)) or unnamed, layer_class, config.settings


def _guessed_class(part: str, own: str, outer: str) -> str:
    """Return the class of a layer without configuration, from names that Keras derives from the
    class."""
    if part == "cell" and outer in _CELLS:
        return _CELLS[outer]
    if part in _DENSE_OF_ATTENTION:
        return "EinsumDense"
    numberless = (re.sub(r"_\d+$", "", name) for name in (part, own))
    return next((_BY_SNAKE_CASE[name] for name in numberless if name in _BY_SNAKE_CASE), "")


def _optimizer_names(
    arrays: Sequence[ModelArray],
    config: Mapping[str, Any] | None,
    own: str,
    numbers: Sequence[str],
) -> list[str]:
    """Return names for the scalars at the start of an optimizer's variables; its slots keep their
    numbers.

    An optimizer starts with its step count and, unless it has a schedule, its learning rate. A
    `LossScaleOptimizer` has its own of these, its step counter and scale, and then those of its
    inner optimizer.
    """
    given = optimizer_settings(config).get("learning_rate", 0.0)
    header = ["iteration", *(["learning_rate"] if isinstance(given, (int, float)) else [])]
    if own.startswith("loss_scale_optimizer"):
        inner = [f"inner/{name}" for name in header]
        header += ["step_counter", "dynamic_scale", *inner]
    scalars = sum(1 for _ in itertools.takewhile(lambda array: array.shape == (), arrays))
    return [*header[:scalars], *numbers[len(header[:scalars]) :]]


def _variable_names(
    layer_class: str, settings: Mapping[str, Any], arrays: Sequence[ModelArray]
) -> list[str]:
    """Return the names of the variables, where class and number of arrays determine them.

    Every combination of flags that gives the right number of arrays is tried (only the configured
    one if there is a configuration); a position at which they disagree keeps its number.
    """
    variables = [name.partition("?")[::2] for name in _VARIABLES.get(layer_class, ())]
    if layer_class == "BatchNormalization" and len({array.shape for array in arrays}) > 1:
        return []
    quantized = any(array.dtype.startswith(("int", "uint")) for array in arrays)
    if quantized and layer_class != "Normalization":  # whose count is a whole number
        return []
    flags = sorted({flag for _, flag in variables if flag})
    configured = [bool(settings.get(flag, flag not in _OFF_BY_DEFAULT)) for flag in flags]
    choices = itertools.product((True, False), repeat=len(flags))
    candidates = []
    for chosen in [configured] if settings else choices:
        on = {"", *itertools.compress(flags, chosen)}
        names = [name for name, flag in variables if flag in on]
        if len(names) == len(arrays):
            candidates.append(names)
    columns = enumerate(map(set, zip(*candidates, strict=True)))
    return [names.pop() if len(names) == 1 else str(place) for place, names in columns]
