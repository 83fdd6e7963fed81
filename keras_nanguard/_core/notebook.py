"""Records as HTML for notebooks: a heading, lines, a table. All text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["block"]

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
    parts = [
        f'<div style="border-left:4px solid {colour};padding:2px'
        f' 12px"><strong>{escape(title)}</strong>'
    ]
    parts += [f'<div style="overflow-wrap:anywhere">{escape(line)}</div>' for line in lines]
    if rows:
        cells = "".join(
            f'<th scope="col" style="text-align:left">{escape(cell)}</th>' for cell in head
        )
        parts.append(f"<table><thead><tr>{cells}</tr></thead><tbody>")
        for row in rows[:MAX_ROWS]:
            parts.append(
                "<tr>"
                + "".join(f'<td style="text-align:left">{escape(str(cell))}</td>' for cell in row)
                + "</tr>"
            )
        parts.append("</tbody></table>")
    if len(rows) > MAX_ROWS:
        parts.append(f"<div>and {len(rows) - MAX_ROWS} more</div>")
    return "".join([*parts, "</div>"])
