"""The steps of a recording: the last ones exactly, older ones in bins, in arrays of fixed size."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_nanguard._recording.records import BIN_COLUMNS, COMMITTED, MEASURED, OVERFLOW, REFUSED, STEP_COLUMNS

__all__ = ["EXACT", "MAX_BINS", "Rows"]

Array = np.ndarray[Any, Any]

EXACT = 8192
"""Minimum number of the last steps that are stored exactly."""

_MOVED = 2048
"""Number of steps that are moved into bins at a time."""

MAX_BINS = 4096
"""Number of bins at which each two of them are merged."""

_WIDTH = 256
"""Number of steps in a bin at first."""


class Rows:
    """The steps in the order in which they ran, each with a number (`id`) from 0.

    Attributes:
        first: the `id` of the first exactly stored step.
        changed: the `id` of the first step that was added or changed since this was last set to
            `end`.
        changed_bin: the first bin that was added or changed since this was last set to the number
            of bins.
    """

    def __init__(self) -> None:
        self._buffer: dict[str, Array] = {name: np.zeros(EXACT + _MOVED, dtype) for name, dtype in STEP_COLUMNS.items()}
        self._bins: dict[str, Array] = {name: np.zeros(MAX_BINS + _MOVED // _WIDTH, dtype) for name, dtype in BIN_COLUMNS.items()}
        self._bin_count = 0
        self.width, self.first, self._count, self.changed = _WIDTH, 0, 0, 0
        self.changed_bin = 0

    @property
    def end(self) -> int:
        """Number of steps so far, which is the `id` of the next one."""
        return self.first + self._count

    @property
    def bins(self) -> dict[str, Array]:
        """The bins, as in `Recording.bins`, in memory that is overwritten later."""
        return {name: column[: self._bin_count] for name, column in self._bins.items()}

    def _set_bins(self, bins: dict[str, Array]) -> None:
        self._bin_count = len(bins["first"])
        for name, column in bins.items():
            self._bins[name][: self._bin_count] = column

    def steps(self, start: int = 0) -> dict[str, Array]:
        """Return copies of the columns of the exactly stored steps from this `id` on."""
        return {name: column[max(start - self.first, 0) : self._count].copy() for name, column in self._buffer.items()}

    def extend(self, columns: dict[str, Array]) -> None:
        """Add steps. Missing columns become NaN, or 0 for whole numbers."""
        total = len(columns["step"])
        for start in range(0, total, _MOVED):
            count = min(_MOVED, total - start)
            if self._count + count > EXACT + _MOVED:
                self._thin()
            place = slice(self._count, self._count + count)
            for name, column in self._buffer.items():
                unknown = np.nan if column.dtype.kind == "f" else 0
                column[place] = columns[name][start : start + count] if name in columns else unknown
            self._count += count

    def fill(self, name: str, value: float, start: int, end: int) -> None:
        """Set a column of the steps from one `id` to before another."""
        start, end = max(start, self.first), min(end, self.end)
        if start < end:
            self._buffer[name][start - self.first : end - self.first] = value
            self.changed = min(self.changed, start)

    def undo(self, step: int, again: frozenset[int] | None = None) -> None:
        """Mark the committed steps from this step number on as undone, and refused ones that are
        replayed.
        """
        columns = {name: column[: self._count] for name, column in self._buffer.items()}
        later = columns["step"] >= step
        refused = np.isin(columns["status"], (REFUSED, OVERFLOW)) & np.isin(columns["step"], list(again or ()))
        rows = np.flatnonzero(later & ((columns["status"] == COMMITTED) | refused) & ~columns["undone"])
        if len(rows):
            columns["undone"][rows] = True
            self.changed = min(self.changed, self.first + int(rows[0]))
        bins = self.bins
        standing = bins["count"] - bins["refused"] - bins["overflows"]
        undone = np.clip(bins["last"] - step + 1, 0, standing)
        more = np.flatnonzero(undone > bins["undone"])
        if len(more):
            np.maximum(bins["undone"], undone, out=bins["undone"])
            self.changed_bin = min(self.changed_bin, int(more[0]))

    def restore(self, steps: dict[str, Array], bins: dict[str, Array], first: int) -> None:
        """Load the recording of an earlier run, whose first exact step has this `id`."""
        while len(bins["first"]) > MAX_BINS:
            bins = _halved(bins)
        self._set_bins(bins)
        self.changed_bin = 0  # written once more: they may have another number in the file, or be fewer
        self.width = max(int(bins["count"].max(initial=0)), _WIDTH)
        self.first, self._count = first, 0
        self.extend(steps)
        self.changed = self.end

    def _thin(self) -> None:
        """Move the oldest steps into bins."""
        oldest = {name: column[:_MOVED] for name, column in self._buffer.items()}
        per = min(self.width, _MOVED)
        fresh = _binned({name: column.reshape(-1, per) for name, column in oldest.items()})
        end = self._bin_count + len(fresh["first"])
        for name, column in self._bins.items():
            column[self._bin_count : end] = fresh[name]
        self._bin_count, self.changed_bin = end, min(self.changed_bin, self._bin_count)
        for column in self._buffer.values():
            column[: self._count - _MOVED] = column[_MOVED : self._count]
        self._count -= _MOVED
        self.first += _MOVED
        if self._bin_count >= MAX_BINS:
            self._set_bins(_halved(self.bins))
            self.width, self.changed_bin = 2 * self.width, 0


@np.errstate(all="ignore")
def _binned(rows: dict[str, Array]) -> dict[str, Array]:
    """Return one bin for each row of columns of shape `(bins, steps of a bin)`."""
    status = rows["status"]
    found = {
        "first": rows["step"].min(1),
        "last": rows["step"].max(1),
        "count": np.full(len(status), status.shape[1]),
        "refused": (status == REFUSED).sum(1),
        "overflows": (status == OVERFLOW).sum(1),
        "undone": rows["undone"].sum(1),
        "time": rows["time"][:, -1],
    }
    for name in MEASURED:
        found[f"{name}_min"], found[f"{name}_max"] = _extremes(rows[name], rows[name])
    finite = np.isfinite(rows["loss"])
    found["loss_mean"] = np.where(finite, rows["loss"], 0.0).sum(1) / finite.sum(1)
    return {name: found[name].astype(dtype) for name, dtype in BIN_COLUMNS.items()}


def _extremes(low: Array, high: Array) -> tuple[Array, Array]:
    """Return the smallest and the largest finite number of each row, or NaN."""
    known = np.isfinite(low) & np.isfinite(high)
    least, largest = np.where(known, low, np.inf).min(1), np.where(known, high, -np.inf).max(1)
    return np.where(known.any(1), least, np.nan), np.where(known.any(1), largest, np.nan)


@np.errstate(all="ignore")
def _halved(bins: dict[str, Array]) -> dict[str, Array]:
    """Return bins after merging each two of them. An odd one at the end is kept."""
    even = len(bins["first"]) // 2 * 2
    pairs = {name: column[:even].reshape(-1, 2) for name, column in bins.items()}
    made: dict[str, Array] = {"first": pairs["first"].min(1), "last": pairs["last"].max(1), "time": pairs["time"][:, 1]}
    for name in ("count", "refused", "overflows", "undone"):
        made[name] = pairs[name].sum(1)
    for name in MEASURED:
        made[f"{name}_min"], made[f"{name}_max"] = _extremes(pairs[f"{name}_min"], pairs[f"{name}_max"])
    known = np.isfinite(pairs["loss_mean"])
    weights = np.where(known, pairs["count"], 0)
    made["loss_mean"] = np.where(known, pairs["loss_mean"] * weights, 0.0).sum(1) / weights.sum(1)
    return {name: np.concatenate([made[name].astype(column.dtype), column[even:]]) for name, column in bins.items()}
