"""Reading a recording from its file, which may be damaged or malicious.

Nothing in the file is executed. Reading is limited in size and time, and every value is checked
here, so code that shows or continues a recording needs no further checks.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_nanguard._core import plain_json
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.plain_text import plain_text
from keras_nanguard._recording.database import APPLICATION, NAME, SCHEMA, VERSION
from keras_nanguard._recording.records import BIN_COLUMNS, STEP_COLUMNS, BadSample, Event

__all__ = ["check_header", "check_ids", "contents", "is_made", "opened", "writer_of"]

MAX_ROWS, MAX_EVENTS = 20_000, 200_000
"""Maximum numbers of rows of steps and of bins, and of any other table."""

MAX_TEXT, MAX_ALL_TEXT = 4 << 20, 512 << 20
"""Maximum numbers of characters of one text and of all texts."""

MAX_SHARE = 4
"""Maximum number of characters per byte of the file: rows of a damaged one may share pages."""

MAX_WHOLE = 1 << 53
"""Largest step, epoch or row number; two of them can be added in 64 bits."""

SECONDS = 30.0
"""Maximum time of reading."""

_META: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("model", "backend", "policy", "status", "writer"), (str,)),
    **dict.fromkeys(("began", "written"), (int, float)),
    **dict.fromkeys(("format", "epochs", "steps_per_epoch", "base", "since"), (int, type(None))),
    "versions": (dict,),
    "budgets": (list,),
}
"""Types of the known entries of `meta`."""

_HEAD = 100
"""Bytes of the header of an SQLite file."""


@contextlib.contextmanager
def opened(file: Path) -> Iterator[sqlite3.Connection]:
    """Open a recording for reading: all tables as of one moment, also during a run.

    Raises:
        GuardError: if there is no such file, or it is not a recording, of a newer version or
            damaged. Errors within the block become one, too.
    """
    check_header(file)
    connection = None
    try:
        connection = _connected(file)
        end = time.monotonic() + SECONDS
        connection.set_progress_handler(lambda: int(time.monotonic() > end), 100_000)
        connection.execute("BEGIN")
        query = "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL LIMIT 100"
        if set(connection.execute(query)) != {("table", *table) for table in SCHEMA.items()}:
            raise ValueError("it has other tables")
        connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
        yield connection
    except GuardError:
        raise
    except _UNREADABLE as error:
        reason = f"{file}, which cannot be read: {plain_text(error)}"
        remedy = "Give the directory of a run."
        raise GuardError(expected("a recording of NanGuard", reason, remedy)) from error
    finally:
        if connection is not None:
            connection.close()


_UNREADABLE = (sqlite3.Error, ValueError, TypeError, OverflowError, RecursionError, MemoryError)


def _connected(file: Path) -> sqlite3.Connection:
    """Connect; without a lock if the folder cannot be written to and no run writes."""
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        uri = f"{file.resolve().as_uri()}?{mode}"
        connection = sqlite3.connect(uri, uri=True, timeout=10.0, isolation_level=None)
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            if hasattr(connection, "setlimit"):  # Python 3.11
                connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2 * MAX_TEXT)
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return connection
        except (sqlite3.Error, UnicodeDecodeError) as error:  # of a message that quotes the file
            connection.close()
            if not isinstance(error, sqlite3.OperationalError) or "immutable" in mode:
                raise
    raise AssertionError


def check_header(file: Path) -> None:
    """Check the first bytes of a recording.

    Raises:
        GuardError: if they are not those of a recording that this version reads.
    """
    remedy = f"Give the directory of a run (NanGuard(directory=...)), or its {NAME}."
    if file.exists() and not file.is_file():
        raise GuardError(expected(f"a recording at {file}", "no regular file", remedy))
    try:
        with file.open("rb") as stream:
            head = stream.read(_HEAD)
    except OSError as error:
        received = error.strerror or error
        raise GuardError(expected(f"a recording at {file}", received, remedy)) from error
    application, version = _identity(head)
    if not head.startswith(b"SQLite format 3\x00") or application != APPLICATION:
        received = f"{file}, which is another file"
        raise GuardError(expected("a recording of NanGuard", received, remedy))
    if version > VERSION:
        received = f"{file} of format {version}"
        remedy = "Read it with the version that wrote it."
        raise GuardError(expected(f"a recording of format {VERSION}", received, remedy))


def _identity(head: bytes) -> tuple[int, int]:
    """Return `application_id` and `user_version` of the header of a file."""
    return int.from_bytes(head[68:72], "big"), int.from_bytes(head[60:64], "big")


def is_made(file: Path) -> bool:
    """Return whether a recording has its tables, which a run creates in its first transaction."""
    try:
        with file.open("rb") as stream:
            head = stream.read(_HEAD)
    except OSError:
        return file.exists()  # reading it reports why
    return bool(head) and _identity(head) != (APPLICATION, 0)


def writer_of(file: Path) -> str:
    """Return what identifies the run that last opened a file for writing, or `""`.

    Raises:
        GuardError: if the file is not a recording, or cannot be read.
    """
    with opened(file) as connection:
        found = connection.execute("SELECT value FROM meta WHERE key = 'writer'").fetchone()
        return str(json.loads(found[0])) if found is not None else ""


def contents(connection: sqlite3.Connection, file: Path | None = None) -> dict[str, Any]:
    """Return the parts of a recording: `meta`, `steps`, `bins`, `events`, `layers`, `samples`.

    Args:
        connection: the database, in memory or of a file.
        file: the file.

    Raises:
        sqlite3.Error, ValueError, TypeError, OverflowError: if it holds anything else.
    """
    most = MAX_ALL_TEXT if file is None else min(MAX_ALL_TEXT, MAX_SHARE * _size(file))
    texts = _Texts(connection, most)
    meta = texts.rows("meta", "key", "key, value")
    events = texts.rows("events", "id", "step, epoch, time, kind, text, data")
    layers = texts.rows("layers", "id", "step, path, kind, a, b, c")
    samples = texts.rows("samples", "rowid", "label, place, fingerprint, times, steps, why")
    return {
        "meta": _meta({str(key): plain_json.loads(value) for key, value in meta}),
        "steps": _numbers(connection, "steps", STEP_COLUMNS),
        "bins": _bins(_numbers(connection, "bins", BIN_COLUMNS)),
        "events": tuple(_event(*row) for row in events),
        "layers": [
            (_whole(step), str(path), str(kind), *map(_number, numbers))
            for step, path, kind, *numbers in layers
        ],
        "samples": tuple(_sample(*row) for row in samples),
    }


def _size(file: Path) -> int:
    """Return the size of a file, with the log beside it during a run, in bytes."""
    parts = (file, file.with_name(f"{file.name}-wal"))
    return sum(part.stat().st_size for part in parts if part.exists())


class _Texts:
    """Reads tables with texts, up to the limits."""

    def __init__(self, connection: sqlite3.Connection, max_text: float):
        self._connection, self._left = connection, max_text

    def rows(self, table: str, order: str, names: str) -> list[tuple[Any, ...]]:
        """Return the last rows of a table in order, without those whose text is too long."""
        lengths = (f"coalesce(length({name}), 0) <= {MAX_TEXT}" for name in names.split(", "))
        where = f"WHERE {' AND '.join(lengths)} ORDER BY {order} DESC LIMIT {MAX_EVENTS}"
        query = f"SELECT {names} FROM {table} {where}"
        found = []
        for row in self._connection.execute(query):
            self._left -= sum(len(value) for value in row if isinstance(value, (str, bytes)))
            if self._left < 0:
                break
            found.append(row)
        return found[::-1]


def _numbers(
    connection: sqlite3.Connection, table: str, columns: Mapping[str, type]
) -> dict[str, Any]:
    """Return the last rows of a table of numbers, as columns."""
    query = f"SELECT {', '.join(columns)} FROM {table} ORDER BY id DESC LIMIT {MAX_ROWS}"
    rows = connection.execute(query).fetchall()[::-1]
    values = zip(*rows) if rows else [()] * len(columns)
    return {name: _column(column, dtype) for (name, dtype), column in zip(columns.items(), values)}


def _column(values: Sequence[Any], dtype: type) -> Any:
    if np.dtype(dtype).kind == "f":
        return np.array(values, dtype)  # of NULL it makes NaN
    found = np.array(values, np.int64)
    if (found > MAX_WHOLE).any() or (found < -MAX_WHOLE).any():
        raise ValueError(_BEYOND)
    return found.astype(dtype)


def _number(value: Any) -> float:
    return np.nan if value is None else float(value)


_BEYOND = "a step number is out of range"


def _whole(value: Any) -> int:
    found = int(value)
    if not -MAX_WHOLE <= found <= MAX_WHOLE:
        raise ValueError(_BEYOND)
    return found


def check_ids(rows: Mapping[str, Sequence[tuple[Any, ...]]]) -> None:
    """Check the `id` of each row of tables that a run is going to continue.

    Raises:
        ValueError: if an `id` is too large, or steps are missing.
    """
    tables = ("steps", "bins", "events", "layers")
    ids = {table: [row[0] for row in rows[table]] for table in tables}
    for numbers in ids.values():
        for number in numbers[:1] + numbers[-1:]:
            _whole(number)
    if ids["steps"] and ids["steps"][-1] - ids["steps"][0] != len(ids["steps"]) - 1:
        raise ValueError("it lacks steps")


def _meta(found: dict[str, Any]) -> dict[str, Any]:
    for key, kinds in _META.items():
        value = found.get(key)
        if key in found and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise ValueError(f"its {key} is a {type(value).__name__}")
        if isinstance(value, (int, float)) and not abs(value) <= MAX_WHOLE:
            raise ValueError(f"its {key} is {value}")
    found.pop("writer", None)
    return found


def _bins(found: dict[str, Any]) -> dict[str, Any]:
    for name in ("count", "refused", "overflows", "undone"):  # they are added up
        if (found[name] < 0).any() or (found[name] > MAX_WHOLE >> 20).any():
            raise ValueError(f"the table bins has an invalid {name}")
    return found


def _event(step: Any, epoch: Any, moment: Any, kind: Any, text: Any, data: Any) -> Event:
    details = plain_json.loads(data)
    if not isinstance(details, dict):
        raise ValueError("the data of an event is not an object")
    return Event(_whole(step), _whole(epoch), float(moment), str(kind), str(text), details)


def _sample(label: Any, place: Any, mark: Any, times: Any, steps: Any, reason: Any) -> BadSample:
    place = None if place is None else _whole(place)
    listed = tuple(_whole(step) for step in plain_json.loads(steps))
    return BadSample(str(label), place, str(mark), _whole(times), listed, str(reason))
