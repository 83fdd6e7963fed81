"""How records are shown as tables on a terminal. Rich is imported only when it is needed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

MAX_ROWS = 60
"""Rows that are shown; further ones are counted."""


_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
_STYLES |= {"done": "green", "skipped": "yellow"}
"""Colours of words in tables on a terminal."""


class TableReport:
    """A report with one verdict, `ok`, which a terminal shows as a table. Names in it are plain
    text, never markup."""

    __slots__ = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; notes are no faults."""
        raise NotImplementedError

    def _table(self) -> tuple[str, Sequence[str], Sequence[str], Sequence[Sequence[str]]]:
        """Return a headline, further lines, and head and rows of the table."""
        raise NotImplementedError

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        headline, lines, head, rows = self._table()
        table = Table(*head, box=None, pad_edge=False, header_style="bold")
        for row in rows[:MAX_ROWS]:
            table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        more = [f"and {len(rows) - MAX_ROWS} more; --json lists all of them"]
        below = (more if len(rows) > MAX_ROWS else []) + list(lines)
        texts = (*map(Text, below), Text(headline, style="green" if self.ok else "bold red"))
        return Group(*([table] if rows else []), *texts)


def is_terminal() -> bool:
    """Whether the standard output is a terminal; false if unknown (`None`, closed)."""
    try:
        return bool(sys.stdout.isatty())
    except Exception:  # noqa: BLE001  any object may be in its place
        return False
