"""A recording in memory, of limited size, and what of it the file lacks."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from keras_nanguard._recording.database import (
    COMMITTED,
    STEP_COLUMNS,
    Array,
    Row,
    Statement,
    insert,
)

MAX_STEPS = 32_768
"""Maximum number of steps. The newest quarter of them is complete."""

MAX_EVENT_BYTES = 6 << 20
"""Maximum size of all events in bytes; above it, only the newest half of it is kept. The file keeps
older events."""

_STEP = np.dtype([("id", np.int64), *STEP_COLUMNS.items()])

_UNKNOWN = int(np.iinfo(np.int64).min)
"""No `id` is smaller, also in a file of which nothing is known."""


class Memory:
    """The tables of one recording.

    Attributes:
        steps: the steps in order of execution: `STEP_COLUMNS`, and an increasing `id`.
        end: the `id` of the next step.
        rows: the rows of each other table by their first column.
    """

    def __init__(self) -> None:
        self.steps = np.empty(0, _STEP)
        self.end = 0
        self.rows: dict[str, dict[Any, Row]] = {"meta": {}, "events": {}, "samples": {}}
        self._event_bytes = 0
        # What the file lacks: steps from this `id` on, and rows with these first columns.
        self._first_step = _UNKNOWN
        self._changed: dict[str, set[Any]] = {table: set() for table in self.rows}

    def put(self, table: str, row: Row) -> None:
        """Insert or replace a row of a table other than `steps`."""
        self.rows[table][row[0]] = row
        self._changed[table].add(row[0])
        if table == "events":
            self._event_bytes += _size(row)
            if self._event_bytes > MAX_EVENT_BYTES:
                self._drop_old_events()

    def add_event(self, row: Row) -> None:
        """Append an event, given without its `id`."""
        last = next(reversed(self.rows["events"]), 0)
        self.put("events", (last + 1, *row))

    def _drop_old_events(self) -> None:
        events = self.rows["events"]
        for oldest in [*events][:-1]:
            if self._event_bytes <= MAX_EVENT_BYTES // 2:
                break
            self._event_bytes -= _size(events.pop(oldest))
            self._changed["events"].discard(oldest)

    def add_steps(self, columns: Mapping[str, Array]) -> None:
        """Append steps, as in `Recording.steps`. Above the limit every second good step is removed,
        except in the newest quarter; every second step if most are bad."""
        new = np.empty(len(columns["step"]), _STEP)
        new["id"] = np.arange(self.end, self.end + len(new))
        for name in STEP_COLUMNS:
            new[name] = columns[name]
        self.steps = np.concatenate([self.steps, new])
        self.end += len(new)
        self._step_changed(self.end - len(new))
        while len(self.steps) > MAX_STEPS:
            self._thin(self.steps["status"] == COMMITTED)
            if len(self.steps) > MAX_STEPS * 3 // 4:
                self._thin(np.ones(len(self.steps), bool))

    def _thin(self, which: Array) -> None:
        """Remove every second of these steps, except in the newest quarter."""
        older = self.steps["id"] < self.end - MAX_STEPS // 4
        self.steps = np.delete(self.steps, np.flatnonzero(which & older)[1::2])
        self._step_changed(0)

    def fill_rate(self, rate: float, first: int, end: int) -> None:
        """Note the learning rate of the steps with an `id` of `first` or above, and below `end`."""
        self.steps["learning_rate"][slice(*np.searchsorted(self.steps["id"], (first, end)))] = rate
        self._step_changed(first)

    def undo(self, base: int, step: int, again: Collection[int]) -> Array:
        """Mark the committed steps from this number on as undone, and the refused ones with these
        numbers, which count from `base`; return the status of each of the latter."""
        steps, numbers = self.steps, self.steps["step"] - base
        after = (numbers >= step) & ~steps["undone"]
        good = after & (steps["status"] == COMMITTED)
        refused = after & ~good
        refused[refused] = [number in again for number in numbers[refused].tolist()]
        undone = good | refused
        steps["undone"] |= undone
        if undone.any():
            self._step_changed(int(steps["id"][undone][0]))
        results: Array = steps["status"][refused]
        return results

    def _step_changed(self, place: int) -> None:
        self._first_step = min(self._first_step, place)

    def rewrite(self) -> None:
        """Note that it is unknown what the file lacks."""
        self._first_step = _UNKNOWN
        self._changed = {table: set(rows) for table, rows in self.rows.items()}

    def unwritten(self) -> list[Statement]:
        """Return the statements that write what the file lacks; it then counts as written. If that
        is unknown, they rewrite everything except older events."""
        steps = self.steps[self.steps["id"] >= self._first_step]
        found: list[Statement] = [("DELETE FROM steps WHERE id >= ?", [(self._first_step,)])]
        if self._first_step == _UNKNOWN:
            found.append(("DELETE FROM samples", [()]))
        found.append((insert("steps"), steps.tolist()))
        for table, changed in self._changed.items():
            found.append((insert(table), [self.rows[table][key] for key in changed]))
        self._first_step, self._changed = self.end, {table: set() for table in self.rows}
        return found


def _size(row: Row) -> int:
    """Return the size of a row in memory, in bytes."""
    return sum(map(sys.getsizeof, (row, *row)))


def as_text(text: str) -> str:
    """Return a text that SQLite takes: half of a surrogate pair, as in file names, becomes `?`."""
    return text.encode("utf-8", "replace").decode()


def as_json(value: Any) -> str:
    """Return a value as JSON. NumPy numbers are converted to Python numbers, and objects that JSON
    does not support to their `str`.
    """

    def plain(odd: Any) -> Any:
        return odd.item() if isinstance(odd, np.generic) else str(odd)

    return as_text(json.dumps(value, ensure_ascii=False, default=plain))
