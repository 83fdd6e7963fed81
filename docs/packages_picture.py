"""Draw the picture of the packages for docs/architecture.md: an SVG that needs no script.

    python docs/packages_picture.py
"""

from __future__ import annotations

from pathlib import Path

PICTURE = Path(__file__).parent / "pictures" / "packages.svg"

PLACES = {
    "__main__": (3.2, 0),
    "model": (1.0, 1),
    "_cli": (3.2, 1),
    "guard": (2.1, 2),
    "_fit": (2.1, 3),
    "_lint": (4.4, 3),
    "_report": (0.7, 4),
    "_diagnose": (3.0, 4),
    "_files": (4.15, 5),
    "testing": (5.4, 5),
    "actions": (2.36, 6),
    "_backends": (4.8, 6),
    "_recording": (0.4, 7),
    "_policy": (2.2, 7),
    "_keras": (4.4, 7),
    "errors": (5.6, 7),
    "_core": (2.6, 8),
}
"""Column and row of each package and entry point."""

ARROWS = (
    ("__main__", "_cli"),
    ("_cli", "guard"),
    ("_cli", "_lint"),
    ("model", "guard"),
    ("guard", "_fit"),
    ("_fit", "_report"),
    ("_fit", "_diagnose"),
    ("_diagnose", "_files"),
    ("_lint", "_files"),
    ("_files", "_backends"),
    ("testing", "_policy"),
    ("testing", "_backends"),
    ("_backends", "_keras"),
    ("actions", "_policy"),
    ("_policy", "_core"),
    ("_recording", "_core"),
    ("_keras", "_core"),
    ("_report", "_recording"),
    ("_report", "_policy"),
    ("_report", "_files"),
    ("errors", "_core"),
)
"""The imports between them, without those that others imply."""

WITHOUT_KERAS = {"_core", "_recording", "_policy", "_report", "errors", "actions"}

COLUMN, ROW, WIDTH, HEIGHT = 122, 74, 104, 34
LEFT, TOP = 10, 20
SIZE = (LEFT + 10 + round(5.6 * COLUMN) + WIDTH, TOP + 8 * ROW + HEIGHT + 74)
COLORS = {True: ("#dbeafe", "#2563eb"), False: ("#fef3c7", "#b45309")}
"""Fill and border of a package that loads without Keras, and of one that does not."""


def _corner(name: str) -> tuple[int, int]:
    column, row = PLACES[name]
    return LEFT + round(column * COLUMN), TOP + row * ROW


def _arrow(source: str, target: str) -> str:
    (x1, y1), (x2, y2) = _corner(source), _corner(target)
    line = f'x1="{x1 + WIDTH // 2}" y1="{y1 + HEIGHT}" x2="{x2 + WIDTH // 2}" y2="{y2 - 4}"'
    return f'  <line {line} marker-end="url(#head)"><title>{source} imports {target}</title></line>'


def _box(x: int, y: int, name: str, without_keras: bool, width: int = WIDTH) -> str:
    fill, border = COLORS[without_keras]
    return (
        f'  <rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="6" fill="{fill}" stroke="{border}"/>\n'
        f'  <text x="{x + width // 2}" y="{y + HEIGHT // 2 + 5}">{name}</text>'
    )


def picture() -> str:
    """Return the SVG."""
    width, height = SIZE
    boxes = [_box(*_corner(name), name, name in WITHOUT_KERAS) for name in PLACES]
    below = height - HEIGHT - 14
    legend = [_box(LEFT + 10, below, "loads without Keras", True, 190), _box(LEFT + 220, below, "loads Keras", False, 130)]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        "  <title>The packages of keras_nanguard and their imports</title>",
        '  <defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#64748b"/></marker></defs>',
        f'  <rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        '  <g stroke="#64748b" stroke-width="1.4">',
        *(_arrow(*arrow) for arrow in ARROWS),
        "  </g>",
        '  <g font-family="ui-monospace, Menlo, Consolas, monospace" font-size="14" text-anchor="middle" fill="#111827">',
        *boxes,
        *legend,
        "  </g>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
