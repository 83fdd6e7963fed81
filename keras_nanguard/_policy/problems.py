"""The problems of a policy as sentences, each with its path and the nearest known word.

Imports no backend.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from keras_nanguard._core.errors import PolicyError

MAX_LENGTH = 80
"""Length above which a value is shortened in a message."""


def problem(path: str, what: str, received: object, meant: str = "") -> str:
    """Return one problem: `path: expected what, received value, did you mean 'meant'?`."""
    tail = f", did you mean {meant!r}?" if meant else ""
    return f"{path}: expected {what}, received {safe_repr(received)}{tail}"


def raise_problems(problems: Iterable[str], source: str = "the policy") -> None:
    """Raise one `PolicyError` with all `problems`; do nothing if there are none."""
    found = tuple(problems)
    if len(found) == 1:
        raise PolicyError(f"{source[:1].upper()}{source[1:]}: {found[0]}", found)
    if found:
        lines = "\n".join(f"  {line}" for line in found)
        raise PolicyError(f"{len(found)} problems in {source}:\n{lines}", found)


def problems_of(error: ValidationError, document: Any, model: Any) -> list[str]:
    """Return each error of pydantic as one problem.

    Args:
        error: the error of pydantic.
        document: the validated document.
        model: the model that validated it.
    """
    return [_sentence(one, document, model) for one in error.errors(include_url=False)]


def _sentence(error: Mapping[str, Any], document: Any, model: Any) -> str:
    place, context = error["loc"], error.get("ctx", {})
    path = _path(place, document)
    if error["type"] == "missing":
        return f"{path}: expected a value, received nothing"
    if error["type"] == "too_short":
        return f"{path}: expected at least one, received none"
    if error["type"] == "extra_forbidden":
        known = _fields_at(model, place[:-1])
        return f"{path}: expected one of {', '.join(known)}{_meant(place[-1], known)}"
    if error["type"] == "literal_error":
        known = re.findall(r"'([^']*)'", context["expected"])
        words = f"one of {', '.join(known)}" if len(known) > 1 else context["expected"]
        return problem(path, words, error["input"], nearest(error["input"], known))
    if error["type"] in _WORDS:
        return problem(path, _WORDS[error["type"]].format(**context), error["input"])
    what = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return problem(path, what[:1].lower() + what[1:], error["input"])


_WORDS = {
    "greater_than": "a number > {gt:g}",
    "greater_than_equal": "a number >= {ge:g}",
    "less_than": "a number < {lt:g}",
    "less_than_equal": "a number <= {le:g}",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "string_pattern_mismatch": "a name of at most 64 letters, digits, spaces, '_', '-' and '.'",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "tuple_type": "a list",
}
"""The expected value for each type of error of pydantic; other types keep its sentence."""


def _meant(word: object, known: Sequence[str]) -> str:
    meant = nearest(word, known)
    return f", received {safe_repr(word)}" + (f", did you mean {meant!r}?" if meant else "")


def _path(place: Sequence[str | int], document: Any) -> str:
    """Return the path as the file has it: `rules[0].do[1].lower_lr.factor`.

    A single value that stands for a list has no number.
    """
    path, inside = "", document
    for part in place:
        if isinstance(part, int):
            if isinstance(inside, (list, tuple)):
                path += f"[{part}]"
                inside = inside[part] if part < len(inside) else None
            continue
        plain = re.fullmatch(r"[A-Za-z0-9_-]+", part)
        segment = part if plain else f'"{safe_repr(part)[1:-1]}"'
        if isinstance(inside, str):  # the name of an action, in the place of its table
            segment = "" if inside == part else segment
        path += f".{segment}" if path and segment else segment
        inside = inside.get(part) if isinstance(inside, Mapping) else None
    return path or "the policy"


def _fields_at(model: Any, place: Sequence[str | int]) -> list[str]:
    """Return the fields of the model at a place of a document."""
    for part in place:
        if isinstance(part, str):
            model = next(_models(model.model_fields[part].annotation), model)
    return list(model.model_fields)


def _models(annotation: Any) -> Iterator[Any]:
    """Yield the models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def nearest(word: object, known: Iterable[str]) -> str:
    """Return the known word that is nearest to `word` in spelling, `""` if none is near."""
    words = {name.lower().replace("-", "_"): name for name in known}
    if not isinstance(word, str) or word in words.values():
        return ""
    key = word.lower()[:64].replace("-", "_").replace(" ", "_")
    found = difflib.get_close_matches(key, words, n=1, cutoff=0.7)
    return words[found[0]] if found else ""


def safe_repr(value: object) -> str:
    """Return a value as one short line of ASCII, also if it comes from an untrusted file."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return f"a whole number of about {value.bit_length() * 3 // 10} digits"
    if isinstance(value, (dict, list, tuple)) and len(value) > 8:
        return f"a {'table' if isinstance(value, dict) else 'list'} of {len(value)} entries"
    try:
        text = ascii(value)
    except ValueError:  # Python prints no number of more than 4300 digits
        return f"a {type(value).__name__} with a whole number that has thousands of digits"
    if len(text) <= MAX_LENGTH:
        return text
    return f"{text[:30]}...{text[-30:]} ({len(text)} characters)"
