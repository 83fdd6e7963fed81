"""What a field of a policy may hold: one description beside each field serves validation, schema, docs and messages.

A record is a frozen dataclass whose fields carry `metadata=spec(...)`. `check` validates one record by itself; the
pydantic models of policy files are made from the same descriptions. Level 0: imports no backend and no pydantic.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

from keras_nanguard._errors import PolicyError

__all__ = [
    "MOST",
    "NAME",
    "at",
    "build",
    "changed",
    "check",
    "fault",
    "nearest",
    "optional",
    "plain_type",
    "printable",
    "refuse",
    "shown",
    "spec",
    "under",
    "wording",
]

MOST = 10**9
"""Largest whole number that any field takes: a policy counts steps, and no run has more."""

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


def check(record: Any) -> None:
    """Validate every described field of a frozen record; whole numbers in float fields become floats.

    Raises:
        PolicyError: with every fault of the record. A record may add faults of its own in a method `conflicts()`.
    """
    faults = []
    for entry in fields(record):
        if "meaning" not in entry.metadata:
            continue
        value = getattr(record, entry.name)
        wrong = _wrong(entry, value)
        if wrong:
            known = entry.metadata["choices"]
            faults.append(fault(entry.name, wrong, value, nearest(value, known)))
        elif plain_type(entry) == "float" and value is not None:
            object.__setattr__(record, entry.name, float(value))
    if not faults:
        faults = list(getattr(record, "conflicts", tuple)())
    refuse(faults)


def build(kind: type[R], given: object, name: str) -> R:
    """Return a record of `kind` from a plain table; `name` stands before the path of each fault.

    Raises:
        PolicyError: with every unknown word, missing field and value out of range.
    """
    if not isinstance(given, Mapping):
        raise PolicyError(f"{name} is no table", (fault(name, "a table", given),))
    entries = {entry.name: entry for entry in fields(kind)}  # type: ignore[arg-type]
    words = "one of " + ", ".join(entries) if entries else "no parameters"
    faults = [fault(at(name, str(word)), words, word, nearest(word, entries)) for word in given if word not in entries]
    for entry in entries.values():
        if entry.name not in given and entry.default is MISSING and entry.default_factory is MISSING:
            faults.append(f"{at(name, entry.name)}: expected {wording(entry)}, received nothing")
    refuse(faults)
    try:
        return kind(**given)
    except PolicyError as error:
        refuse(under(name, error))
        raise


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


def fault(path: str, what: str, received: object, suggestion: str = "") -> str:
    """Return one fault: `path: expected what, received received, did you mean suggestion?`."""
    tail = f", did you mean {suggestion!r}?" if suggestion else ""
    return f"{path}: expected {what}, received {shown(received)}{tail}"


def refuse(faults: Iterable[str], source: str = "The policy") -> None:
    """Raise one `PolicyError` that tells all `faults`; do nothing where there are none."""
    told = tuple(faults)
    if told:
        count = "1 fault" if len(told) == 1 else f"{len(told)} faults"
        raise PolicyError(f"{source} has {count}:\n" + "\n".join(f"  {line}" for line in told), told)


def under(path: str, error: PolicyError) -> Iterator[str]:
    """Yield the faults of `error`, each with `path` put before its own."""
    for line in error.faults or (str(error),):
        yield f"{path}{line}" if line.startswith(("[", ":")) else f"{path}.{line}"


def at(*parts: str | int) -> str:
    """Return the path of a value in a policy file: `rules[0].do[1].lower_lr.factor`."""
    path = ""
    for part in parts:
        plain = isinstance(part, int) or re.fullmatch(r"[A-Za-z0-9_-]+", part)
        word = f"[{part}]" if isinstance(part, int) else (part if plain else f'"{shown(part)[1:-1]}"')
        path += word if not path or isinstance(part, int) else f".{word}"
    return path


def nearest(word: object, known: Iterable[str]) -> str:
    """Return the known word nearest to `word`, or `""` where none is near."""
    words = list(known)
    if not isinstance(word, str) or word in words:
        return ""
    lowered = word.lower()[:64].replace("-", "_").replace(" ", "_")
    found = difflib.get_close_matches(lowered, words, n=1, cutoff=0.7)
    return found[0] if found else ""


def shown(value: object) -> str:
    """Return a value as one short line that is safe to print, whatever a hostile file put there."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return f"a whole number of about {value.bit_length() * 3 // 10} digits"
    if isinstance(value, (dict, list)) and len(value) > 8:
        return f"a {'table' if isinstance(value, dict) else 'list'} of {len(value)} entries"
    text = ascii(value) if not isinstance(value, str) else repr(value).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _wrong(entry: Field[Any], value: Any) -> str:
    """Return what was expected of the value, `""` where it is right."""
    if value is None and optional(entry):
        return ""
    return "" if _fits(entry, value) else wording(entry)


def _fits(entry: Field[Any], value: Any) -> bool:
    kind, meta = plain_type(entry), entry.metadata
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "str":
        return isinstance(value, str) and _text_fits(meta, value)
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind == "float" else int):
        return False
    try:
        finite = math.isfinite(value)
    except OverflowError:
        return False
    if not finite or (kind == "int" and abs(value) > MOST):
        return False
    bounds = meta["bounds"]
    return bool(
        value > bounds.get("gt", -math.inf)
        and value >= bounds.get("ge", -math.inf)
        and value < bounds.get("lt", math.inf)
        and value <= bounds.get("le", math.inf)
    )


def _text_fits(meta: Mapping[str, Any], value: str) -> bool:
    if meta["choices"]:
        return value in meta["choices"]
    if meta["pattern"]:
        return re.fullmatch(meta["pattern"], value) is not None
    return printable(value, meta["longest"])


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
