"""`Recording`: the measurements and events of a run, from memory or from its file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._recording import database
from keras_nanguard._recording.layer_table import by_path
from keras_nanguard._recording.records import BIN_COLUMNS, MEASURED, STEP_COLUMNS, BadSample, Event, empty

__all__ = ["Recording"]

Array = np.ndarray[Any, Any]

_TABLES = ("steps", "bins", "events", "samples")


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
            `time`, `status` (0 committed, 1 refused, 2 overflow that the loss scale handles, 3
            skipped) and `undone` (by a rollback). A step that runs again has another row with the
            same number.
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
        found = database.read(path)
        meta = {key: value for key, value in found["meta"].items() if key != "writer"}
        return cls(meta, found["steps"], found["bins"], tuple(found["events"]), by_path(found["layers"]), tuple(found["samples"]))

    def __repr__(self) -> str:
        model, status = self.meta.get("model", ""), self.meta.get("status", "")
        return f"Recording({model!r}, status={status!r}, steps={len(self)}, events={len(self.events)}, samples={len(self.samples)})"

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
            raise GuardError(expected(f"name to be one of {', '.join(MEASURED)}", repr(name), "Correct the name."))
        if points < 1:
            raise GuardError(expected("points to be at least 1", repr(points), "Pass a larger number."))
        step = np.concatenate([(self.bins["first"] + self.bins["last"]) // 2, self.steps["step"]])
        low = np.concatenate([self.bins[f"{name}_min"], self.steps[name]])
        high = np.concatenate([self.bins[f"{name}_max"], self.steps[name]])
        finite = np.isfinite(low) & np.isfinite(high)
        order = np.argsort(step[finite], kind="stable")
        return _envelope(step[finite][order], low[finite][order], high[finite][order], points)

    def to_pandas(self, table: str = "steps") -> Any:
        """Return a table as a pandas `DataFrame`: `"steps"`, `"bins"`, `"events"` or `"samples"`.

        Raises:
            GuardError: if there is no such table, or pandas is not installed.
        """
        return _frames("pandas").DataFrame(self._columns(table))

    def to_polars(self, table: str = "steps") -> Any:
        """Return a table as a polars `DataFrame`: `"steps"`, `"bins"`, `"events"` or `"samples"`.

        Raises:
            GuardError: if there is no such table, or polars is not installed.
        """
        return _frames("polars").DataFrame(self._columns(table))

    def _columns(self, table: str) -> dict[str, Any]:
        if table not in _TABLES:
            raise GuardError(expected(f"table to be one of {', '.join(_TABLES)}", repr(table), "Correct the name."))
        if table in ("steps", "bins"):
            return dict(getattr(self, table))
        if table == "events":
            names = ("step", "epoch", "time", "kind", "text")
            columns: dict[str, Any] = {name: [getattr(event, name) for event in self.events] for name in names}
            return {**columns, "data": [json.dumps(dict(event.data)) for event in self.events]}
        names = ("label", "index", "fingerprint", "times", "why")
        columns = {name: [getattr(sample, name) for sample in self.samples] for name in names}
        return {**columns, "steps": [json.dumps(list(sample.steps)) for sample in self.samples]}


def _envelope(step: Array, low: Array, high: Array, points: int) -> tuple[Array, Array, Array]:
    """Fold neighbours together until no more than so many points are left; repeated steps are folded in any case."""
    if not len(step):
        return step, low, high
    width = max(-(-(int(step[-1]) - int(step[0]) + 1) // points), 1)
    groups = (step - step[0]) // width
    starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
    return step[starts], np.minimum.reduceat(low, starts), np.maximum.reduceat(high, starts)


def _frames(library: str) -> Any:
    import importlib

    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise GuardError(expected(f"{library} to be installed", "no such module", f"Run: pip install {library}")) from error
