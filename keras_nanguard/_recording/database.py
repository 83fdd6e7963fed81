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

VERSION = 1
"""`PRAGMA user_version` of the file: version of its tables, which readers check before they open
it. It increases if a reader of the old tables would misread the new ones."""

APPLICATION = 0x6E616E67
"""`PRAGMA application_id` of the file: `nang`."""

FORMAT = 1
"""`Recording.meta["format"]`: version of the values, such as the numbers of `status`, which also a
recording in memory has. It increases if a reader of the old values would misread the new ones."""

COMMITTED, REFUSED, OVERFLOW, SKIPPED = range(4)
"""The result of a step, as in the column `status`. `OVERFLOW` is a refused step that dynamic loss
scaling handles. A `SKIPPED` batch was not trained on."""

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

BIN_COLUMNS: dict[str, type] = {
    "first": np.int64,
    "last": np.int64,
    "count": np.int64,
    "refused": np.int64,
    "overflows": np.int64,
    "undone": np.int64,
    **{f"{name}_{end}": np.float64 for name in MEASURED for end in ("min", "max")},
    "loss_mean": np.float64,
    "time": np.float64,
}
"""The columns of `Recording.bins`. A row summarizes `count` consecutive steps, from `first` to
`last`."""

EXACT, MOVED = 8192, 2048
"""The last `EXACT` steps are kept one by one; older ones move into bins, `MOVED` at a time."""

BINS, WIDTH = 4096, 256
"""Maximum number of bins, beyond which neighbours are merged; and steps of a bin at first."""

MAX_ROWS = 200_000
"""Maximum number of rows of a table that are read."""

MAX_TEXT, MAX_ALL_TEXT = 4 << 20, 512 << 20
"""Maximum numbers of characters of one text and of all texts of a table that are read."""

Row = tuple[Any, ...]
Statement = tuple[str, Sequence[Row]]
"""An SQL statement, and the parameters of each of its executions."""


def _columns(columns: Mapping[str, type]) -> str:
    floats = {name for name, dtype in columns.items() if np.dtype(dtype).kind == "f"}
    return ", ".join(f"{name} {'REAL' if name in floats else 'INTEGER'}" for name in columns)


SCHEMA = {
    "meta": "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT)",
    "steps": f"CREATE TABLE steps (id INTEGER PRIMARY KEY, {_columns(STEP_COLUMNS)})",
    "bins": f"CREATE TABLE bins (id INTEGER PRIMARY KEY, {_columns(BIN_COLUMNS)})",
    "events": "CREATE TABLE events (id INTEGER PRIMARY KEY, step INTEGER, epoch INTEGER, "
    "time REAL, kind TEXT, text TEXT, data TEXT)",
    "layers": "CREATE TABLE layers (id INTEGER PRIMARY KEY, step INTEGER, path TEXT, kind TEXT, "
    "a REAL, b REAL)",
    "samples": "CREATE TABLE samples (fingerprint TEXT, label TEXT, place INTEGER, times INTEGER, "
    "steps TEXT, why TEXT, PRIMARY KEY (fingerprint, label))",
}
"""The statement that makes each table. NaN is stored as NULL; `meta.value`, `events.data` and
`samples.steps` hold JSON. `samples.place` is `BadSample.index`, and `samples.why` its `reason`."""


def make(connection: sqlite3.Connection) -> None:
    """Create the tables."""
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    for statement in SCHEMA.values():
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {VERSION}")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Make all statements of a block one transaction, which an exception undoes."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def insert(table: str) -> str:
    """Return the statement that inserts or replaces one row of a table."""
    width = 1 + SCHEMA[table].partition(", PRIMARY KEY")[0].count(",")
    return f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * width)})"


UPSERT_SAMPLE = (
    "INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (fingerprint, label) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in ("place", "times", "steps", "why"))
)
"""Inserts a bad sample, or updates it in its place."""


def rows_of(connection: sqlite3.Connection, max_text: int = MAX_ALL_TEXT) -> dict[str, list[Row]]:
    """Return the last rows of each table in order, without those with a text that is too long.

    Args:
        connection: the database.
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


# Statements that summarize steps. They give the same result in memory and in the file.


def finite(column: str) -> str:
    """Return the SQL expression of a column without infinite values."""
    return f"CASE WHEN abs({column}) <= 1.7976931348623157e308 THEN {column} END"


_BIN_NAMES = ", ".join(BIN_COLUMNS)

_STEPS_TO_BIN = ", ".join(
    [
        f"min(step), max(step), sum(status != {SKIPPED})",
        f"sum(status = {REFUSED}), sum(status = {OVERFLOW}), sum(undone)",
        *(f"{pick}({finite(name)})" for name in MEASURED for pick in ("min", "max")),
        f"avg({finite('loss')}), max(time)",
    ]
)

_BINS_TO_BIN = ", ".join(
    [
        "min(first), max(last), sum(count), sum(refused), sum(overflows), sum(undone)",
        *(f"{pick}({name}_{pick})" for name in MEASURED for pick in ("min", "max")),
        "sum(loss_mean * count) / sum(CASE WHEN loss_mean IS NOT NULL THEN count END), max(time)",
    ]
)

ADD_BINS = (
    f"INSERT INTO bins ({_BIN_NAMES}) SELECT {_STEPS_TO_BIN} FROM steps WHERE id < ?1 "
    f"GROUP BY id / max({WIDTH}, coalesce((SELECT max(count) FROM bins), 0)) ORDER BY min(id)"
)
"""Summarizes all steps before an `id` in bins as wide as those that exist."""

DELETE_STEPS = "DELETE FROM steps WHERE id < ?"

MERGE_BINS = (
    f"INSERT INTO bins ({_BIN_NAMES}) SELECT {_BINS_TO_BIN} FROM bins "
    "GROUP BY (id - (SELECT min(id) FROM bins)) / 2 ORDER BY min(id)"
)
"""Adds one bin for each two neighbours; `DELETE_BINS` then removes these."""

DELETE_BINS = "DELETE FROM bins WHERE id <= ?"

FILL_RATE = "UPDATE steps SET learning_rate = ? WHERE id >= ? AND id < ?"

UNDO_STEPS = f"UPDATE steps SET undone = 1 WHERE step >= ? AND status = {COMMITTED} AND NOT undone"
"""Marks the committed steps from this number on as undone."""

UNDO_REFUSED = (
    "UPDATE steps SET undone = 1 "
    f"WHERE step = ? AND status IN ({REFUSED}, {OVERFLOW}) AND NOT undone"
)
"""Marks the refused steps of this number as undone."""

UNDO_BINS = (
    "UPDATE bins SET undone = max(undone, min(last - ?1 + 1, count - refused - overflows)) "
    "WHERE last >= ?1"
)
"""Counts the committed steps from this number on as undone."""


MAX_UNWRITTEN = 50_000
"""Maximum number of rows that wait for a slow disk. If there are more, the file is rewritten."""

MAX_EVENT_TEXT = 6 << 20
"""Maximum number of characters of all events. The file keeps older events."""

MAX_LAYER_ROWS = 40_000
"""Maximum number of rows of `layers`."""

_MINOR = """kind IN ('epoch', 'snapshot') OR data LIKE '%"by": "callback"%'"""
"""Frequent events with little information."""

_EVENT_TEXT = "sum(length(text) + length(data))"

_OLD = (
    f"id IN (SELECT id FROM (SELECT id, {_EVENT_TEXT} OVER "
    "(ORDER BY id DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS newer FROM events) "
    f"WHERE newer > {MAX_EVENT_TEXT // 2})"
)
"""Events whose newer ones take half of the limit."""


class Memory:
    """The tables of one recording, with these rows at first.

    Attributes:
        connection: the database.
        end: the `id` of the next step.
    """

    def __init__(self, rows: Mapping[str, Sequence[Row]] | None = None):
        options: dict[str, Any] = {"isolation_level": None, "check_same_thread": False}
        self.connection = sqlite3.connect(":memory:", **options)
        make(self.connection)
        self._unwritten: list[Statement] | None = None
        self._waiting = self._first = 0
        with transaction(self.connection):
            for table, of_table in (rows or {}).items():
                if table in ("steps", "bins", "layers"):  # the ids in a file can be anything
                    of_table = [(place, *row[1:]) for place, row in enumerate(of_table)]
                self.connection.executemany(insert(table), of_table)
        self.end: int = self.one("SELECT count(*) FROM steps")
        self._event_text = self._size_of_events()
        self._limit_events()

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

    def unwritten(self) -> list[Statement]:
        """Return the statements that the file lacks; they then count as written.

        If it is unknown what the file lacks, they rewrite everything except older events.
        """
        found = self._unwritten
        if found is None:
            found = [(f"DELETE FROM {table}", [()]) for table in ("steps", "bins", "layers")]
            found += [(insert(table), rows) for table, rows in rows_of(self.connection).items()]
        self._unwritten, self._waiting = [], 0
        return found

    def rewrite(self) -> None:
        """Note that the file may have nothing of the recording."""
        self._unwritten = None

    def add_steps(self, rows: Sequence[Row]) -> None:
        """Append steps, each with the values of `STEP_COLUMNS`; move the oldest ones into bins."""
        with transaction(self.connection):
            self.run(insert("steps"), [(self.end + place, *row) for place, row in enumerate(rows)])
            self.end += len(rows)
            while self.end - self._first > EXACT + MOVED:
                self._first += MOVED
                self.run(ADD_BINS, [(self._first,)])
                self.run(DELETE_STEPS, [(self._first,)])
                if self.one("SELECT count(*) FROM bins") >= BINS:
                    last = self.one("SELECT max(id) FROM bins")
                    self.run(MERGE_BINS, [()])
                    self.run(DELETE_BINS, [(last,)])

    def add_event(self, row: Row) -> None:
        """Append an event, of which SQLite chooses the `id`."""
        self.run(insert("events"), [(None, *row)])
        self._event_text += len(row[4]) + len(row[5])
        self._limit_events()

    def _limit_events(self) -> None:
        """Remove old events above the limit, minor ones first."""
        for kinds, limit in ((_MINOR, MAX_EVENT_TEXT), ("1", MAX_EVENT_TEXT * 3 // 4)):
            if self._event_text <= limit:
                return
            self.connection.execute(f"DELETE FROM events WHERE ({kinds}) AND {_OLD}")
            self._event_text = self._size_of_events()

    def _size_of_events(self) -> int:
        return int(self.one(f"SELECT coalesce({_EVENT_TEXT}, 0) FROM events"))

    def add_layers(self, rows: Sequence[Row]) -> None:
        """Append one moment. Above the limit every second one is removed, except in the last
        quarter."""
        self.run(insert("layers"), rows)
        if self.one("SELECT count(*) FROM layers") <= MAX_LAYER_ROWS:
            return
        query = "SELECT DISTINCT step FROM layers ORDER BY step"
        steps = [step for (step,) in self.connection.execute(query)]
        dropped = steps[: len(steps) * 3 // 4][1::2] if len(steps) > 4 else steps[:-1]
        self.run("DELETE FROM layers WHERE step = ?", [(step,) for step in dropped])
