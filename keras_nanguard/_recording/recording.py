"""`Recording`: the measurements and events of a run, from memory or from its file."""

from __future__ import annotations

import importlib
import json
import os
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from keras_nanguard._core.errors import GuardError, NanGuardError, expected
from keras_nanguard._core.incident import Incident
from keras_nanguard._recording import reading
from keras_nanguard._recording.database import path_of
from keras_nanguard._recording.records import (
    BIN_COLUMNS,
    MEASURED,
    REFUSED,
    STEP_COLUMNS,
    BadSample,
    Event,
    empty,
)

__all__ = ["Recording", "from_database", "incidents", "measured"]

Array = np.ndarray[Any, Any]

_LAYER_COLUMNS = {"trainable": ("gradient_norm", "weight_norm", "update_ratio")}
"""Names of the numbers of a variable, by its kind; `_STATISTICS` for any other."""

_STATISTICS = ("low", "high")

_TABLES = {
    "steps": tuple(STEP_COLUMNS),
    "bins": tuple(BIN_COLUMNS),
    "events": ("step", "epoch", "time", "kind", "text", "data"),
    "samples": ("label", "index", "fingerprint", "times", "reason", "steps"),
}
"""Columns of the tables that become data frames."""


@dataclass(frozen=True)
class Recording:
    """The measurements and events of a run, as a copy that does not change during the run.

    Steps, epochs and batches count from 0.

    Attributes:
        meta: facts about the run: `format`, `model`, `backend`, `versions`, `policy` (as text),
            `began` and `written` (seconds since 1970), `status` (`"running"`, `"finished"`,
            `"failed"`), `epochs`, `steps_per_epoch`, and `budgets` (for each limit of the policy
            `rule`, `do`, `used`, `times`, `per_steps`).
        steps: at least the last 8,192 steps in the order in which they ran, as one array for each
            of `step`, `epoch`, `batch`, `loss`, `gradient_norm`, `learning_rate`, `loss_scale`,
            `time`, `status` (0 committed, 1 refused, 2 overflow that the loss scale handles,
            3 skipped) and `undone` (by a rollback). A step that runs again has another row with
            the same number.
        bins: older steps in bins: `first`, `last`, `count`, `refused`, `overflows`, `undone`, the
            smallest and largest value of each measured column (`loss_min`, `loss_max`, ...),
            `loss_mean`, and the `time` of the last step.
        events: events in order of time.
        layers: for each variable path the arrays `step`, `gradient_norm`, `weight_norm` and
            `update_ratio` (trainable variables), or `step`, `low` and `high` (statistics of
            BatchNormalization).
        samples: bad rows of the data.
    """

    meta: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[str, Array] = field(default_factory=lambda: empty(STEP_COLUMNS))
    bins: Mapping[str, Array] = field(default_factory=lambda: empty(BIN_COLUMNS))
    events: tuple[Event, ...] = ()
    layers: Mapping[str, Mapping[str, Array]] = field(default_factory=dict)
    samples: tuple[BadSample, ...] = ()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Recording:
        """Read the recording from the directory of a run, during the run or later.

        Args:
            path: the `directory` of the guard, or the file `recording.sqlite` in it.

        Raises:
            GuardError: if there is no such file, or if it is not a recording, of a newer version,
                damaged or too large.
        """
        file = path_of(path)
        with reading.opened(file) as connection:
            return from_database(connection, file)

    def __repr__(self) -> str:
        model, status = self.meta.get("model", ""), self.meta.get("status", "")
        counts = f"steps={len(self)}, events={len(self.events)}, samples={len(self.samples)}"
        return f"Recording({model!r}, status={status!r}, {counts})"

    def __len__(self) -> int:
        """Number of steps that have run, including undone ones."""
        return int(self.bins["count"].sum()) + len(self.steps["step"])

    def series(self, name: str, points: int = 2000) -> tuple[Array, Array, Array]:
        """Return one measured column over all steps, for a plot.

        Args:
            name: one of `loss`, `gradient_norm`, `learning_rate`, `loss_scale`.
            points: maximum number of points.

        Returns:
            `(step, low, high)`: steps in ascending order, and the smallest and largest finite value
            near each of them. Undone steps are included. Points without a finite value are omitted.

        Raises:
            GuardError: if there is no such column, or `points` is not at least 1.
        """
        if name not in MEASURED:
            wanted = f"name to be one of {', '.join(MEASURED)}"
            raise GuardError(expected(wanted, repr(name), "Correct the name."))
        if points < 1:
            received = repr(points)
            raise GuardError(expected("points to be at least 1", received, "Pass a larger number."))
        step, low, high, _ = measured(self, name)
        order = np.argsort(step, kind="stable")
        return _envelope(step[order], low[order], high[order], points)

    def to_pandas(self, table: str = "steps") -> Any:
        """Return a table as a pandas `DataFrame`: `"steps"`, `"bins"`, `"events"` or `"samples"`.

        Raises:
            GuardError: if there is no such table, or pandas is not installed.
        """
        return self._frame("pandas", table)

    def to_polars(self, table: str = "steps") -> Any:
        """Return a table as a polars `DataFrame`: `"steps"`, `"bins"`, `"events"` or `"samples"`.

        Raises:
            GuardError: if there is no such table, or polars is not installed.
        """
        return self._frame("polars", table)

    def _frame(self, library: str, table: str) -> Any:
        try:
            frames = importlib.import_module(library)
        except ImportError as error:
            wanted, remedy = f"{library} to be installed", f"Run: pip install {library}"
            raise GuardError(expected(wanted, "no such module", remedy)) from error
        return frames.DataFrame(self._rows(table))

    def _rows(self, table: str) -> dict[str, Any]:
        """Return a table as columns."""
        if table not in _TABLES:
            wanted = f"table to be one of {', '.join(_TABLES)}"
            raise GuardError(expected(wanted, repr(table), "Correct the name."))
        found = getattr(self, table)
        if isinstance(found, tuple):
            found = {name: [_cell(getattr(row, name)) for row in found] for name in _TABLES[table]}
        return dict(found)


def _cell(value: Any) -> Any:
    """Return a value as it is in a data frame: a list or an object as JSON."""
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return json.dumps(list(value)) if isinstance(value, tuple) else value


def measured(recording: Recording, name: str) -> tuple[Array, Array, Array, Array]:
    """Return the finite values of a measured column, of bins first: steps, smallest and largest
    values, and whether a rollback has undone a step, which is not known of bins."""
    bins, steps = recording.bins, recording.steps
    step = np.concatenate([(bins["first"] + bins["last"]) // 2, steps["step"]])
    low = np.concatenate([bins[f"{name}_min"], steps[name]])
    high = np.concatenate([bins[f"{name}_max"], steps[name]])
    undone = np.concatenate([np.zeros(len(bins["first"]), bool), _undone(steps)])
    finite = np.isfinite(low) & np.isfinite(high)
    return step[finite], low[finite], high[finite], undone[finite]


def _undone(steps: Mapping[str, Any]) -> Any:
    """Return which steps were undone. A refused step counts if the step before it was undone: its
    values belong to the abandoned run.
    """
    refused = steps["status"] == REFUSED
    before = np.maximum.accumulate(np.where(refused, -1, np.arange(len(refused))))
    return np.where(refused & (before >= 0), steps["undone"][before], steps["undone"])


def _envelope(step: Array, low: Array, high: Array, points: int) -> tuple[Array, Array, Array]:
    """Merge neighbours until at most `points` are left; repeated steps are merged in any case."""
    if not len(step):
        return step, low, high
    width = max(-(-(int(step[-1]) - int(step[0]) + 1) // points), 1)
    groups = (step - step[0]) // width
    starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
    return step[starts], np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)


def _by_path(rows: Sequence[tuple[Any, ...]]) -> dict[str, dict[str, Array]]:
    """Return the rows of `layers` as arrays, by the path of the variable."""
    own: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        own.setdefault(row[1], []).append(row)
    found = {}
    for path, of_path in own.items():
        steps, _, kinds, *numbers = zip(*of_path)
        names = _LAYER_COLUMNS.get(kinds[0], _STATISTICS)
        found[path] = {"step": np.array(steps, np.int64)}
        found[path] |= {name: np.array(column) for name, column in zip(names, numbers)}
    return found


def from_database(connection: sqlite3.Connection, file: Path | None = None) -> Recording:
    """Return the recording in a database: that of a file, or one in memory."""
    found = reading.contents(connection, file)
    return Recording(**{**found, "layers": _by_path(found["layers"])})


def incidents(recording: Recording, strict: bool = True) -> list[tuple[Incident, int]]:
    """Return each incident of a recording, with its step counted across all fits.

    Args:
        recording: the recording.
        strict: whether a damaged incident is an error; else it is left out.

    Raises:
        FileFormatError: if one is damaged, or of a newer version.
    """
    found = []
    for event in recording.events:
        if event.kind == "incident":
            try:
                found.append((Incident.from_dict(event.data), event.step))
            except NanGuardError:
                if strict:
                    raise
    return found
