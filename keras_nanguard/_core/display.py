"""How records are shown: as HTML for notebooks, in which all text is escaped, as tables on a
terminal, and as figures of matplotlib. Rich and matplotlib are imported only when they are needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from keras_nanguard._core.errors import GuardError, expected

MAX_ROWS = 60
"""Rows that are shown; further ones are counted."""


def block(
    title: str,
    lines: Iterable[str] = (),
    head: Sequence[str] = (),
    rows: Sequence[Sequence[object]] = (),
    good: bool = False,
) -> str:
    """Return an HTML fragment in the colours of the notebook.

    Args:
        title: the first line.
        lines: paragraphs below it.
        head, rows: a table.
        good: whether the title reports something good.
    """
    colour = "#1b7a3d" if good else "#c0262d"
    style, left = f"border-left:4px solid {colour};padding:2px 12px", 'style="text-align:left"'
    parts = [f'<div style="{style}"><strong>{escape(title)}</strong>']
    parts += [f'<div style="overflow-wrap:anywhere">{escape(line)}</div>' for line in lines]
    if rows:
        cells = "".join(f'<th scope="col" {left}>{escape(cell)}</th>' for cell in head)
        parts.append(f"<table><thead><tr>{cells}</tr></thead><tbody>")
        for row in rows[:MAX_ROWS]:
            cells = "".join(f"<td {left}>{escape(str(cell))}</td>" for cell in row)
            parts.append(f"<tr>{cells}</tr>")
        parts.append("</tbody></table>")
    if len(rows) > MAX_ROWS:
        parts.append(f"<div>and {len(rows) - MAX_ROWS} more</div>")
    return "".join([*parts, "</div>"])


_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}
_STYLES |= {"done": "green", "skipped": "yellow"}
"""Colours of words in tables on a terminal."""


class TableReport:
    """A report with one verdict, `ok`, which a notebook and a terminal show as a table. Names in it
    are plain text, never markup."""

    __slots__ = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; notes are no faults."""
        raise NotImplementedError

    def _table(self) -> tuple[str, Sequence[str], Sequence[str], Sequence[Sequence[str]]]:
        """Return a headline, further lines, and head and rows of the table."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return block(*self._table(), self.ok)

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


_MAX_PLACES = 40


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure, in inches. It belongs to no window and to no state of pyplot.

    Raises:
        GuardError: if matplotlib is not installed.
    """
    try:
        if "ipykernel" in sys.modules:
            from matplotlib import pyplot

            pyplot.switch_backend(pyplot.get_backend())  # else a notebook shows no figure
        from matplotlib.figure import Figure
    except ImportError as error:
        what, remedy = "matplotlib to be installed", "Run: pip install 'keras-nanguard[plot]'"
        raise GuardError(expected(what, "no such module", remedy)) from error
    return Figure(figsize=(width, height), layout="constrained")


def bad_places(title: str, findings: Sequence[Any]) -> Any:
    """Return a figure of the share of NaN and Inf in each bad place, in causal order from the top.

    Args:
        title: the title.
        findings: the bad places (`Finding`), first cause first.
    """
    shown = findings[:_MAX_PLACES]
    figure = new_figure(8.0, 1.2 + 0.28 * max(len(shown), 1))
    axes = figure.subplots()
    names = [" ".join(filter(None, (f.site, f.path))).replace("$", r"\$") for f in shown]
    for count, colour, word in (("nan", "#c0262d", "NaN"), ("inf", "#e08a00", "Inf")):
        shares = [(getattr(f, count) or 0) / f.size if f.size else 0.0 for f in shown]
        left = [(f.nan or 0) / f.size if f.size and count == "inf" else 0.0 for f in shown]
        axes.barh(range(len(shown)), shares, left=left, color=colour, label=word)
    for place, finding in enumerate(shown):
        if not finding.nan and not finding.inf:
            value = "" if finding.value is None else f" {finding.value:.4g}"
            axes.text(0.01, place, f"{finding.kind}{value}", va="center", fontsize=8)
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.set_xlim(0.0, 1.0)
    axes.invert_yaxis()
    axes.set_xlabel("share of bad entries")
    axes.set_title(title.replace("$", r"\$"), fontsize=10, loc="left", wrap=True)
    if shown:
        axes.legend(loc="lower right", fontsize=8)
    return figure
