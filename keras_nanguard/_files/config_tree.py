"""The configuration of a model, read as data: the tree of layers with their classes and settings.

Nothing is built or imported from it. Imports no backend.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from keras_nanguard._files.stored import plain_text

__all__ = ["LayerConfig", "optimizer_settings", "snake_case"]


def snake_case(name: str) -> str:
    """Return a class name in snake case, as Keras names groups
    (`keras.src.utils.naming.to_snake_case`)."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


class LayerConfig:
    """The configuration of a layer, empty if a file has none.

    Args:
        node: the configuration as Keras serializes it; anything else counts as empty.

    Attributes:
        settings: its settings.
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
            for child in map(LayerConfig, filter(_is_layer, _listed(value))):
                key = snake_case(child.class_name)
                number = f"_{counts[key]}" if counts[key] else ""
                counts[key] += 1
                found.setdefault(("key", key + number), child)
                found.setdefault(("name", child.name), child)
        if inner := found.get(("attribute", "layer")):  # of a Bidirectional
            found.setdefault(("attribute", "forward_layer"), inner)
        return found


def _text(value: Any) -> str:
    return plain_text(value) if isinstance(value, str) else ""


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


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
