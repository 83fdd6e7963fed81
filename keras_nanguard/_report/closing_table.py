"""The table at the end of a run with incidents: counts, kinds, advice."""

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

from keras_nanguard._core.display import is_terminal
from keras_nanguard._core.incident import Incident
from keras_nanguard._core.plain_values import times
from keras_nanguard._report import console

MAX_ROWS = 12
"""Maximum number of rows."""

WIDTH = 80
"""Columns of the table; fewer in a narrower terminal."""

OVERHEAD = 17
"""Columns that borders and counts take."""


def table(incidents: Sequence[Incident], width: int = WIDTH) -> Table:
    """Return the table of the kinds of incidents, the most frequent first."""
    cell = max((width - OVERHEAD) // 2, 12)
    found = Table(box=box.ROUNDED, show_lines=True)
    found.add_column("times", justify="right", no_wrap=True)
    found.add_column("incident", max_width=cell, overflow="fold")
    found.add_column("what to do", max_width=width - OVERHEAD - cell, overflow="fold")
    groups = console.kinds(incidents)
    for kind in groups[:MAX_ROWS]:
        first = kind.first
        advice = first.diagnosis.advice[:1] if first.diagnosis is not None else ()
        lines = (str(kind), f"first: {first.moment}", f"action: {_done(kind)}")
        words = "\n".join(lines), *(advice or ("",))
        cells = (_fitted(console.printable(text), cell) for text in words)
        found.add_row(str(len(kind.incidents)), *map(Text, cells))
    if len(groups) > MAX_ROWS:
        found.caption = Text(f"and {times(len(groups) - MAX_ROWS, 'more kind')} of incidents")
    return found


def _fitted(text: str, width: int) -> str:
    """Return a text with paths short enough for a column, so that none is broken."""
    lines = [line.split(" ") for line in text.split("\n")]
    fitted = [[console.shortened(w, width) if "/" in w else w for w in line] for line in lines]
    return "\n".join(map(" ".join, fitted))


def _done(kind: console.IncidentKind) -> str:
    """Return the actions for incidents, with counts if they differ."""
    counts = Counter[str]()
    for outcome, count in kind.outcomes.items():
        counts[outcome.action] += count if outcome.status == "done" else 0
    named = (
        action if count == len(kind.incidents) else f"{count} x {action}"
        for action, count in counts.most_common()
        if count
    )
    return ", ".join(named) or "none"


def table_text(incidents: Sequence[Incident], head: str) -> str:
    """Return a line followed by the table, for the standard output.

    It is coloured on a terminal, and in ASCII if the encoding requires it.
    """
    terminal = is_terminal()
    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH) if terminal else WIDTH
    page = io.StringIO()
    screen = Console(
        file=page,
        width=width,
        force_terminal=terminal,
        no_color="NO_COLOR" in os.environ,
        highlight=False,
    )
    found = table(incidents, width)
    if "utf" not in (getattr(sys.stdout, "encoding", None) or "utf-8").lower():
        found.box = box.ASCII
    screen.print(found)
    return f"{console.printable(head)}\n{page.getvalue()}".rstrip("\n")
