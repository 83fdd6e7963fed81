"""Where the table of a campaign stands in the docs: between two marks that name it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["read", "rows", "write"]


def marks(name: str) -> tuple[str, str]:
    """Return the two lines between which a table stands."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def read(page: Path, name: str) -> str:
    """Return what stands between the marks of a page."""
    return _parts(page, name)[1]


def write(page: Path, name: str, text: str) -> None:
    """Put a text between the marks of a page.

    Raises:
        SystemExit: where the page does not have them.
    """
    (begin, end), (before, _, after) = marks(name), _parts(page, name)
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}", "utf-8")


def rows(text: str) -> list[list[str]]:
    """Return the cells of the table in a text, row by row, without its head; none where there is no table."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _parts(page: Path, name: str) -> tuple[str, str, str]:
    begin, end = marks(name)
    before, first, rest = page.read_text("utf-8").partition(begin)
    text, second, after = rest.partition(end)
    if not first or not second:
        remedy = "Put them where the table is to stand."
        raise SystemExit(f"Expected the lines {begin} and {end}. Received: a page without them, {page}. {remedy}")
    return before, text, after
