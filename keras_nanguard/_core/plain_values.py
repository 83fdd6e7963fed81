"""Values as plain JSON and plain text, and those of untrusted files. The depth of JSON is limited,
so that recursive code does not exhaust the stack; text is safe to print.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64
"""Maximum depth of lists and objects. What this library writes has about ten levels; a batch of a
bundle may have 64."""


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: mappings with text as keys, lists for tuples, and the
    strings `"nan"`, `"inf"` and `"-inf"` for non-finite numbers."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def times(count: int, word: str) -> str:
    """Return a count with its word: `1 step`, `2 steps`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def loads(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: if it is not JSON, or too deep.
    """
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    check_depth(found)
    return found


def check_depth(value: Any, most: int = MAX_DEPTH) -> None:
    """Check a value as JSON makes them; a circular one is too deep.

    Raises:
        ValueError: if it has more than `most` levels.
    """
    level = [value]
    for _ in range(most + 2):
        level = [outer for outer in level if isinstance(outer, (dict, list, tuple))]
        if not level:
            return
        members = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [inner for inside in members for inner in inside]
    raise ValueError(f"it is nested deeper than {most} levels")


def plain_text(text: object, max_length: int = 300) -> str:
    """Return text from a file, safe to print: no control characters, no lone surrogates, of limited
    length."""
    shown = str(text)
    if len(shown) > 2 * max_length:
        shown = shown[: 2 * max_length]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else _escaped(c) for c in shown)
    return shown if len(shown) <= max_length else f"{shown[: max_length - 3]}..."


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def one_line(text: object, max_length: int = 1 << 20) -> str:
    """Return a text in one line, safe to print and of limited length."""
    return plain_text(" ".join(str(text).split()), max_length)


def first_line(error: BaseException) -> str:
    """Return the first nonempty line of an error, safe to print, or the name of its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return plain_text((lines or [type(error).__name__])[0], 200).rstrip(".")


def printable(text: str) -> str:
    """Return a text without control characters, which could control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
