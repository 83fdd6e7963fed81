"""Rules as policy files write them. The tables have been validated before (see `_schema`); level 0, no backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keras_nanguard import actions
from keras_nanguard._errors import PolicyError
from keras_nanguard._policy import _conditions
from keras_nanguard._policy._conditions import Immediately
from keras_nanguard._policy._fields import build, changed
from keras_nanguard._policy._rules import Limit, Magnitude, Rule, Rung, Unless

__all__ = ["rule_from_file", "rule_to_file"]

LISTS = ("on", "kind", "layer", "cause")
"""The fields that hold one word or a list of them."""


def rule_from_file(table: Mapping[str, Any]) -> Rule:
    """Return the rule that a policy file writes under `[[rules]]`.

    Raises:
        PolicyError: if a value is not what it has to be.
    """
    given = dict(table)
    ladder = tuple(_rungs(given))
    parts: dict[str, Any] = {word: _listed(given.pop(word)) for word in LISTS if word in given}
    if "after" in given:
        parts["after"] = _conditions.from_file(given.pop("after"))
    if "magnitude" in given:
        parts["magnitude"] = build(Magnitude, given.pop("magnitude"), "magnitude")
    if "unless" in given:
        parts["unless"] = Unless(**{word: _listed(words) for word, words in given.pop("unless").items()})
    return Rule(ladder=ladder, **parts, **given)


def rule_to_file(rule: Rule) -> dict[str, Any]:
    """Return a rule as `rule_from_file` reads it, in its shortest form."""
    table: dict[str, Any] = {"name": rule.name}
    table |= {word: _shortest(words) for word in LISTS if (words := getattr(rule, word))}
    table |= {word: value for word, value in changed(rule).items() if word != "name"}
    unless = {word: _shortest(words) for word in ("on", "cause") if (words := getattr(rule.unless, word))}
    parts = {"magnitude": changed(rule.magnitude), "unless": unless}
    table |= {word: part for word, part in parts.items() if part}
    if rule.after != Immediately():
        table["after"] = rule.after.to_file()
    return table | _ladder_to_file(rule.ladder)


def _rungs(given: dict[str, Any]) -> list[Rung]:
    """Take `do`, `limit` and `otherwise` out of a table and return them as the rungs of a ladder."""
    do, limit, rest = given.pop("do", ()), given.pop("limit", None), given.pop("otherwise", None)
    chosen = tuple(actions.from_file(item) for item in ([do] if isinstance(do, (str, Mapping)) else do))
    if not chosen:
        raise PolicyError("no action", ("do: expected at least one action, received nothing",))
    first = Rung(chosen, build(Limit, limit, "limit") if limit is not None else None)
    if rest is None:
        return [first]
    return [first, *_rungs(dict(rest) if isinstance(rest, Mapping) and "do" in rest else {"do": rest})]


def _ladder_to_file(ladder: tuple[Rung, ...]) -> dict[str, Any]:
    first, *rest = ladder
    table: dict[str, Any] = {"do": _shortest([actions.to_file(action) for action in first.do])}
    if first.limit is not None:
        table["limit"] = changed(first.limit)
    if rest:
        below = _ladder_to_file(tuple(rest))
        table["otherwise"] = below["do"] if set(below) == {"do"} else below
    return table


def _listed(words: Any) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else tuple(words)


def _shortest(words: Any) -> Any:
    return words[0] if len(words) == 1 else list(words)
