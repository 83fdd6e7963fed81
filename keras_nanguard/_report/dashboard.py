"""The live view of a run in a terminal, from the files in its directory: curves and incidents."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.incident import Incident
from keras_nanguard._core.plain_values import times
from keras_nanguard._recording.database import MEASURED
from keras_nanguard._recording.recording import measured
from keras_nanguard._report import console, files
from keras_nanguard._report.reported_run import ReportedRun, heights

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
        screen.print(_display(seen, screen))
        return bool(seen.incidents)
    with Live(_display(seen, screen), console=screen, auto_refresh=False) as live:
        try:
            while seen.recording.meta.get("status", "running") == "running":
                time.sleep(interval)
                problem = ""
                try:
                    seen = _read(directory)
                except GuardError as error:  # what cannot be read now may be read later
                    problem = str(error)
                live.update(_display(seen, screen, problem), refresh=True)
        except KeyboardInterrupt:
            pass
    return bool(seen.incidents)


def _read(directory: str | os.PathLike[str]) -> ReportedRun:
    """Read the recording; before the first step there may be none."""
    return ReportedRun() if files.is_empty(Path(directory)) else files.read(directory)


def _display(seen: ReportedRun, screen: Console, problem: str = "") -> Group:
    """Return the display of a run for a screen, with the reason why it cannot be read now."""
    found = frame(seen, screen.width, ascii_only=screen.options.ascii_only)
    lines = [_text(f"Cannot be read: {problem}", "bold red")] if problem else []
    return Group(found, *lines)


def _text(text: str, style: str = "") -> Text:
    """Return plain text without control characters, which is never markup."""
    return Text(console.printable(text), style=style)


def frame(run: ReportedRun, width: int = 100, ascii_only: bool = False) -> Group:
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
    filled = [
        Panel(content, title=title, title_align="left")
        for title, content in panels
        if not isinstance(content, Table) or content.row_count
    ]
    return Group(_head(run), *filled)


def _head(run: ReportedRun) -> Text:
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
    return "".join(bars[1 + round(height * 7)] for height in heights(values))
