"""Reading policy files: TOML, JSON and YAML into plain tables, safe for untrusted files.

A file is data: nothing in it is executed or expanded.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras_nanguard._core.errors import PolicyError, expected
from keras_nanguard._core.plain_values import one_line
from keras_nanguard._policy.records import safe_repr

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_BYTES = 16_384
"""Maximum size of a policy file: ten times the longest preset.

The time of `tomllib` grows with the square of the length of a dotted key: 3 s for one of this size.
"""

MAX_DEPTH = 12
"""Maximum nesting of tables and lists. A policy needs 5."""

MAX_REASON = 300
"""Maximum length of what a parser says about a text."""


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the table that a policy file holds.

    Raises:
        PolicyError: if it cannot be read, or is not in the format of its suffix.
    """
    file, name = Path(path), safe_repr(os.fspath(path))
    if file.suffix.lower() not in SUFFIXES:
        what = "a policy file that ends in " + ", ".join(SUFFIXES)
        raise PolicyError(expected(what, name, "Give the file the suffix of its format."))
    return parsed(_text(file, name), file.suffix.lower(), name)


def parsed(text: str, suffix: str, name: str = "the text") -> dict[str, Any]:
    """Return the table that a text in the format of `suffix` holds.

    Raises:
        PolicyError: if it is not well formed, is not a table, or is nested too deep.
    """
    format_name, parse = SUFFIXES[suffix]
    try:
        document = parse(text)
    except PolicyError:
        raise
    except RecursionError:
        received = f"nested deeper than {MAX_DEPTH}"
    except Exception as error:  # noqa: BLE001  parsers raise many kinds for malformed text
        received = one_line(error, MAX_REASON)
    else:
        if isinstance(document, dict):
            return document
        remedy = "Start with version = 2."
        raise PolicyError(expected(f"a table in {name}", safe_repr(document), remedy))
    what = f"well-formed {format_name} in {name}"
    raise PolicyError(expected(what, received, "Correct the file.")) from None


def _text(file: Path, name: str) -> str:
    """Return the text of a regular file of moderate size, in UTF-8."""
    try:
        if file.exists() and not file.is_file():
            raise ValueError("something that is not a regular file")
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError("a larger one")
        return raw.decode("utf-8-sig")
    except FileNotFoundError:
        received = f"{name}, which does not exist"
        raise PolicyError(expected("a policy file", received, "Check its path.")) from None
    except (OSError, ValueError) as error:
        what = f"a policy file of at most {MAX_BYTES} bytes in UTF-8 at {name}"
        received = getattr(error, "strerror", None) or str(error)
        raise PolicyError(expected(what, received, "Check the file and its path.")) from None


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique_keys)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"the key {safe_repr(key)} twice in one table")
        table[key] = value
    return table


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        remedy = (
            "Install it: pip install keras_nanguard[yaml]. Or write the policy in TOML or JSON."
        )
        what = "the package pyyaml, to read a YAML policy"
        raise PolicyError(expected(what, "no such package", remedy)) from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]  # stubs may be missing
        """A safe loader that reads `1e-7` as a number. It rejects aliases, because nested ones grow
        without bounds.
        """

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("an alias, which policy files do not allow")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
            table: dict[str, Any] = super().construct_mapping(node, deep)
            if len(table) < len(node.value):
                raise ValueError("a key twice in one table")
            return table

    number = re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789"))
    return yaml.load(text, Loader=Loader)


SUFFIXES: dict[str, tuple[str, Callable[[str], Any]]] = {
    ".toml": ("TOML", tomllib.loads),
    ".json": ("JSON", _json),
    ".yaml": ("YAML", _yaml),
    ".yml": ("YAML", _yaml),
}
"""The format of each suffix, and its parser."""
