"""The tables of a recording in its file, `recording.sqlite`. See docs/recording.md."""

from __future__ import annotations

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

Row = tuple[Any, ...]
Statement = tuple[str, Sequence[Row]]
"""An SQL statement, and the parameters of each of its executions."""

Array = np.ndarray[Any, Any]

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
