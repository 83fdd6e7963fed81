"""Policy documents: presets, how documents override one another, and output as TOML. Imports no backend.

A document is the plain table that a policy file holds. pydantic is imported only to validate a document of the user;
the tests validate the presets.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from keras_nanguard._core.errors import PolicyError, expected
from keras_nanguard._policy.documents import SUFFIXES, checked_depth, parsed, read
from keras_nanguard._policy.fields import raise_problems, reconciled, shown
from keras_nanguard._policy.presets import DEFAULT_PRESET, NO_PRESET, PRESETS
from keras_nanguard._policy.settings import LossScaleCheck, Snapshot
from keras_nanguard._policy.spelling import nearest

__all__ = ["Resolved", "over", "preset", "resolved", "toml"]

@cache
def preset(name: str) -> Mapping[str, Any]:
    """Return the document of a preset with everything it inherits. It is cached and shared: do not modify it."""
    if name == NO_PRESET:
        return {}
    text = Path(__file__).parents[1].joinpath("policies", f"{name}.toml").read_text("utf-8")
    document = parsed(text, ".toml", name)
    return _merged(preset(document.get("preset", DEFAULT_PRESET)), document)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The whole document of a policy.

    Attributes:
        document: the table, validated, with nothing left to inherit.
        overridden: for each rule that overrides one of the same name, the fields that were given.
    """

    document: Mapping[str, Any]
    overridden: Mapping[str, frozenset[str]] = field(default_factory=dict)


def resolved(
    source: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> Resolved:
    """Return the complete document of a policy: the source merged over its preset, and `overrides` merged over both.

    Values set by source and overrides are kept, and rejected where they contradict one another. Inherited values that
    contradict them are adjusted.

    Args:
        source: name of a preset, path of a file, or document.
        overrides: sections with precedence over the source.
        defaults: sections with precedence over the preset, but not over the source.

    Raises:
        PolicyError: with every problem of the source, or of the overrides.
    """
    if isinstance(source, str) and source in PRESETS:
        if not overrides and not defaults:
            return Resolved(preset(source))
        document: Mapping[str, Any] = {"preset": source}
    elif isinstance(source, Mapping):
        document = _validated(source, "the policy")
    elif isinstance(source, (str, os.PathLike)):
        document = _validated(_file(source), shown(os.fspath(source)))
    else:
        raise PolicyError(expected(_EXPECTED, *_received_and_remedy(source)))
    if overrides:
        document = _merged(document, _validated(overrides, "the sections given as arguments"), adjust=False)
    return _layered(_merged(preset(document.get("preset", DEFAULT_PRESET)), defaults or {}), document)


def over(
    below: Mapping[str, Any], overrides: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> Resolved:
    """Return the complete document of a policy, `below`, with `overrides` merged over it; it is adjusted where they contradict it.

    Raises:
        PolicyError: with every problem of the overrides.
    """
    given = _validated(overrides, "the sections given as arguments")
    base = _merged(preset(given.get("preset", NO_PRESET)), below)
    return _layered(_merged(base, defaults or {}), given)


def _layered(below: Mapping[str, Any], above: Mapping[str, Any]) -> Resolved:
    names = {rule["name"] for rule in below.get("rules", ())}
    overridden = {rule["name"]: frozenset(rule) for rule in above.get("rules", ()) if rule["name"] in names}
    return Resolved(_merged(below, above), overridden)


_EXPECTED = f"a policy: the name of a preset ({', '.join(PRESETS)}), a file, a dict or a Policy"


def _received_and_remedy(source: object) -> tuple[str, str]:
    """Return what was received, and the remedy, for an argument that is not a policy."""
    if source is None or isinstance(source, (bool, int, float)):
        return shown(source), f"Write {DEFAULT_PRESET!r} for the default, 'observe' to change nothing."
    if isinstance(source, type):
        return f"the class {source.__name__}", "Write Policy.from_any('recover') for one."
    return f"an object of class {type(source).__name__}", f"Write {DEFAULT_PRESET!r} for the default."


def _file(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the document in a file, or raise with the preset that was probably meant."""
    path = os.fspath(source)
    if not isinstance(path, str):
        raise PolicyError(expected("the path of a policy file as text", shown(path), "Decode it first."))
    if os.path.isdir(path):
        remedy = f"Write NanGuard(directory={shown(path)}) for a folder to write into, or name a file."
        raise PolicyError(expected("a preset or a policy file", f"{shown(path)}, a directory", remedy))
    looks_like_a_file = os.path.splitext(path)[1].lower() in SUFFIXES or os.sep in path or not isinstance(source, str)
    if looks_like_a_file:
        return read(source)
    meant = nearest(path, PRESETS)
    remedy = f"Did you mean {meant!r}?" if meant else "A file has to end in " + ", ".join(SUFFIXES) + "."
    raise PolicyError(expected("a preset (" + ", ".join(PRESETS) + ") or a policy file", shown(path), remedy))


def _validated(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    from keras_nanguard._policy.schema import problems_in

    checked_depth(document, name)
    raise_problems(problems_in(document), name)
    return document


def _merged(below: Mapping[str, Any], above: Mapping[str, Any], adjust: bool = True) -> dict[str, Any]:
    """Merge one document over another: rules by name, sections field by field, everything else as a whole.

    Args:
        adjust: whether settings of `below` that contradict one of `above` are adjusted to it.
    """
    merged = {**below, **above}
    if "snapshot" in above:
        settings = below.get("snapshot", {}), above["snapshot"]
        merged["snapshot"] = Snapshot.over(*settings) if adjust else {**settings[0], **settings[1]}
    if "checks" in above:
        merged["checks"] = _sites_over(below.get("checks", {}), above["checks"], adjust)
    if "layers" in below and "layers" in above:
        globs = {**below["layers"], **above["layers"]}
        merged["layers"] = {
            glob: _sites_over(below["layers"].get(glob, {}), above["layers"].get(glob, {}), adjust) for glob in globs
        }
    if "rules" in below and "rules" in above:
        merged["rules"] = _rules_over(below["rules"], above["rules"])
    return merged


def _sites_over(below: Mapping[str, Any], above: Mapping[str, Any], adjust: bool) -> dict[str, Any]:
    """Merge the checks of sites; `true` and `false` stand for `{ enabled = ... }`."""
    under, over = (
        {site: {"enabled": given} if isinstance(given, bool) else given for site, given in sites.items()}
        for sites in (below, above)
    )
    merged = {site: {**under.get(site, {}), **over.get(site, {})} for site in {**under, **over}}
    if adjust and "loss_scale" in over:
        merged["loss_scale"] = reconciled(LossScaleCheck, over["loss_scale"], under.get("loss_scale"))
    return merged


def _rules_over(below: list[Mapping[str, Any]], above: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Merge rules over the rules of the same name, field by field; new rules come first, in their order."""
    given = {rule["name"]: rule for rule in above}
    names = {rule["name"] for rule in below}
    new = [rule for rule in above if rule["name"] not in names]
    return [*new, *({**rule, **given.get(rule["name"], {})} for rule in below)]


def toml(document: Mapping[str, Any]) -> str:
    """Return a document as TOML, formatted as one would write it by hand."""
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
