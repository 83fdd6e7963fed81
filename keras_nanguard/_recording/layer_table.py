"""Measurements of each layer over time, thinned if there are too many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["KINDS", "LayerTable", "by_path"]

Array = np.ndarray[Any, Any]

KINDS = {"trainable": ("gradient_norm", "weight_norm", "update_ratio"), "statistics": ("low", "high")}
"""The measured columns, by the kind of the variable."""

MAX_BYTES = 2 << 20
"""Maximum bytes of all measurements. Beyond it the last quarter is kept, and about every second of
the others.
"""

MOMENT, VARIABLE = 320, 240
"""Bytes of a measurement without its numbers, and of a path and a kind."""

MAX_EARLIER = 20_000
"""Maximum number of rows from an earlier process."""

Row = tuple[int, str, str, float, float, float]
"""Step, path, kind, and up to three numbers."""


class LayerTable:
    """The measurements of the layers of a run.

    Attributes:
        thinned: whether measurements were dropped since this was last set to `False`.
    """

    def __init__(self) -> None:
        self._moments: list[tuple[int, tuple[tuple[str, str], ...], Array]] = []
        self._earlier: list[Row] = []
        self._written = self._size = 0
        self.thinned = False

    def add(self, step: int, variables: tuple[tuple[str, str], ...], values: Array) -> None:
        """Add one measurement: path and kind of each variable, and numbers of shape `(variables,
        3)`.
        """
        before = self._moments[-1][1] if self._moments else ()
        variables = before if before == variables else variables
        values = np.asarray(values, np.float32)
        self._moments.append((step, variables, values))
        self._size += MOMENT + values.nbytes + VARIABLE * len(variables) * (variables is not before)
        if self._size > MAX_BYTES:
            self._moments = self._thinned()
            self._size = self._bytes()
            self.write_anew()

    def write_anew(self) -> None:
        """Mark everything as not written, so that it replaces the rows in the file."""
        self._written, self.thinned = 0, True

    def _bytes(self) -> int:
        own = {id(variables): len(variables) for _, variables, _ in self._moments}
        return sum(MOMENT + values.nbytes for _, _, values in self._moments) + VARIABLE * sum(own.values())

    def _thinned(self) -> list[tuple[int, tuple[tuple[str, str], ...], Array]]:
        """Return the measurements to keep: the last quarter, and every second one of the others."""
        recent = len(self._moments) * 3 // 4
        steps = np.array([step for step, _, _ in self._moments[:recent]])
        if len(steps) < 4:
            return self._moments[1:]
        even = np.linspace(steps[0], steps[-1], max(recent // 2, 1))
        chosen = np.unique(np.searchsorted(steps, even).clip(0, recent - 1))
        return [self._moments[place] for place in chosen.tolist()] + self._moments[recent:]

    def restore(self, rows: Sequence[Row]) -> None:
        """Load the measurements of an earlier process."""
        known: dict[str, str] = {}  # each row that is read has texts of its own
        self._earlier = [
            (step, known.setdefault(path, path), known.setdefault(kind, kind), a, b, c) for step, path, kind, a, b, c in rows[-MAX_EARLIER:]
        ]

    def rows(self) -> list[Row]:
        """Return all rows, oldest first."""
        return [*self._earlier, *_rows(self._moments)]

    def unwritten(self) -> tuple[Row, ...]:
        """Return the rows since the last call, or all of them if some were dropped."""
        fresh = _rows(self._moments[self._written :])
        self._written = len(self._moments)
        return (*self._earlier, *fresh) if self.thinned else tuple(fresh)


def _rows(moments: Sequence[tuple[int, tuple[tuple[str, str], ...], Array]]) -> list[Row]:
    return [
        (step, path, kind, *numbers)
        for step, variables, values in moments
        for (path, kind), numbers in zip(variables, values.astype(np.float64).tolist())
    ]


def by_path(rows: Sequence[Row]) -> Mapping[str, Mapping[str, Array]]:
    """Return the numbers of each variable as arrays, by its path."""
    own: dict[str, list[Row]] = {}
    for row in rows:
        own.setdefault(str(row[1]), []).append(row)
    found = {}
    for path, of_path in own.items():
        names = KINDS["trainable" if of_path[0][2] == "trainable" else "statistics"]
        numbers = np.array([[np.nan if value is None else float(value) for value in row[3:6]] for row in of_path])
        steps = np.array([int(row[0]) for row in of_path], np.int64)
        found[path] = {"step": steps, **{name: numbers[:, place] for place, name in enumerate(names)}}
    return found
