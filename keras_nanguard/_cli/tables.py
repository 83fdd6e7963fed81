"""Reports as tables on a terminal. Names from files are plain text, never markup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from keras_nanguard._files.reports import RepairReport, ScannedVariable, ScanReport
    from keras_nanguard._lint import LintReport

__all__ = ["Tables"]

_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
_STYLES |= {"done": "green", "skipped": "yellow"}

_MAX_ROWS = 60


class Tables:
    """Prints reports to a console.

    Args:
        console: where to; a console on stdout by default.
    """

    def __init__(self, console: Console | None = None):
        self._console = console or Console()

    def scan(self, report: ScanReport, notes: bool) -> None:
        """Print the result of a scan, worst first, without its notes unless they are wanted."""
        variables = [entry for layer in report.layers for entry in layer.variables]
        found = [(entry, one) for entry in variables for one in entry.problems]
        rows = [
            (
                *(Text(entry.layer), Text(entry.name)),
                Text(one.detail, style=_STYLES[one.severity]),
                *(Text(f"{entry.dtype}{list(entry.shape)}"), Text(_range(entry))),
            )
            for entry, one in found
            if notes or one.severity != "note"
        ]
        self._table(("layer", "variable", "problem", "dtype", "range"), rows)
        for note in report.notes:
            self._line(note, "dim")
        self._line(report.headline, "green" if report.ok else "bold red")

    def repair(self, report: RepairReport) -> None:
        """Print the changes of a repair, and the variables that it did not change."""
        rows = [
            (Text(one.path), Text(one.status, style=_STYLES[one.status]), Text(one.detail))
            for one in report.changes
        ]
        self._table(("variable", "", "what was done"), rows)
        for line in report.closing:
            self._line(line, "" if report.ok else "yellow")

    def lint(self, report: LintReport) -> None:
        """Print the hazards of a model, worst first."""
        rows = [
            (
                Text(one.code, style=_STYLES[one.severity]),
                *(Text(one.path), Text(one.detail), Text(one.fix)),
            )
            for one in report.hazards
        ]
        self._table(("hazard", "where", "observation", "remedy"), rows)
        headline = f"{report.model}: {len(rows)} hazards." if rows else str(report)
        self._line(headline, "green" if report.ok else "bold red")

    def _table(self, head: Sequence[str], rows: Sequence[Sequence[Text]]) -> None:
        table = Table(*head, box=None, pad_edge=False, header_style="bold")
        for row in rows[:_MAX_ROWS]:
            table.add_row(*row)
        if rows:
            self._console.print(table)
        if len(rows) > _MAX_ROWS:
            self._line(f"and {len(rows) - _MAX_ROWS} more; --json lists all of them")

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style))


def _range(entry: ScannedVariable) -> str:
    found = entry.statistics
    if found is None or found.min is None:
        return ""
    return f"{found.min:.4g} to {found.max:.4g}"
