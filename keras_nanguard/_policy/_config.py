"""Policy documents: presets, what lies over what, and how one is written as TOML. Level 0: imports no backend.

A document is the plain table that a policy file holds. pydantic is imported only where a document of the user's own has
to be validated; the presets of this package are validated by its tests.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from keras_nanguard._errors import PolicyError, expected
from keras_nanguard._policy._documents import SUFFIXES, checked_depth, parsed, read
from keras_nanguard._policy._fields import nearest, refuse, shown

__all__ = ["DEFAULT_PRESET", "NO_PRESET", "PRESETS", "VERSION", "preset", "resolved", "toml"]

VERSION = 1
"""Number of the form of policy files."""

PRESETS = ("recover", "stop", "raise", "observe", "strict-fp16", "finetune", "long-run")
"""The policies that come with the package."""

DEFAULT_PRESET = "recover"
"""What a document builds on where it does not say."""

NO_PRESET = "none"
"""What a document says that builds on nothing."""


@cache
def preset(name: str) -> Mapping[str, Any]:
    """Return the document of a preset, resolved down to `NO_PRESET`. It is shared: do not change it."""
    if name == NO_PRESET:
        return {}
    text = Path(__file__).parents[1].joinpath("policies", f"{name}.toml").read_text("utf-8")
    document = parsed(text, ".toml", name)
    return _over(preset(document.get("preset", DEFAULT_PRESET)), document)


def resolved(source: str | os.PathLike[str] | Mapping[str, Any], overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the whole document of a policy: validated, its preset laid under it and `overrides` over it.

    Raises:
        PolicyError: with every fault of the source, or of the overrides.
    """
    if isinstance(source, str) and source in PRESETS:
        if not overrides:
            return preset(source)
        document: Mapping[str, Any] = {"preset": source}
    elif isinstance(source, Mapping):
        document = _validated(source, "the policy")
    elif isinstance(source, (str, os.PathLike)):
        document = _validated(_file(source), shown(os.fspath(source)))
    else:
        remedy = "Name a preset or a file, or give a dict or a Policy."
        raise PolicyError(expected("a policy", type(source).__name__, remedy))
    if overrides:
        document = {**document, **_over(document, _validated(overrides, "the overrides"))}
    return _over(preset(document.get("preset", DEFAULT_PRESET)), document)


def _file(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the document in a file, or tell which preset was meant."""
    path = os.fspath(source)
    if not isinstance(path, str):
        raise PolicyError(expected("the path of a policy file as text", shown(path), "Decode it first."))
    looks_like_a_file = os.path.splitext(path)[1].lower() in SUFFIXES or os.sep in path or not isinstance(source, str)
    if looks_like_a_file:
        return read(source)
    meant = nearest(path, PRESETS)
    remedy = f"Did you mean {meant!r}?" if meant else "A file has to end in " + ", ".join(SUFFIXES) + "."
    raise PolicyError(expected("a preset (" + ", ".join(PRESETS) + ") or a policy file", shown(path), remedy))


def _validated(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    from keras_nanguard._policy._schema import faults_in  # pydantic: half of what a preset by name costs otherwise

    checked_depth(document, name)
    refuse(faults_in(document), name)
    return document


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one document over another: rules by their name, sections field by field, everything else as a whole."""
    merged = {**below, **above}
    for section in ("snapshot",):
        if section in below and section in above:
            merged[section] = {**below[section], **above[section]}
    if "checks" in below and "checks" in above:
        merged["checks"] = _sites_over(below["checks"], above["checks"])
    if "layers" in below and "layers" in above:
        globs = {**below["layers"], **above["layers"]}
        merged["layers"] = {
            glob: _sites_over(below["layers"].get(glob, {}), above["layers"].get(glob, {})) for glob in globs
        }
    if "rules" in below and "rules" in above:
        merged["rules"] = _rules_over(below["rules"], above["rules"])
    return merged


def _sites_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay sites over sites, `true` and `false` standing for `{ enabled = ... }`."""
    long = [
        {site: {"enabled": given} if isinstance(given, bool) else given for site, given in sites.items()}
        for sites in (below, above)
    ]
    return {site: {**long[0].get(site, {}), **long[1].get(site, {})} for site in {**long[0], **long[1]}}


def _rules_over(below: list[Mapping[str, Any]], above: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Lay rules over the rules of the same name, field by field; the others come first, in their order."""
    given = {rule["name"]: rule for rule in above}
    names = {rule["name"] for rule in below}
    fresh = [rule for rule in above if rule["name"] not in names]
    return [*fresh, *({**rule, **given.get(rule["name"], {})} for rule in below)]


def toml(document: Mapping[str, Any]) -> str:
    """Return a document as TOML, in the shape in which one would write it by hand."""
    lines = [_line(word, value) for word, value in document.items() if not isinstance(value, (dict, list))]
    for word, section in document.items():
        if word == "rules":
            for rule in section:
                lines += ["", "[[rules]]", *(_line(key, value) for key, value in rule.items())]
        elif word == "layers":
            for glob, sites in section.items():
                lines += ["", f"[layers.{_text(glob)}]", *(_line(key, value) for key, value in sites.items())]
        elif isinstance(section, Mapping):
            lines += ["", f"[{word}]", *(_line(key, value) for key, value in section.items())]
    return "\n".join(lines) + "\n"


def _line(word: str, value: Any) -> str:
    return f"{_key(word)} = {_value(value)}"


def _key(word: str) -> str:
    return word if re.fullmatch(r"[A-Za-z0-9_-]+", word) else _text(word)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_line(key, inner) for key, inner in value.items()) + " }" if value else "{}"
    return "[" + ", ".join(_value(inner) for inner in value) + "]"


def _text(text: str) -> str:
    """Return a basic string. JSON escapes the same characters as TOML, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
