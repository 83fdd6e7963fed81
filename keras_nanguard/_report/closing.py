"""The table at the end of a run in which something happened: what, how often, what was done, what to do."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keras_nanguard._core.incident import Incident
from keras_nanguard._core.terminal import is_terminal
from keras_nanguard._report import console

__all__ = ["table", "table_text"]

MAX_ROWS = 12
"""Kinds of trouble that have a row."""

_WIDTH = 110
"""Columns where the output is no terminal."""


def table(incidents: Sequence[Incident]) -> Table:
    """Return the table of the kinds of trouble, the most frequent first."""
    found = Table(box=box.ROUNDED, show_lines=True)
    found.add_column("times", justify="right", no_wrap=True)
    found.add_column("trouble", overflow="fold")
    found.add_column("first at")
    found.add_column("done", overflow="fold")
    found.add_column("what to do", overflow="fold")
    groups = console.kinds(incidents)
    for group in groups[:MAX_ROWS]:
        first = group[0]
        advice = first.diagnosis.advice[:1] if first.diagnosis is not None else ()
        cells = (str(len(group)), console.why(first), first.moment, _done(group), *(advice or ("",)))
        found.add_row(*(Text(console.printable(cell)) for cell in cells))
    if len(groups) > MAX_ROWS:
        found.caption = Text(f"and {len(groups) - MAX_ROWS} more kinds of trouble")
    return found


def _done(group: Sequence[Incident]) -> str:
    """Return what was done about incidents, and how often where that differs."""
    counts = Counter(o.action for incident in group for o in incident.outcomes if o.status == "done" and o.action != "warn")
    return ", ".join(action if n == len(group) else f"{n} x {action}" for action, n in counts.most_common()) or "nothing"


def table_text(incidents: Sequence[Incident], head: str) -> str:
    """Return a line and the table below it for the standard output: in colour on a terminal, ASCII where that takes nothing else."""
    terminal = is_terminal()
    width = shutil.get_terminal_size((_WIDTH, 24)).columns if terminal else _WIDTH
    page = io.StringIO()
    screen = Console(file=page, width=width, force_terminal=terminal, no_color="NO_COLOR" in os.environ, highlight=False)
    found = table(incidents)
    if "utf" not in (getattr(sys.stdout, "encoding", None) or "utf-8").lower():
        found.box = box.ASCII
    screen.print(found)
    return f"{console.printable(head)}\n{page.getvalue()}".rstrip("\n")
