"""A terminal dashboard of a run, from the files in its directory: curves, incidents, and remaining
limits of the policy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.incident import Incident
from keras_nanguard._recording.recording import Recording
from keras_nanguard._recording.records import MEASURED
from keras_nanguard._report import console, files, recorded_incidents

__all__ = ["budgets", "curve", "frame", "watch"]

_BARS, _ASCII_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
_STALE = 60.0
"""Seconds without an update after which a running run may have died."""

_MAX_KINDS, _MAX_LAST = 8, 3


def watch(directory: str | os.PathLike[str], interval: float = 1.0, once: bool = False, screen: Console | None = None) -> bool:
    """Show a run until it ends or Ctrl+C is pressed, and return whether there were incidents.

    Args:
        directory: the directory of the guard.
        interval: seconds between two readings.
        once: show it once, as is done without a terminal.
        screen: the output; by default the standard output.

    Raises:
        GuardError: if there is no such directory, or its files cannot be read.
    """
    if not Path(directory).is_dir():
        remedy = "Pass the directory of NanGuard(directory=...)."
        raise GuardError(expected("the directory of a run", f"{str(directory)!r}, which is not a folder", remedy))
    screen = screen or Console(highlight=False)
    seen = _Seen.look(directory)
    if once or not screen.is_terminal:
        screen.print(seen.shown(screen))
        return bool(seen.incidents)
    with Live(seen.shown(screen), console=screen, auto_refresh=False) as live:
        try:
            while seen.recording.meta.get("status", "running") == "running":
                time.sleep(interval)
                seen = seen.next(directory)
                live.update(seen.shown(screen), refresh=True)
        except KeyboardInterrupt:
            pass
    return bool(seen.incidents)


@dataclass(frozen=True)
class _Seen:
    """The present content of the files, and the parts that cannot be read."""

    recording: Recording
    incidents: Sequence[Incident]
    problem: str = ""

    @classmethod
    def look(cls, directory: str | os.PathLike[str]) -> _Seen:
        """Read the files. Before the first step there may be none. If the log is damaged, the
        recording is used.
        """
        recording = files.recorded(directory)
        try:
            return cls(recording, files.read(directory))
        except GuardError as error:
            if recording.meta:
                return cls(recording, [incident for incident, _ in recorded_incidents.incidents(recording, strict=False)], str(error))
            if any(Path(directory).iterdir()):
                raise
            return cls(recording, [])

    def next(self, directory: str | os.PathLike[str]) -> _Seen:
        """Read the files again. Files that cannot be read now may be read later."""
        try:
            return self.look(directory)
        except GuardError as error:
            return replace(self, problem=str(error))

    def shown(self, screen: Console) -> Group:
        parts: list[Any] = [frame(self.recording, self.incidents, screen.width, ascii_only=screen.options.ascii_only)]
        if self.problem:
            parts.append(Text(console.printable(f"Cannot be read: {self.problem}"), style="bold red"))
        return Group(*parts)


def frame(
    recording: Recording, incidents: Sequence[Incident], width: int = 100, now: float | None = None, ascii_only: bool = False
) -> Group:
    """Return the display at one moment. Names are plain text, never markup."""
    parts: list[Any] = [_head(recording, incidents, time.time() if now is None else now)]
    room = max(width - 44, 16)
    curves = Table.grid(padding=(0, 2))
    for name in MEASURED:
        _, low, high = recording.series(name, room)
        if len(high):
            line = Text(curve(high.tolist(), room, _ASCII_BARS if ascii_only else _BARS), style="cyan")
            curves.add_row(Text(name.replace("_", " "), style="bold"), line, Text(f"{low[-1]:.4g}"))
    if curves.row_count:
        parts.append(Panel(curves, title="curves, lowest to highest; the last value", title_align="left"))
    parts.append(Panel(_trouble(incidents), title="incidents", title_align="left"))
    left = budgets(recording)
    if left:
        table = Table.grid(padding=(0, 2))
        for rule, actions, count, times in left:
            table.add_row(Text(rule, style="bold"), Text(actions), Text(f"{count} of {times} left", style="" if count else "bold red"))
        parts.append(Panel(table, title="remaining limits of the policy", title_align="left"))
    return Group(*parts)


def _head(recording: Recording, incidents: Sequence[Incident], now: float) -> Text:
    meta, steps = recording.meta, recording.steps
    if not meta:
        return Text("Nothing is recorded yet; waiting.", style="dim")
    status = str(meta.get("status", ""))
    written = meta.get("written")
    quiet = now - written if isinstance(written, (int, float)) else 0.0
    at = f"step {int(steps['step'][-1]) + 1:,}" if len(steps["step"]) else "before the first step"
    epoch = f", epoch {int(steps['epoch'][-1]) + 1} of {meta.get('epochs') or '?'}" if len(steps["epoch"]) else ""
    words = f"{meta.get('model', '')}: {status}, {at}{epoch}, {len(incidents)} incidents"
    if len(recording.samples):
        words += f", {len(recording.samples)} bad rows"
    if status == "running" and quiet > _STALE:
        words += f"; no update for {quiet:.0f} s"
    return Text(console.printable(words), style={"finished": "bold green", "failed": "bold red"}.get(status, "bold"))


def _trouble(incidents: Sequence[Incident]) -> Any:
    if not incidents:
        return Text("none", style="green")
    table = Table.grid(padding=(0, 2))
    for group in console.kinds(incidents)[:_MAX_KINDS]:
        last = group[-1]
        done = ", ".join(last.changes) or ("skipped" if last.refused else "reported")
        cells = (f"{len(group)} x", console.why(last), f"last at {last.moment}", done)
        table.add_row(*(Text(console.printable(cell)) for cell in cells))
    lines = [Text(console.printable(str(i)), style="dim", overflow="ellipsis", no_wrap=True) for i in incidents[-_MAX_LAST:]]
    return Group(table, Text(""), *lines)


def curve(values: Sequence[float], width: int, bars: str = _BARS) -> str:
    """Return a curve as one line of blocks with a maximum number of columns, from lowest to
    highest.
    """
    if not values:
        return ""
    ends = [len(values) * n // width for n in range(width + 1)]
    picked = [max(values[first:end]) for first, end in pairwise(ends)] if len(values) > width else list(values)
    low, span = min(picked), max(picked) - min(picked)
    return "".join(bars[1 + round((v - low) / span * 7) if span else 1] for v in picked)


def budgets(recording: Recording) -> list[tuple[str, str, int, int]]:
    """Return `(rule, actions, times left, times)` for each limit of a rule with a change."""
    found = []
    for entry in recording.meta.get("budgets") or ():
        try:
            rule, actions = str(entry["rule"]), [str(action) for action in entry["do"]]
            used, times = int(entry["used"]), int(entry["times"])
        except (KeyError, TypeError, ValueError, OverflowError):  # not written by us
            continue
        if not console.CHANGING.isdisjoint(actions):
            found.append((console.printable(rule), console.printable(" and ".join(actions)), max(times - used, 0), times))
    return found
