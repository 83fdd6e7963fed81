"""Reads and writes the tables of a page, each between two marks and with its commit after it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

__all__ = ["commit", "read", "rows", "write"]

COMMIT = re.compile(r"^\n\nCommit (\S+)\.")


def marks(name: str) -> tuple[str, str]:
    """Return the two lines around a table."""
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def read(page: Path, name: str) -> str:
    """Return the text between the marks of a page."""
    return _parts(page, name)[1]


def commit(page: Path, name: str) -> str:
    """Return the measured commit of a table, "" if the page does not name it."""
    found = COMMIT.match(_parts(page, name)[2])
    return found[1] if found else ""


def write(page: Path, name: str, text: str, measured: bool = True) -> None:
    """Put a text between the marks of a page, and the commit of this working tree after them.

    Args:
        page: the page.
        name: the name in the marks.
        text: the table.
        measured: whether the text was measured; if not, no commit is written.

    Raises:
        SystemExit: if the page does not have the marks.
    """
    (begin, end), (before, _, after) = marks(name), _parts(page, name)
    if measured:
        after = f"\n\nCommit {_head()}." + COMMIT.sub("", after)
    page.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}", "utf-8")


def rows(text: str) -> list[list[str]]:
    """Return the cells of the table in a text, row by row, without its head; none if there is no table."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _head() -> str:
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return done.stdout.strip() or "unknown"


def _parts(page: Path, name: str) -> tuple[str, str, str]:
    begin, end = marks(name)
    before, first, rest = page.read_text("utf-8").partition(begin)
    text, second, after = rest.partition(end)
    if not first or not second:
        remedy = "Put them at the place of the table."
        raise SystemExit(f"Expected the lines {begin} and {end}. Received: a page without them, {page}. {remedy}")
    return before, text, after
