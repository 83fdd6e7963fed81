"""The fields of policy records: one description per field serves validation, schema, docs and messages.

A record is a frozen dataclass whose fields carry `metadata=spec(...)`. The pydantic models of policy files are generated
from these descriptions, and they alone validate: whole documents, from which `construct` then makes the records, and
records written in code. Imports no backend, and pydantic only where something has to be validated.
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
    "construct",
    "contradictions",
    "expected_value",
    "field_path",
    "non_defaults",
    "optional",
    "plain_type",
    "printable",
    "problem",
    "raise_problems",
    "reconciled",
    "shown",
    "spec",
    "with_floats",
]

MAX_INTEGER = 10**9
"""Largest integer that any field accepts: a policy counts steps, and no run has more."""

MOMENTS = ("any", "refused", "committed", "before_training", "from_start")
"""The moments that a rule can be restricted to."""

R = TypeVar("R")

NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$"
"""Pattern of the names of rules and registered functions."""


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
    max_length: int = 200,
) -> dict[str, Any]:
    """Return the metadata of a dataclass field: its meaning and its valid values."""
    bounds = {key: value for key, value in {"gt": gt, "ge": ge, "lt": lt, "le": le}.items() if value is not None}
    given = {"meaning": meaning, "unit": unit, "bounds": bounds, "choices": tuple(choices)}
    return {**given, "pattern": pattern, "max_length": max_length}


def construct(kind: type[R], given: Mapping[str, Any]) -> R:
    """Return a record of validated values, without validating them again.

    A field that was not given has its default, adjusted where it contradicts a given one (see `reconciled`).
    """
    record = object.__new__(kind)
    table = reconciled(kind, given)
    for entry in fields(kind):  # type: ignore[arg-type]
        default = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        object.__setattr__(record, entry.name, table.get(entry.name, default))
    return with_floats(record)


def with_floats(record: R) -> R:
    """Convert the integers in float fields of a record to floats, in place."""
    for entry in fields(record):  # type: ignore[arg-type]
        value = getattr(record, entry.name)
        if isinstance(value, int) and plain_type(entry) == "float":
            object.__setattr__(record, entry.name, float(value))
    return record


def contradictions(record: Any) -> list[str]:
    """Return a problem for each pair of fields of a record that contradict one another."""
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
    """Whether a number exceeds its bound; a bound of 0 or None is no bound."""
    numbers = isinstance(least, (int, float)) and isinstance(most, (int, float))
    return numbers and 0 < most < least


def reconciled(kind: type[Any], given: Mapping[str, Any], below: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fields `given` of a record merged over those of `below` and over its defaults.

    A field that was not given never contradicts one that was: of a pair in `ordered` it is adjusted, as far as needed.
    Two given fields are not changed; `contradictions` reports them.
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
    """Return the type of a field without None: `int`, `float`, `str` or `bool`."""
    return str(entry.type).split(" | ")[0]


def optional(entry: Field[Any]) -> bool:
    """Return whether a field may be None."""
    return "None" in str(entry.type)


def non_defaults(record: Any) -> dict[str, Any]:
    """Return the fields with a `spec` that differ from their defaults, as plain values."""
    return {
        entry.name: value
        for entry in fields(record)
        if "meaning" in entry.metadata and (value := getattr(record, entry.name)) != entry.default
    }


def problem(path: str, what: str, received: object, suggestion: str = "") -> str:
    """Return one problem: `path: expected what, received received, did you mean suggestion?`."""
    tail = f", did you mean {suggestion!r}?" if suggestion else ""
    return f"{path}: expected {what}, received {shown(received)}{tail}"


def raise_problems(problems: Iterable[str], source: str = "the policy") -> None:
    """Raise one `PolicyError` with all `problems`; do nothing where there are none."""
    found = tuple(problems)
    if len(found) == 1:
        raise PolicyError(f"{source[:1].upper()}{source[1:]}: {found[0]}", found)
    if found:
        raise PolicyError(f"{len(found)} problems in {source}:\n" + "\n".join(f"  {line}" for line in found), found)


def field_path(*parts: str | int) -> str:
    """Return the path of a value in a policy file: `rules[0].do[1].lower_lr.factor`."""
    path = ""
    for part in parts:
        plain = isinstance(part, int) or re.fullmatch(r"[A-Za-z0-9_-]+", part)
        segment = f"[{part}]" if isinstance(part, int) else (part if plain else f'"{shown(part)[1:-1]}"')
        path += segment if not path or isinstance(part, int) else f".{segment}"
    return path


def shown(value: object) -> str:
    """Return a value as one short line that is safe to print, also where it comes from an untrusted file."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return f"a whole number of about {value.bit_length() * 3 // 10} digits"
    if isinstance(value, (dict, list)) and len(value) > 8:
        return f"a {'table' if isinstance(value, dict) else 'list'} of {len(value)} entries"
    try:
        text = ascii(value) if not isinstance(value, str) else repr(value).encode("ascii", "backslashreplace").decode()
    except ValueError:  # Python prints no number of more than 4300 digits
        return f"a {'table' if isinstance(value, dict) else 'list'} with a whole number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:30]}...{text[-30:]} ({len(text)} characters)"  # the end of a path is informative


def printable(value: str, max_length: int = 200) -> bool:
    """Return whether a string is fit for reports and files: no control characters, no lone surrogates, not too long."""
    return len(value) <= max_length and (value.isprintable() or not value)


def expected_value(entry: Field[Any]) -> str:
    """Return the valid values of a field in words: `a finite number > 0 and < 1`."""
    meta, kind = entry.metadata, plain_type(entry)
    if meta["choices"]:
        return "one of " + ", ".join(meta["choices"])
    if kind == "str":
        letters = "letters, digits, '_', '-' and '.'"
        return f"a name of at most 64 {letters}" if meta["pattern"] else f"at most {meta['max_length']} printable characters"
    if kind == "bool":
        return "true or false"
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    limits = " and ".join(f"{signs[key]} {value:g}" for key, value in meta["bounds"].items())
    name = "a whole number" if kind == "int" else "a finite number"
    return f"{name} {limits}".strip()
