"""What a field of a policy may hold: one description beside each field serves validation, schema, docs and messages.

A record is a frozen dataclass whose fields carry `metadata=spec(...)`. The pydantic models of policy files are made from
these descriptions, and they alone validate: a document as a whole, from which records are `made` then, and a record that
is written in code. Level 0: imports no backend, and pydantic only where something has to be validated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

from keras_nanguard._core.errors import PolicyError

__all__ = [
    "MAX_INTEGER",
    "MOMENTS",
    "NAME",
    "at",
    "changed",
    "contradictions",
    "follow",
    "made",
    "optional",
    "plain_type",
    "printable",
    "problem",
    "refuse",
    "shown",
    "spec",
    "with_floats",
    "wording",
]

MAX_INTEGER = 10**9
"""Largest whole number that any field takes: a policy counts steps, and no run has more."""

MOMENTS = ("any", "refused", "committed", "before_training", "from_start")
"""When a rule may look."""

R = TypeVar("R")

NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$"
"""What a rule or a registered function may be called."""


def spec(
    meaning: str,
    *,
    unit: str = "",
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    choices: Sequence[str] = (),
    pattern: str = "",
    longest: int = 200,
) -> dict[str, Any]:
    """Return the metadata of a dataclass field: what it means and what it may hold."""
    bounds = {key: value for key, value in {"gt": gt, "ge": ge, "lt": lt, "le": le}.items() if value is not None}
    given = {"meaning": meaning, "unit": unit, "bounds": bounds, "choices": tuple(choices)}
    return {**given, "pattern": pattern, "longest": longest}


def made(kind: type[R], given: Mapping[str, Any]) -> R:
    """Return a record of values that have been validated, without validating them again.

    What was not given is as it is by default, or follows (see `follow`).
    """
    record = object.__new__(kind)
    table = follow(kind, given)
    for entry in fields(kind):  # type: ignore[arg-type]
        usual = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        object.__setattr__(record, entry.name, table.get(entry.name, usual))
    return with_floats(record)


def with_floats(record: R) -> R:
    """Turn the whole numbers in float fields of a record into floats, in place."""
    for entry in fields(record):  # type: ignore[arg-type]
        value = getattr(record, entry.name)
        if isinstance(value, int) and plain_type(entry) == "float":
            object.__setattr__(record, entry.name, float(value))
    return record


def contradictions(record: Any) -> list[str]:
    """Return a problem for each two fields of a record that contradict one another."""
    kinds = {entry.name: plain_type(entry) for entry in fields(record)}
    found = []
    for low, high in _ordered(type(record)):
        least, most = getattr(record, low), getattr(record, high)
        if _exceeds(least, most):
            number = "a whole number" if kinds[low] == "int" else "a number"
            found.append(problem(low, f"{number} <= {high} = {most:g}", least))
    return [*found, *getattr(record, "conflicts", tuple)()]


def _ordered(kind: type[Any]) -> tuple[tuple[str, str], ...]:
    return tuple(getattr(kind, "ordered", ()))


def _exceeds(least: Any, most: Any) -> bool:
    """Whether a number is larger than the one it must not exceed; 0 and None in its place stand for no bound."""
    numbers = isinstance(least, (int, float)) and isinstance(most, (int, float))
    return numbers and 0 < most < least


def follow(kind: type[Any], given: Mapping[str, Any], below: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fields `given` of a record, over those of `below`, over its defaults.

    What was not given never contradicts what was: of a pair in `ordered` it gives way, as far as it has to. Two given
    fields are left as they are, for `contradictions` to tell.
    """
    table = {**(below or {}), **given}
    values = {entry.name: entry.default for entry in fields(kind)} | table
    for low, high in _ordered(kind):
        if not _exceeds(values[low], values[high]):
            continue
        if low not in given:
            values[low] = table[low] = values[high]
        elif high not in given:
            values[high] = table[high] = values[low]
    return table


def plain_type(entry: Field[Any]) -> str:
    """Return `int`, `float`, `str` or `bool`, whether or not the field may be None."""
    return str(entry.type).split(" | ")[0]


def optional(entry: Field[Any]) -> bool:
    """Return whether None is a value of the field."""
    return "None" in str(entry.type)


def changed(record: Any) -> dict[str, Any]:
    """Return the described fields that differ from their defaults, as plain values."""
    return {
        entry.name: value
        for entry in fields(record)
        if "meaning" in entry.metadata and (value := getattr(record, entry.name)) != entry.default
    }


def problem(path: str, what: str, received: object, suggestion: str = "") -> str:
    """Return one problem: `path: expected what, received received, did you mean suggestion?`."""
    tail = f", did you mean {suggestion!r}?" if suggestion else ""
    return f"{path}: expected {what}, received {shown(received)}{tail}"


def refuse(problems: Iterable[str], source: str = "the policy") -> None:
    """Raise one `PolicyError` that holds all `problems`; do nothing where there are none."""
    found = tuple(problems)
    if len(found) == 1:
        raise PolicyError(f"{source[:1].upper()}{source[1:]}: {found[0]}", found)
    if found:
        raise PolicyError(f"{len(found)} problems in {source}:\n" + "\n".join(f"  {line}" for line in found), found)


def at(*parts: str | int) -> str:
    """Return the path of a value in a policy file: `rules[0].do[1].lower_lr.factor`."""
    path = ""
    for part in parts:
        plain = isinstance(part, int) or re.fullmatch(r"[A-Za-z0-9_-]+", part)
        word = f"[{part}]" if isinstance(part, int) else (part if plain else f'"{shown(part)[1:-1]}"')
        path += word if not path or isinstance(part, int) else f".{word}"
    return path


def shown(value: object) -> str:
    """Return a value as one short line that is safe to print, whatever a hostile file put there."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return f"a whole number of about {value.bit_length() * 3 // 10} digits"
    if isinstance(value, (dict, list)) and len(value) > 8:
        return f"a {'table' if isinstance(value, dict) else 'list'} of {len(value)} entries"
    text = ascii(value) if not isinstance(value, str) else repr(value).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 80 else f"{text[:30]}...{text[-30:]} ({len(text)} characters)"  # of a path the end says more


def printable(value: str, longest: int = 200) -> bool:
    """Return whether a text can stand in a report and a file: no control characters, no lone surrogates, not long."""
    return len(value) <= longest and (value.isprintable() or not value)


def wording(entry: Field[Any]) -> str:
    """Return in words what a field may hold: `a number > 0 and < 1`."""
    meta, kind = entry.metadata, plain_type(entry)
    if meta["choices"]:
        return "one of " + ", ".join(meta["choices"])
    if kind == "str":
        letters = "letters, digits, '_', '-' and '.'"
        return f"a name of at most 64 {letters}" if meta["pattern"] else f"at most {meta['longest']} printable letters"
    if kind == "bool":
        return "true or false"
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    limits = " and ".join(f"{signs[key]} {value:g}" for key, value in meta["bounds"].items())
    name = "a whole number" if kind == "int" else "a finite number"
    return f"{name} {limits}".strip()
