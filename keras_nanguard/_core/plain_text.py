"""Text from files and names of models, safe to print and safe in Markdown. Imports no backend."""

from __future__ import annotations

import re


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


def one_line(text: object) -> str:
    """Return a text in one line, without control characters."""
    return printable(" ".join(str(text).split()))


def printable(text: str) -> str:
    """Return a text without control characters, which could control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def markdown_text(text: object) -> str:
    """Return a text as one line of Markdown that shows it as it is: no HTML, no link, no emphasis.

    Viewers such as GitHub make links of bare addresses, too. A backslash prevents those that begin
    with `http://` or `www.`; an e-mail address remains a link after a backslash, so its `@` is
    shown as code.
    """
    line = re.sub(r"[\\`*<>\[\]|~&$]|(?<!\w)[_#]|_(?!\w)", r"\\\g<0>", one_line(text))
    line = re.sub(r"(?i)(://|(?<=www)\.)", r"\\\g<0>", line)
    return re.sub("@+", r"`\g<0>`", line)
