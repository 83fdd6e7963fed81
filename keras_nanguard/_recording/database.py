"""The tables of a recording, and the statements that change them.

A run keeps its recording in an SQLite database in memory. `recording.sqlite` has the same tables:
the statements that have changed the memory are executed there again. See docs/recording.md.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

NAME = "recording.sqlite"
"""Name of the file within the guard's directory."""

APPLICATION = 0x6E616E67
"""`PRAGMA application_id` of the file: `nang`."""

FORMAT = 2
"""Version of tables and values: `PRAGMA user_version` of the file, which readers check before they
open it, and `Recording.meta["format"]`. It increases if a reader would misread the new ones."""

COMMITTED, REFUSED, OVERFLOW = range(3)
"""The result of a step, as in the column `status`. `OVERFLOW` is a refused step that dynamic loss
scaling handles."""

MEASURED = ("loss", "gradient_norm", "learning_rate", "loss_scale")
"""Measurements of a step; NaN if unknown."""

STEP_COLUMNS: dict[str, type] = {
    "step": np.int64,
    "epoch": np.int64,
    "batch": np.int64,
    **dict.fromkeys(MEASURED, np.float64),
    "time": np.float64,
    "status": np.int8,
    "undone": np.bool_,
}
"""The columns of `Recording.steps`. Steps, epochs and batches count from 0; `time` is in seconds
since 1970."""

MAX_STEPS = 32_768
"""Maximum number of steps. The newest quarter of them is complete."""

MAX_ROWS = 200_000
"""Maximum number of rows of a table that are read."""

MAX_TEXT, MAX_ALL_TEXT = 4 << 20, 512 << 20
"""Maximum numbers of characters of one text and of all texts of a table that are read."""

Row = tuple[Any, ...]
Statement = tuple[str, Sequence[Row]]
"""An SQL statement, and the parameters of each of its executions."""

_ID = "id INTEGER PRIMARY KEY"

_STEP = (f"{n} {'REAL' if t is np.float64 else 'INTEGER'}" for n, t in STEP_COLUMNS.items())

COLUMNS: Mapping[str, str] = {
    "meta": "key TEXT PRIMARY KEY, value TEXT",
    "steps": ", ".join((_ID, *_STEP)),
    "events": f"{_ID}, step INTEGER, epoch INTEGER, time REAL, kind TEXT, text TEXT, data TEXT",
    "samples": f"{_ID}, fingerprint TEXT, label TEXT, place INTEGER, times INTEGER, steps TEXT,"
    " why TEXT",
}
"""The columns of each table, and their types. NaN is stored as NULL; `meta.value`, `events.data`
and `samples.steps` hold JSON. `samples.place` is `BadSample.index`, and `samples.why` its `reason`.
"""

SCHEMA = {table: f"CREATE TABLE {table} ({columns})" for table, columns in COLUMNS.items()}
"""The statement that makes each table."""

ONLY_FORMAT_1 = (
    "layers",
    "CREATE TABLE layers"
    " (id INTEGER PRIMARY KEY, step INTEGER, path TEXT, kind TEXT, a REAL, b REAL)",
)
"""A table of format 1 that later formats do not have, and its statement."""


def make(connection: sqlite3.Connection) -> None:
    """Create the tables."""
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    for statement in SCHEMA.values():
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {FORMAT}")


def upgrade(connection: sqlite3.Connection) -> None:
    """Convert the tables of an older format."""
    connection.execute(f"DROP TABLE IF EXISTS {ONLY_FORMAT_1[0]}")
    connection.execute(f"PRAGMA user_version = {FORMAT}")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Make all statements of a block one transaction, which an exception undoes."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")  # which may find the file locked, too
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def insert(table: str) -> str:
    """Return the statement that inserts or replaces one row of a table."""
    places = ", ".join("?" * len(COLUMNS[table].split(",")))
    return f"INSERT OR REPLACE INTO {table} VALUES ({places})"


def rows_of(connection: sqlite3.Connection, max_text: int = MAX_ALL_TEXT) -> dict[str, list[Row]]:
    """Return the last rows of each table in order, without those with a text that is too long.

    Args:
        max_text: maximum number of characters of all texts of a table; the newest rows are kept.
    """
    found: dict[str, list[Row]] = {}
    for table in SCHEMA:
        left, rows = max_text, found.setdefault(table, [])
        query = f"SELECT * FROM {table} ORDER BY rowid DESC LIMIT {MAX_ROWS}"
        for row in connection.execute(query):
            lengths = [len(value) for value in row if isinstance(value, (str, bytes))]
            left -= sum(lengths)
            if left < 0:
                break
            if max(lengths, default=0) <= MAX_TEXT:
                rows.append(row)
        rows.reverse()
    return found


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


# Statements that change steps. They have the same effect in memory and in the file.

FILL_RATE = "UPDATE steps SET learning_rate = ? WHERE id >= ? AND id < ?"

UNDO_STEPS = f"UPDATE steps SET undone = 1 WHERE step >= ? AND status = {COMMITTED} AND NOT undone"
"""Marks the committed steps from this number on as undone."""

REFUSED_STEPS = (
    "SELECT id, step, status FROM steps "
    f"WHERE step >= ? AND status IN ({REFUSED}, {OVERFLOW}) AND NOT undone"
)
"""The refused steps from this number on that are not undone."""

UNDO = "UPDATE steps SET undone = 1 WHERE id = ?"


_OLDER = "SELECT id, row_number() OVER (ORDER BY id) AS place FROM steps WHERE id < ?"

THIN_GOOD, THIN_ALL = (
    f"DELETE FROM steps WHERE id IN (SELECT id FROM ({_OLDER} {which}) WHERE place % 2 = 0)"
    for which in (f"AND status = {COMMITTED}", "")
)
"""Remove every second committed step, or every second step, before an `id`."""

MAX_UNWRITTEN = 50_000
"""Maximum number of rows that wait for a slow disk. If there are more, the file is rewritten."""

MAX_EVENT_TEXT = 6 << 20
"""Maximum number of characters of all events; above it, only the newest half of it is kept. The
file keeps older events."""

_EVENT_TEXT = "sum(length(text) + length(data))"

_DROP_OLD_EVENTS = (
    f"DELETE FROM events WHERE id IN (SELECT id FROM (SELECT id, {_EVENT_TEXT} OVER "
    "(ORDER BY id DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS newer FROM events) "
    f"WHERE newer > {MAX_EVENT_TEXT // 2})"
)


_NUMBERED = ("steps", "samples")
"""Tables whose rows are numbered from 0 in order of time."""


class Memory:
    """The tables of one recording, with these rows at first.

    Attributes:
        end: the `id` of the next step.
    """

    def __init__(self, rows: Mapping[str, Sequence[Row]] | None = None):
        options: dict[str, Any] = {"isolation_level": None, "check_same_thread": False}
        self.connection = sqlite3.connect(":memory:", **options)
        make(self.connection)
        self._unwritten: list[Statement] | None = None  # `None`: it is unknown what the file lacks
        self._waiting = 0  # their number of rows
        with transaction(self.connection):
            for table, of_table in (rows or {}).items():
                if table in _NUMBERED:  # the ids in a file can be anything
                    of_table = [(place, *row[1:]) for place, row in enumerate(of_table)]
                self.connection.executemany(insert(table), of_table)
        self.end: int = self.one("SELECT count(*) FROM steps")
        self._event_text = self._size_of_events()
        self._limit_events()

    def run(self, statement: str, rows: Sequence[Row]) -> None:
        """Change the recording here, and later in the file."""
        self.connection.executemany(statement, rows)
        if self._unwritten is None:
            return
        self._unwritten.append((statement, rows))
        self._waiting += len(rows)
        if self._waiting > MAX_UNWRITTEN:
            self.rewrite()

    def one(self, query: str, parameters: Row = ()) -> Any:
        """Return the first value that a query finds, or `None`."""
        found = self.connection.execute(query, parameters).fetchone()
        return None if found is None else found[0]

    def rewrite(self) -> None:
        """Note that it is unknown what the file lacks."""
        self._unwritten, self._waiting = None, 0

    def unwritten(self) -> list[Statement]:
        """Return the statements that the file lacks; they then count as written.

        If it is unknown what the file lacks, they rewrite everything except older events.
        """
        found = self._unwritten
        if found is None:
            found = [(f"DELETE FROM {table}", [()]) for table in _NUMBERED]
            found += [(insert(table), rows) for table, rows in rows_of(self.connection).items()]
        self._unwritten, self._waiting = [], 0
        return found

    def add_steps(self, rows: Sequence[Row]) -> None:
        """Append steps, each with the values of `STEP_COLUMNS`. Above the limit every second good
        step is removed, except in the newest quarter; every second step if most are bad."""
        size = "SELECT count(*) FROM steps"
        with transaction(self.connection):
            self.run(insert("steps"), [(self.end + place, *row) for place, row in enumerate(rows)])
            self.end += len(rows)
            while self.one(size) > MAX_STEPS:
                older = [(self.end - MAX_STEPS // 4,)]
                self.run(THIN_GOOD, older)
                if self.one(size) > MAX_STEPS * 3 // 4:
                    self.run(THIN_ALL, older)

    def add_event(self, row: Row) -> None:
        """Append an event, of which SQLite chooses the `id`."""
        self.run(insert("events"), [(None, *row)])
        self._event_text += len(row[4]) + len(row[5])
        self._limit_events()

    def _limit_events(self) -> None:
        if self._event_text > MAX_EVENT_TEXT:
            self.connection.execute(_DROP_OLD_EVENTS)
            self._event_text = self._size_of_events()

    def _size_of_events(self) -> int:
        return int(self.one(f"SELECT coalesce({_EVENT_TEXT}, 0) FROM events"))
