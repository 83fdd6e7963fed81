"""Reading policy files: TOML, JSON and YAML into plain tables, safe for untrusted files.

A file is data. Nothing in it is executed or expanded, and every problem with it is reported in one sentence: a
directory, another encoding, too large, nested too deeply, a key written twice, a YAML tag. Imports no backend.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from keras_nanguard._core.errors import PolicyError, expected
from keras_nanguard._policy.fields import shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["SUFFIXES", "checked_depth", "parsed", "read"]

MAX_BYTES = 65_536
"""Maximum size of a policy file. The longest preset has two thousand bytes."""

MAX_DEPTH = 24
"""Maximum nesting of tables and lists. Only conditions and `otherwise` nest at all."""

MAX_DOTS = 256
"""Maximum number of dots in a line of TOML. `tomllib` takes the square of the length of a dotted key: 40 s for one of 60,000 bytes."""

MAX_VALUES = 20_000
"""Maximum number of values in one policy."""


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the table that a policy file holds.

    Raises:
        PolicyError: if it cannot be read, or is not in the format of its suffix.
    """
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        what = "a policy file that ends in " + ", ".join(SUFFIXES)
        raise PolicyError(expected(what, shown(os.fspath(path)), "Give the file the suffix of its format."))
    name = shown(os.fspath(path))
    return parsed(_text(file, name), suffix, name)


def parsed(text: str, suffix: str, name: str = "the text") -> dict[str, Any]:
    """Return the table that a text in the format of `suffix` holds.

    Raises:
        PolicyError: if it is not well formed, is no table, or is nested too deeply.
    """
    format_name = SUFFIXES[suffix]
    try:
        document = _PARSERS[format_name](text)
    except PolicyError:
        raise
    except RecursionError:
        problem = f"nested deeper than {MAX_DEPTH}"
    except (ValueError, OverflowError, ArithmeticError, LookupError) as error:
        problem = shown(" ".join(str(error).split()))[1:-1]
    else:
        if not isinstance(document, dict):
            raise PolicyError(expected(f"a table in {name}", shown(document), "Start with version = 1."))
        checked_depth(document, name)
        return document
    raise PolicyError(expected(f"well-formed {format_name} in {name}", problem, "Correct the file.")) from None


def checked_depth(document: Mapping[Any, Any], name: str) -> None:
    """Raise for a document that is too deep, too large or circular, and for keys that are not strings.

    Raises:
        PolicyError: with the first such problem.
    """
    remedy = "A policy needs a few dozen values; simplify it."
    level: list[Any] = [document]
    count = 0
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _inside(outer, name)]
        count += len(level)
        if count > MAX_VALUES:
            raise PolicyError(expected(f"at most {MAX_VALUES} values in {name}", f"at least {count}", remedy))
        if not level:
            return
    raise PolicyError(expected(f"at most {MAX_DEPTH} levels of nesting in {name}", "more", remedy))


def _inside(outer: Any, name: str) -> Iterable[Any]:
    if isinstance(outer, Mapping):
        invalid = [key for key in outer if not isinstance(key, str)]
        if invalid:
            raise PolicyError(expected(f"strings as keys in {name}", shown(invalid[0]), "Put the key in quotes."))
        return outer.values()
    return outer if isinstance(outer, (list, tuple)) else ()


def _text(file: Path, name: str) -> str:
    """Return the text of a regular file of moderate size, in UTF-8."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            kind = "a directory" if file.is_dir() else "something that is not a regular file"
            raise PolicyError(expected(f"a policy file at {name}", kind, "Name the file itself."))
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise PolicyError(expected(f"a policy file at {name}", problem, "Check the path.")) from None
    if len(raw) > MAX_BYTES:
        raise PolicyError(expected(f"at most {MAX_BYTES} bytes in {name}", "more", "Name a policy file."))
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"the byte 0x{raw[error.start]:02x} at offset {error.start}"
        raise PolicyError(expected(f"UTF-8 text in {name}", problem, "Save the file as UTF-8.")) from None


def _toml(text: str) -> Any:
    crowded = next((n for n, line in enumerate(text.splitlines(), 1) if line.count(".") > MAX_DOTS and line.lstrip()[:1] != "#"), 0)
    if crowded:
        raise ValueError(f"more than {MAX_DOTS} dots in line {crowded}")
    return tomllib.loads(text)


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_reject_constant)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {shown(next(key for key in keys if keys.count(key) > 1))} twice in one table")
    return table


def _reject_constant(word: str) -> float:
    raise ValueError(f"the number {word}, which JSON does not have")


def _yaml(text: str) -> Any:
    try:
        from keras_nanguard._policy import plain_yaml
    except ImportError:
        remedy = "Install it with: pip install keras_nanguard[yaml], or write the policy in TOML or JSON."
        raise PolicyError(expected("the package pyyaml, to read a YAML policy", "no such package", remedy)) from None
    return plain_yaml.loaded(text, MAX_DEPTH)


SUFFIXES = {".toml": "TOML", ".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}
"""The format of each suffix."""

_PARSERS: dict[str, Callable[[str], Any]] = {"TOML": _toml, "JSON": _json, "YAML": _yaml}
