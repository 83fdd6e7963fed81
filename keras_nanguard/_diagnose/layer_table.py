"""The table of the layers of a replayed step, as text."""

from __future__ import annotations

from collections.abc import Sequence

from keras_nanguard._core.verdict import LayerRow

HEAD = ("", "layer", "dtype", "min", "max", "mean", "zeros", "NaN", "+Inf", "-Inf", "of", "range")
"""The columns of the table of layers."""


def table(rows: Sequence[LayerRow]) -> str:
    """Return the table of layers as text, one line per call, the bad ones marked."""
    lines = [HEAD, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(map(_aligned, HEAD, line, widths)) for line in lines)


def _aligned(column: str, cell: str, width: int) -> str:
    return cell.ljust(width) if column in ("layer", "dtype") else cell.rjust(width)


def _cells(row: LayerRow) -> tuple[str, ...]:
    numbers = (f"{number:.3g}" for number in (row.minimum, row.maximum, row.mean))
    counts = map(str, (row.zeros, row.nan, row.plus_inf, row.minus_inf, row.size))
    mark, share = "" if row.finite else "*", f"{row.share_of_range:.1%}"
    return (mark, row.path, row.dtype, *numbers, *counts, share)
