"""A run in a terminal: the table at the end of a run with incidents (counts, kinds, advice), and a
dashboard from the files in its directory (curves, incidents, remaining limits of the policy)."""

from __future__ import annotations

import io
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from keras_nanguard._core.display import is_terminal
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.incident import Incident
from keras_nanguard._core.plain_values import times
from keras_nanguard._recording.database import MEASURED
from keras_nanguard._recording.recording import measured
from keras_nanguard._report import console, files
from keras_nanguard._report.shown import ShownRun

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


# The dashboard

_BARS, _ASCII_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
_STALE = 60.0
"""Seconds without an update after which a running run may have died."""

_MAX_KINDS, _MAX_LAST = 8, 3


def watch(
    directory: str | os.PathLike[str],
    interval: float = 1.0,
    once: bool = False,
    screen: Console | None = None,
) -> bool:
    """Show a run until it ends or Ctrl+C is pressed, and return whether there were incidents.

    Args:
        interval: seconds between two readings.
        once: show it once, as is done without a terminal.
        screen: the output; by default the standard output.

    Raises:
        GuardError: if there is no such directory, or its files cannot be read.
    """
    if not Path(directory).is_dir():
        remedy = "Pass the directory of NanGuard(directory=...)."
        received = f"{str(directory)!r}, which is not a folder"
        raise GuardError(expected("the directory of a run", received, remedy))
    screen = screen or Console(highlight=False)
    seen = _read(directory)
    if once or not screen.is_terminal:
        screen.print(_shown(seen, screen))
        return bool(seen.incidents)
    with Live(_shown(seen, screen), console=screen, auto_refresh=False) as live:
        try:
            while seen.recording.meta.get("status", "running") == "running":
                time.sleep(interval)
                problem = ""
                try:
                    seen = _read(directory)
                except GuardError as error:  # what cannot be read now may be read later
                    problem = str(error)
                live.update(_shown(seen, screen, problem), refresh=True)
        except KeyboardInterrupt:
            pass
    return bool(seen.incidents)


def _read(directory: str | os.PathLike[str]) -> ShownRun:
    """Read the recording; before the first step there may be none."""
    return ShownRun() if files.is_empty(Path(directory)) else files.read(directory)


def _shown(seen: ShownRun, screen: Console, problem: str = "") -> Group:
    found = frame(seen, screen.width, ascii_only=screen.options.ascii_only)
    lines = [_text(f"Cannot be read: {problem}", "bold red")] if problem else []
    return Group(found, *lines)


def _text(text: str, style: str = "") -> Text:
    """Return plain text without control characters, which is never markup."""
    return Text(console.printable(text), style=style)


def frame(run: ShownRun, width: int = 100, ascii_only: bool = False) -> Group:
    """Return the display at one moment. Names are plain text, never markup."""
    recording = run.recording
    room = max(width - 44, 16)
    curves = Table.grid(padding=(0, 2))
    for name in MEASURED:
        _, values, _ = measured(recording, name)
        if len(values):
            _, _, high = recording.series(name, room)
            bars = curve(high.tolist(), _ASCII_BARS if ascii_only else _BARS)
            cells = (_text(name.replace("_", " "), "bold"), _text(bars, "cyan"))
            curves.add_row(*cells, _text(f"{values[-1]:.4g}"))
    panels = (
        ("curves, lowest to highest; the last value", curves),
        ("incidents", _incidents(run.incidents)),
    )
    shown = [
        Panel(content, title=title, title_align="left")
        for title, content in panels
        if not isinstance(content, Table) or content.row_count
    ]
    return Group(_head(run), *shown)


def _head(run: ShownRun) -> Text:
    recording = run.recording
    meta, steps = recording.meta, recording.steps
    if not meta:
        return _text("Nothing is recorded yet; waiting.", "dim")
    now = time.time()
    status, quiet = str(meta.get("status", "")), now - meta.get("written", now)
    at = "before the first step"
    if len(steps["step"]):
        step, epoch = int(steps["step"][-1]) + 1, int(steps["epoch"][-1]) + 1
        at = f"step {step:,}, epoch {epoch} of {meta.get('epochs') or '?'}"
    words = f"{meta.get('model', '')}: {status}, {at}"
    words += f", {times(len(run.incidents), 'incident')}"
    if recording.samples:
        words += f", {times(len(recording.samples), 'bad row')}"
    if status == "running" and quiet > _STALE:
        words += f"; no update for {quiet:.0f} s"
    return _text(words, {"finished": "bold green", "failed": "bold red"}.get(status, "bold"))


def _incidents(incidents: Sequence[Incident]) -> Any:
    if not incidents:
        return _text("none", "green")
    rows = Table.grid(padding=(0, 2))
    for kind in console.kinds(incidents)[:_MAX_KINDS]:
        last = kind.incidents[-1]
        skipped = last.refused and last.decision is not None  # without one the step has raised
        done = ", ".join(last.changes) or ("skipped" if skipped else "reported")
        cells = (f"{len(kind.incidents)} x", str(kind), f"last: {last.moment}", done)
        rows.add_row(*map(_text, cells))
    lines = [_text(str(incident), "dim") for incident in incidents[-_MAX_LAST:]]
    for line in lines:
        line.overflow, line.no_wrap = "ellipsis", True
    return Group(rows, Text(""), *lines)


def curve(values: Sequence[float], bars: str = _BARS) -> str:
    """Return a curve as one line of text. Each value becomes a bar whose height shows where it lies
    between the lowest and the highest value.
    """
    half = [value / 2 for value in values]  # the difference of any two is finite
    low = min(half, default=0.0)
    span = max(half, default=0.0) - low
    return "".join(bars[1 + round((v - low) / span * 7) if span else 1] for v in half)
