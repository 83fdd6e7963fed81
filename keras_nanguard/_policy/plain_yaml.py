"""YAML for policy files: the plain core of YAML 1.2. No tags, no anchors, no aliases, no key twice.

PyYAML reads YAML 1.1, in which the key `on` is the boolean true, `1e6` is a string and `1:30` is ninety. Policy files
have a field `on` and many numbers, so this loader uses the core schema of YAML 1.2 instead. Needs pyyaml.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped, unused-ignore]  # stubs are not installed everywhere

from keras_nanguard._policy.fields import shown

__all__ = ["loaded"]


class _Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]  # no stubs, no base class
    """A safe loader that knows null, booleans, integers and floats, and nothing else."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}


def loaded(text: str, max_depth: int) -> Any:
    """Return the value of a YAML text.

    Raises:
        ValueError: if it is not well formed, or holds a tag, an anchor, an alias or a key twice, or nests deeper than
            `max_depth`.
    """
    try:
        _reject_features(text, max_depth)
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise ValueError(f"{error.problem or error.context}{line}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


def _reject_features(text: str, max_depth: int) -> None:
    """Scan the events once, without recursion, and raise for features that policy files do not have."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ValueError(f"an anchor or alias in line {line}, which policy files do not have")
        if getattr(event, "tag", None):
            raise ValueError(f"the tag {shown(event.tag)} in line {line}, which policy files do not have")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > max_depth:
            raise ValueError(f"more than {max_depth} levels of nesting in line {line}")


def _table(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise ValueError(f"the key {shown(key)}, which is not a string; put it in quotes")
        if key in table:
            raise ValueError(f"the key {shown(key)} twice in one table")
        table[key] = loader.construct_object(value_node, deep=True)
    return table


def _number(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(str(loader.construct_scalar(node)).lower().replace(".inf", "inf").replace(".nan", "nan"))


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


_PLAIN = {
    "null": (r"~|null|Null|NULL|", "~nN"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
}

for _word, (_pattern, _first) in _PLAIN.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_word}", re.compile(f"^(?:{_pattern})$"), [*_first, ""])
_Loader.add_constructor("tag:yaml.org,2002:map", _table)
_Loader.add_constructor("tag:yaml.org,2002:int", _whole)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)
