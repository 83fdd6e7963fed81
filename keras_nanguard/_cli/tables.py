"""Reports as tables on a terminal. Names from files are plain text, never markup."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from keras_nanguard._files.reports import RepairReport, ScannedVariable, ScanReport
    from keras_nanguard._lint import LintReport

__all__ = ["Tables"]

_STYLES = {
    "error": "bold red",
    "warning": "yellow",
    "note": "dim",
    "done": "green",
    "skipped": "yellow",
}

_MAX_ROWS = 60


class Tables:
    """Prints reports to a console.

    Args:
        console: where to; a console on stdout by default.
    """

    def __init__(self, console: Console | None = None):
        self._console = console or Console()

    def scan(self, report: ScanReport, notes: bool) -> None:
        """Print the result of a scan, worst first."""
        wanted = ("error", "warning", "note") if notes else ("error", "warning")
        rows = [
            (entry, found)
            for layer in report.layers
            for entry in layer.variables
            for found in entry.problems
            if found.severity in wanted
        ]
        table = Table(
            "layer",
            "variable",
            "problem",
            "dtype",
            "range",
            box=None,
            pad_edge=False,
            header_style="bold",
        )
        for entry, found in rows[:_MAX_ROWS]:
            table.add_row(
                Text(entry.layer),
                Text(entry.name),
                Text(found.detail, style=_STYLES[found.severity]),
                Text(f"{entry.dtype}{list(entry.shape)}"),
                Text(_range(entry)),
            )
        if rows:
            self._console.print(table)
        if len(rows) > _MAX_ROWS:
            self._line(f"and {len(rows) - _MAX_ROWS} more; --json lists all of them")
        for note in report.notes:
            self._line(note, "dim")
        self._line(report.headline, "green" if report.ok else "bold red")

    def repair(self, report: RepairReport) -> None:
        """Print the changes of a repair, and the variables that it did not change."""
        table = Table(
            "variable", "", "what was done", box=None, pad_edge=False, header_style="bold"
        )
        for change in report.changes[:_MAX_ROWS]:
            table.add_row(
                Text(change.path),
                Text(change.status, style=_STYLES[change.status]),
                Text(change.detail),
            )
        if report.changes:
            self._console.print(table)
        if len(report.changes) > _MAX_ROWS:
            self._line(f"and {len(report.changes) - _MAX_ROWS} more; --json lists all of them")
        for line in report.closing:
            self._line(line, "" if report.ok else "yellow")

    def lint(self, report: LintReport) -> None:
        """Print the hazards of a model, worst first."""
        table = Table(
            "hazard",
            "where",
            "observation",
            "remedy",
            box=None,
            pad_edge=False,
            header_style="bold",
        )
        for hazard in report.hazards:
            code = Text(hazard.code, style=_STYLES[hazard.severity])
            table.add_row(code, Text(hazard.path), Text(hazard.detail), Text(hazard.fix))
        if report.hazards:
            self._console.print(table)
        count = len(report.hazards)
        self._line(
            f"{report.model}: {count} hazards." if count else str(report),
            "green" if report.ok else "bold red",
        )

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style))


def _range(entry: ScannedVariable) -> str:
    found = entry.statistics
    if found is None or found.min is None:
        return ""
    return f"{found.min:.4g} to {found.max:.4g}"
