"""The recording in memory: an SQLite database of limited size.

Every statement that changes it is kept until a writer executes it on the file once more.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_nanguard._recording import database
from keras_nanguard._recording.database import Row, Statement, insert, transaction

__all__ = ["MAX_EVENT_TEXT", "Memory"]

MAX_UNWRITTEN = 50_000
"""Maximum number of rows that wait for a slow disk. If there are more, the file is rewritten."""

MAX_EVENT_TEXT = 6 << 20
"""Maximum number of characters of all events. The file keeps older events."""

MAX_LAYER_ROWS = 40_000
"""Maximum number of rows of `layers`."""

_MINOR = """kind IN ('epoch', 'snapshot') OR data LIKE '%"by": "callback"%'"""
"""Events of which there are many, and which say little."""


class Memory:
    """The tables of one recording, with these rows at first.

    Attributes:
        connection: the database.
        end: the `id` of the next step.
    """

    def __init__(self, rows: Mapping[str, Sequence[Row]] | None = None):
        self.connection: sqlite3.Connection = database.in_memory()
        self._unwritten: list[Statement] | None = None
        self._waiting = 0
        rows = rows or {}
        with transaction(self.connection):
            for table, of_table in rows.items():
                self.connection.executemany(insert(table), of_table)
        ids: list[int] = [row[0] for row in rows.get("steps", ())]
        self._first: int = ids[0] if ids else 0
        self.end: int = ids[-1] + 1 if ids else 0
        self._event_text = self._size_of_events()

    def run(self, statement: str, rows: Sequence[Row]) -> None:
        """Change the recording here, and later in the file."""
        self.connection.executemany(statement, rows)
        if self._unwritten is not None:
            self._unwritten.append((statement, rows))
            self._waiting += len(rows)
            if self._waiting > MAX_UNWRITTEN:
                self._unwritten = None

    def one(self, query: str, parameters: Row = ()) -> Any:
        """Return the first value that a query finds, or `None`."""
        found = self.connection.execute(query, parameters).fetchone()
        return None if found is None else found[0]

    def copied(self) -> dict[str, list[Row]]:
        """Return the rows of each table."""
        return database.copied(self.connection, MAX_EVENT_TEXT)

    def unwritten(self) -> list[Statement]:
        """Return the statements that the file lacks; they then count as written.

        If these are not known, they rewrite everything except older events.
        """
        found = self._unwritten
        if found is None:
            found = [(f"DELETE FROM {table}", [()]) for table in ("steps", "bins", "layers")]
            found += [(insert(table), rows) for table, rows in self.copied().items()]
        self.write_from_here()
        return found

    def write_from_here(self) -> None:
        """Note that the file has everything so far."""
        self._unwritten, self._waiting = [], 0

    def write_anew(self) -> None:
        """Note that the file may be empty, so that everything is written again."""
        self._unwritten = None

    def add_steps(self, rows: Sequence[Row]) -> None:
        """Append steps, each with the values of `STEP_COLUMNS`; move the oldest ones into bins."""
        with transaction(self.connection):
            self.run(insert("steps"), [(self.end + place, *row) for place, row in enumerate(rows)])
            self.end += len(rows)
            while self.end - self._first > database.EXACT + database.MOVED:
                self._first += database.MOVED
                self.run(database.ADD_BINS, [(self._first,)])
                self.run(database.DELETE_STEPS, [(self._first,)])
                if self.one("SELECT count(*) FROM bins") >= database.BINS:
                    last = self.one("SELECT max(id) FROM bins")
                    self.run(database.MERGE_BINS, [()])
                    self.run(database.DELETE_BINS, [(last,)])

    def add_event(self, row: Row) -> None:
        """Append an event; beyond the limit the oldest ones go, minor ones first."""
        self.run(insert("events"), [row])
        self._event_text += len(row[5]) + len(row[6])
        if self._event_text > MAX_EVENT_TEXT:
            half = "(SELECT count(*) / 2 FROM events)"
            middle = self.one(f"SELECT id FROM events ORDER BY id LIMIT 1 OFFSET {half}")
            for kinds in (_MINOR, "1"):
                delete = f"DELETE FROM events WHERE id < ? AND ({kinds})"
                self.connection.execute(delete, (middle,))
                self._event_text = self._size_of_events()
                if self._event_text <= MAX_EVENT_TEXT * 3 // 4:
                    return

    def _size_of_events(self) -> int:
        return self.one("SELECT sum(length(text) + length(data)) FROM events") or 0

    def add_layers(self, rows: Sequence[Row]) -> None:
        """Append one moment. Above the limit half of them are removed, but none of the last
        quarter."""
        self.run(insert("layers"), rows)
        if self.one("SELECT count(*) FROM layers") <= MAX_LAYER_ROWS:
            return
        query = "SELECT DISTINCT step FROM layers ORDER BY step"
        steps = np.array([step for (step,) in self.connection.execute(query)])
        older = steps[: max(len(steps) * 3 // 4, 1)]
        even = np.linspace(older[0], older[-1], max(len(older) // 2, 1))
        kept = older[np.searchsorted(older, even)] if len(older) > 3 else older[:0]
        dropped = np.setdiff1d(older, kept).tolist()
        self.run("DELETE FROM layers WHERE step = ?", [(step,) for step in dropped])
