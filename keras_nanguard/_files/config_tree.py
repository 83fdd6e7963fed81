"""The configuration of a model, read as data: the tree of layers with their classes and settings.

Nothing is built or imported from it. Imports no backend.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from keras_nanguard._files.stored import plain_text

__all__ = [
    "ConfigTree",
    "class_name",
    "optimizer_settings",
    "own_name",
    "settings_of",
    "snake_case",
]


def snake_case(name: str) -> str:
    """Return a class name in snake case, as Keras names groups
    (`keras.src.utils.naming.to_snake_case`)."""
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


class ConfigTree:
    """Finds the configuration of a layer within that of the model, by name or by the key under
    which it is saved."""

    def __init__(self) -> None:
        self._indexed: dict[int, dict[tuple[str, str], Mapping[str, Any]]] = {}

    def child(self, node: Mapping[str, Any], part: str, own: str) -> Mapping[str, Any]:
        """Return the configuration of a layer within `node`, or an empty one."""
        settings = settings_of(node)
        wrapped = settings.get(part) or (settings.get("layer") if part == "forward_layer" else None)
        if isinstance(wrapped, dict) and _is_layer(wrapped):
            return wrapped
        if id(node) not in self._indexed:
            self._indexed[id(node)] = _indexed(settings)
        index = self._indexed[id(node)]
        return index.get(("name", own)) or ({} if own else index.get(("key", part), {}))

    def descend(self, node: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
        """Return the configuration of the layer that a path of names leads to, or an empty one."""
        for name in names:
            node = self.child(node, "", name)
        return node


def _indexed(settings: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for listed in settings.values():
        counts: Counter[str] = Counter()
        for child in listed if isinstance(listed, list) else ():
            if not _is_layer(child):
                continue
            found.setdefault(("name", own_name(child)), child)
            key = snake_case(class_name(child))
            found.setdefault(("key", f"{key}_{counts[key]}" if counts[key] else key), child)
            counts[key] += 1
    return found


def _is_layer(node: Any) -> bool:
    """Return whether a node of the configuration is a layer, not an operation such as
    `keras.ops.add`."""
    if not isinstance(node, dict) or not isinstance(node.get("config"), dict):
        return False
    return not str(node.get("module", "")).startswith(("keras.ops", "keras.src.ops"))


def settings_of(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a layer's configuration, empty where there are none."""
    settings = node.get("config")
    return settings if isinstance(settings, dict) else {}


def class_name(node: Mapping[str, Any]) -> str:
    """Return the class of a layer, or `""`."""
    name = node.get("class_name")
    return plain_text(name) if isinstance(name, str) else ""


def own_name(node: Mapping[str, Any]) -> str:
    """Return the name of a layer, or `""`."""
    name = settings_of(node).get("name")
    return plain_text(name) if isinstance(name, str) else ""


def optimizer_settings(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the optimizer's settings from a model's configuration, with `class_name`; empty where
    there is none."""
    node: Any = config or {}
    for key in ("compile_config", "optimizer"):
        node = node.get(key) if isinstance(node, dict) else None
    inner = settings_of(node).get("inner_optimizer") if isinstance(node, dict) else None
    node = inner if isinstance(inner, dict) else node
    return {**settings_of(node), "class_name": class_name(node)} if isinstance(node, dict) else {}
