"""Rules in policy files. The tables have already been validated (see `_policy/schema.py`). Imports no backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from keras_nanguard._policy import actions, conditions
from keras_nanguard._policy.conditions import Immediately
from keras_nanguard._policy.fields import construct, non_defaults
from keras_nanguard._policy.rules import Limit, Magnitude, Rule, Rung, Unless

__all__ = ["rule_from_file", "rule_to_file"]

LISTS = ("on", "kind", "layer", "cause")
"""The fields that hold one word or a list of them."""


def rule_from_file(table: Mapping[str, Any]) -> Rule:
    """Return the rule of a table under `[[rules]]`."""
    parts: dict[str, Any] = {word: _listed(words) if word in LISTS else words for word, words in table.items()}
    parts["ladder"] = tuple(_rungs(table))
    if "after" in table:
        parts["after"] = conditions.from_file(table["after"])
    if "magnitude" in table:
        parts["magnitude"] = construct(Magnitude, table["magnitude"])
    if "unless" in table:
        parts["unless"] = Unless(**{word: _listed(words) for word, words in table["unless"].items()})
    return construct(Rule, {word: part for word, part in parts.items() if word not in ("do", "limit", "otherwise")})


def rule_to_file(rule: Rule) -> dict[str, Any]:
    """Return a rule as `rule_from_file` reads it, in its shortest form."""
    table: dict[str, Any] = {"name": rule.name}
    table |= {word: _shortest(words) for word in LISTS if (words := getattr(rule, word))}
    table |= {word: value for word, value in non_defaults(rule).items() if word != "name"}
    unless = {word: _shortest(words) for word in ("on", "cause") if (words := getattr(rule.unless, word))}
    parts = {"magnitude": non_defaults(rule.magnitude), "unless": unless}
    table |= {word: part for word, part in parts.items() if part}
    if rule.after != Immediately():
        table["after"] = rule.after.to_file()
    return table | _ladder_to_file(rule.ladder)


def _rungs(table: Mapping[str, Any]) -> Iterator[Rung]:
    """Yield the rungs of a ladder from the `do`, `limit` and `otherwise` of a table."""
    do, limit, otherwise = table["do"], table.get("limit"), table.get("otherwise")
    chosen = tuple(actions.validated(item) for item in ([do] if isinstance(do, (str, Mapping)) else do))
    yield Rung(chosen, None if limit is None else construct(Limit, limit))
    if otherwise is not None:
        yield from _rungs(otherwise if isinstance(otherwise, Mapping) and "do" in otherwise else {"do": otherwise})


def _ladder_to_file(ladder: tuple[Rung, ...]) -> dict[str, Any]:
    first, *rest = ladder
    table: dict[str, Any] = {"do": _shortest([actions.to_file(action) for action in first.do])}
    if first.limit is not None:
        table["limit"] = non_defaults(first.limit)
    if rest:
        below = _ladder_to_file(tuple(rest))
        table["otherwise"] = below["do"] if set(below) == {"do"} else below
    return table


def _listed(words: Any) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else tuple(words)


def _shortest(words: Any) -> Any:
    return words[0] if len(words) == 1 else list(words)
