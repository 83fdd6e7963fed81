"""Text from files and names of models, safe to print. Imports no backend."""

from __future__ import annotations

__all__ = ["plain_text"]


def plain_text(text: object, max_length: int = 300) -> str:
    """Return text from a file, safe to print: no control characters, no lone surrogates, of limited length."""
    shown = str(text)
    if len(shown) > 2 * max_length:
        shown = shown[: 2 * max_length]
    if not shown.isprintable():
        shown = "".join(character if character.isprintable() else _escaped(character) for character in shown)
    return shown if len(shown) <= max_length else f"{shown[: max_length - 3]}..."


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
