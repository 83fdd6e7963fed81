"""`recording.sqlite`: a recording in one SQLite file, which can be read while the run writes it.

docs/recording.md describes its tables. The file is in WAL mode and every write is one transaction,
so it is always intact. Nothing in it is executed, and reading is limited in size and time.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from keras_nanguard._core import plain_json
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.plain_text import plain_text
from keras_nanguard._recording import beside, checked
from keras_nanguard._recording.records import BIN_COLUMNS, STEP_COLUMNS, BadSample, Event

__all__ = ["NAME", "VERSION", "Changes", "Database", "path_of", "read", "writer_of"]

NAME = "recording.sqlite"
"""Name of the file within the guard's directory."""

VERSION = 1
"""`PRAGMA user_version` of the file; incremented whenever a reader of the old tables would misread the new ones."""

APPLICATION = 0x6E616E67
"""`PRAGMA application_id` of the file: `nang`."""

MAX_ROWS, MAX_EVENTS, MAX_TEXT, MAX_ALL_TEXT = 20_000, 200_000, 4 << 20, 512 << 20
"""Limits: rows of steps and bins, rows of other tables, characters of a text and of all texts."""

MAX_SHARE = 4
"""Maximum characters of all texts per byte of the file. In a damaged file rows may share pages."""

SECONDS = 30.0
"""Time limit for reading."""

BLOCK = 256
"""Number of rows that are converted to Python numbers at a time."""

LOCKED = 10.0
"""Seconds that one attempt to write waits for a lock."""


def _columns(columns: Mapping[str, type]) -> str:
    return ", ".join(f"{name} {'REAL' if np.dtype(dtype).kind == 'f' else 'INTEGER'}" for name, dtype in columns.items())


SCHEMA = {
    "meta": "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT)",
    "steps": f"CREATE TABLE steps (id INTEGER PRIMARY KEY, {_columns(STEP_COLUMNS)})",
    "bins": f"CREATE TABLE bins (id INTEGER PRIMARY KEY, {_columns(BIN_COLUMNS)})",
    "events": "CREATE TABLE events (id INTEGER PRIMARY KEY, step INTEGER, epoch INTEGER, time REAL, kind TEXT, text TEXT, data TEXT)",
    "layers": "CREATE TABLE layers (id INTEGER PRIMARY KEY, step INTEGER, path TEXT, kind TEXT, a REAL, b REAL, c REAL)",
    "samples": "CREATE TABLE samples (fingerprint TEXT, label TEXT, place INTEGER, times INTEGER, steps TEXT, why TEXT, "
    "PRIMARY KEY (fingerprint, label))",
}
"""The statement for each table. NaN is NULL; `meta.value`, `data` and `samples.steps` are JSON."""


@dataclass(frozen=True)
class Changes:
    """The content of one transaction.

    Attributes:
        meta: entries of `meta`.
        steps: columns of the steps from the `id` `start` on; those before `first` are deleted.
        bins: columns of all bins from the `id` `first_bin` on; `None` for no change.
        events, layers: `(id, event)`, and rows of the table `layers` without `id`.
        layers_anew: whether they replace all existing rows.
        samples: bad samples that are new or have changed.
    """

    meta: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[str, Any] = field(default_factory=dict)
    start: int = 0
    first: int = 0
    bins: Mapping[str, Any] | None = None
    first_bin: int = 0
    events: tuple[tuple[int, Event], ...] = ()
    layers: tuple[tuple[Any, ...], ...] = ()
    layers_anew: bool = False
    samples: tuple[BadSample, ...] = ()


def path_of(path: str | os.PathLike[str]) -> Path:
    """Return the path of the file, given the file or its directory."""
    found = Path(path)
    return found / NAME if found.is_dir() else found


class Database:
    """The file, as its run writes it. Use it in one thread at a time.

    Args:
        path: the file.
        writer: identifies this run. The file belongs to the run that opened it last.
        changes: the first changes. Readers see all of them, or the file as it was.

    Raises:
        GuardError: if the file is not a recording or a link, or its journal names another file.
        sqlite3.Error, OSError: if it cannot be written.
    """

    def __init__(self, path: Path, writer: str, changes: Changes | None = None):
        self.path, self._writer = path, writer
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not path.exists() or (path.is_file() and not path.stat().st_size)
        beside.check(path)
        if not fresh:
            _check_header(path)
        self._connection = sqlite3.connect(path, timeout=LOCKED, isolation_level=None, check_same_thread=False)
        try:
            self._begin(fresh, changes or Changes())
        except BaseException:
            self._connection.close()
            raise

    def _begin(self, fresh: bool, changes: Changes) -> None:
        """Create the tables of a new file, take over the file, and write the first changes."""
        if not fresh:
            self._connection.execute("PRAGMA journal_mode = WAL").fetchone()
        self._connection.executescript("PRAGMA synchronous = NORMAL; PRAGMA cache_size = -512")  # KiB
        with self._transaction() as run:
            if fresh:
                _make(run)
            run("INSERT OR REPLACE INTO meta VALUES ('writer', ?)", (json.dumps(self._writer),))
            self._put(changes)
        self._connection.execute("PRAGMA journal_mode = WAL").fetchone()

    @contextmanager
    def _transaction(self) -> Iterator[Any]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection.execute
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def write(self, changes: Changes) -> bool:
        """Write one transaction; return `False` if another run has taken over the file."""
        with self._transaction() as run:
            owner = run("SELECT value FROM meta WHERE key = 'writer'").fetchone()
            if owner is None or owner[0] != json.dumps(self._writer):
                return False
            self._put(changes)
        return True

    def _put(self, changes: Changes) -> None:
        """Write within a transaction."""
        run, many = self._connection.execute, self._connection.executemany
        many("INSERT OR REPLACE INTO meta VALUES (?, ?)", [(key, _json(value)) for key, value in changes.meta.items()])
        run("DELETE FROM steps WHERE id < ?", (changes.first,))
        many(_insert("steps", STEP_COLUMNS), _rows(changes.steps, changes.start))
        if changes.bins is not None:
            run("DELETE FROM bins WHERE id >= ?", (changes.first_bin,))
            many(_insert("bins", BIN_COLUMNS), _rows(changes.bins, changes.first_bin))
        many("INSERT OR REPLACE INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", map(_event_row, changes.events))
        if changes.layers_anew:
            run("DELETE FROM layers")
        many("INSERT INTO layers (step, path, kind, a, b, c) VALUES (?, ?, ?, ?, ?, ?)", map(_layer_row, changes.layers))
        many("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?)", map(_sample_row, changes.samples))

    def close(self) -> None:
        """Close the file. If nobody is reading it, merge and remove the log next to it."""
        try:
            self._connection.execute("PRAGMA busy_timeout = 0")
            self._connection.execute("PRAGMA journal_mode = DELETE").fetchone()
        except sqlite3.Error:
            pass  # somebody reads: the log stays beside the file, and is part of it
        self._connection.close()


def _make(run: Any) -> None:
    run(f"PRAGMA application_id = {APPLICATION}")
    for statement in SCHEMA.values():
        run(statement)
    run(f"PRAGMA user_version = {VERSION}")


def _insert(table: str, columns: Mapping[str, type]) -> str:
    return f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * (len(columns) + 1))})"


def _rows(columns: Mapping[str, Any], start: int) -> Iterable[tuple[Any, ...]]:
    """Yield columns as rows, each with its `id`, in blocks to save memory."""
    for block in range(0, len(next(iter(columns.values()), ())), BLOCK):
        lists = [column[block : block + BLOCK].tolist() for column in columns.values()]
        yield from zip(range(start + block, start + block + len(lists[0])), *lists)


def _event_row(numbered: tuple[int, Event]) -> tuple[Any, ...]:
    number, event = numbered
    return number, event.step, event.epoch, event.time, event.kind, _text(event.text), _json(dict(event.data))


def _sample_row(sample: BadSample) -> tuple[Any, ...]:
    return sample.fingerprint, _text(sample.label), sample.index, sample.times, _json(list(sample.steps)), _text(sample.why)


def _layer_row(row: tuple[Any, ...]) -> tuple[Any, ...]:
    step, path, *rest = row
    return step, _text(path), *rest


def _text(text: str) -> str:
    """Return a text that SQLite accepts, with half surrogate pairs replaced."""
    return text.encode("utf-8", "replace").decode()


def _json(value: Any) -> str:
    """Return JSON. A NumPy number becomes its value, and any other object its text."""
    return _text(json.dumps(value, ensure_ascii=False, default=lambda odd: odd.item() if isinstance(odd, np.generic) else str(odd)))


# Reading


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return `meta`, `steps`, `first` (its `id`), `bins`, `events`, `layers` and `samples`.

    Args:
        path: the file, or the directory of a run.

    Raises:
        GuardError: if there is no such file, or if it is not a recording, too new, damaged or too
            large.
    """
    file = path_of(path)
    _check_header(file)
    try:
        connection = _opened(file)
    except sqlite3.Error as error:
        raise _unreadable(file, error) from error
    try:
        return _contents(connection, file)
    except (sqlite3.Error, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        if isinstance(error, GuardError):
            raise
        raise _unreadable(file, error) from error
    finally:
        connection.close()


def writer_of(path: Path) -> str:
    """Return the identification of the run that last opened a file for writing, or `""`.

    Raises:
        GuardError: if the file is not a recording, or cannot be read.
    """
    _check_header(path)
    try:
        with contextlib.closing(_opened(path)) as connection:
            found = connection.execute("SELECT value FROM meta WHERE key = 'writer'").fetchone()
            return str(json.loads(found[0])) if found is not None else ""
    except (sqlite3.Error, ValueError, TypeError, RecursionError) as error:
        raise _unreadable(path, error) from error


def _unreadable(file: Path, error: object) -> GuardError:
    reason = f"{file}, which cannot be read: {plain_text(error)}"
    return GuardError(expected("a recording of NanGuard", reason, "Give the directory of a run."))


def _check_header(file: Path) -> None:
    """Check the first bytes of a file.

    Raises:
        GuardError: if it is not a recording.
    """
    remedy = f"Give the directory of a run (NanGuard(directory=...)), or its {NAME}."
    if file.exists() and not file.is_file():
        raise GuardError(expected(f"a recording at {file}", "a path that is not a regular file", remedy))
    try:
        with file.open("rb") as opened:
            head = opened.read(100)
    except OSError as error:
        raise GuardError(expected(f"a recording at {file}", error.strerror or error, remedy)) from error
    application, version = int.from_bytes(head[68:72], "big"), int.from_bytes(head[60:64], "big")
    if not head.startswith(b"SQLite format 3\x00") or application != APPLICATION:
        raise GuardError(expected("a recording of NanGuard", f"{file}, which is another file", remedy))
    if version > VERSION:
        received = f"{file} of format {version}"
        raise GuardError(expected(f"a recording of format {VERSION}", received, "Read it with the version that wrote it."))


def _opened(file: Path) -> sqlite3.Connection:
    """Open the file for reading; without a lock if the folder is read-only and nobody writes."""
    for mode in ("mode=ro", "mode=ro&immutable=1"):
        connection = sqlite3.connect(f"{file.resolve().as_uri()}?{mode}", uri=True, timeout=10.0, isolation_level=None)
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA cell_size_check = ON")
            if hasattr(connection, "setlimit"):  # Python 3.11
                connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2 * MAX_TEXT)
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            return connection
        except UnicodeDecodeError as error:  # of a message of SQLite's that quotes the file
            connection.close()
            raise sqlite3.DatabaseError(f"malformed schema, with text that is not UTF-8 ({error.reason})") from error
        except sqlite3.Error as error:
            connection.close()
            if not isinstance(error, sqlite3.OperationalError) or "immutable" in mode:
                raise
    raise AssertionError


def _contents(connection: sqlite3.Connection, file: Path) -> dict[str, Any]:
    end = time.monotonic() + SECONDS
    connection.set_progress_handler(lambda: int(time.monotonic() > end), 100_000)
    connection.execute("BEGIN")  # one moment for all tables, while somebody writes
    found = connection.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL LIMIT 100").fetchall()
    if {(kind, name, sql) for kind, name, sql in found} != {("table", name, sql) for name, sql in SCHEMA.items()}:
        raise GuardError(expected("a recording of NanGuard", f"{file}, which has other tables", "Give the directory of a run."))
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    texts = _Texts(connection, sum(part.stat().st_size for part in _parts(file)))
    steps = texts.table("steps", STEP_COLUMNS)
    return {
        "meta": checked.meta({str(key): plain_json.loads(value) for key, value in texts.rows("meta", ("key", "value"), "key")}),
        "first": int(steps.pop("id")[0]) if len(steps["id"]) else 0,
        "steps": steps,
        "bins": checked.bins({name: column for name, column in texts.table("bins", BIN_COLUMNS).items() if name != "id"}),
        "events": [
            Event(checked.whole(step), checked.whole(epoch), float(moment), str(kind), str(text), checked.table(data))
            for step, epoch, moment, kind, text, data in texts.rows("events", ("step", "epoch", "time", "kind", "text", "data"), "id")
        ],
        "event_end": _end(connection, "events"),
        "layers": [
            (checked.whole(step), str(path), str(kind), *(None if number is None else float(number) for number in numbers))
            for step, path, kind, *numbers in texts.rows("layers", ("step", "path", "kind", "a", "b", "c"), "id")
        ],
        "samples": [
            BadSample(str(label), place and checked.whole(place), str(mark), checked.whole(times), checked.steps(steps), str(why))
            for mark, label, place, times, steps, why in texts.rows(
                "samples", ("fingerprint", "label", "place", "times", "steps", "why"), "rowid"
            )
        ],
    }


def _parts(file: Path) -> list[Path]:
    """Return the file, and the log next to it."""
    return [part for part in (file, file.with_name(f"{file.name}-wal")) if part.exists()]


def _end(connection: sqlite3.Connection, table: str) -> int:
    return checked.whole(connection.execute(f"SELECT coalesce(max(id) + 1, 0) FROM {table}").fetchone()[0])


class _Texts:
    """Reads tables of one file, up to the limits."""

    def __init__(self, connection: sqlite3.Connection, size: int):
        self._connection = connection
        self._left = min(MAX_ALL_TEXT, MAX_SHARE * size)

    def rows(self, table: str, names: tuple[str, ...], order: str) -> list[tuple[Any, ...]]:
        """Return the last rows of a table in order; those with a text that is too long are left out."""
        short = " AND ".join(f"coalesce(length({name}), 0) <= {MAX_TEXT}" for name in names)
        query = f"SELECT {', '.join(names)} FROM {table} WHERE {short} ORDER BY {order} DESC LIMIT {MAX_EVENTS}"
        found = []
        for row in self._connection.execute(query):
            self._left -= sum(len(value) for value in row if isinstance(value, (str, bytes)))
            if self._left < 0:
                break
            found.append(row)
        return found[::-1]

    def table(self, table: str, columns: Mapping[str, type]) -> dict[str, Any]:
        """Return columns of numbers, and `id`."""
        names = ("id", *columns)
        query = f"SELECT {', '.join(names)} FROM {table} ORDER BY id DESC LIMIT {MAX_ROWS}"
        found: list[tuple[Any, ...]] = []
        for row in self._connection.execute(query):
            if not all(value is None or isinstance(value, (int, float)) for value in row):
                raise ValueError(f"the table {table} has a value that is not a number")
            found.append(row)
        found.reverse()
        lists = list(zip(*found)) if found else [()] * len(names)
        return {name: _column(values, columns.get(name, np.int64)) for name, values in zip(names, lists)}


def _column(values: Iterable[Any], dtype: type) -> Any:
    if np.dtype(dtype).kind == "f":
        return np.array([np.nan if value is None else float(value) for value in values], dtype)
    found = np.array([0 if value is None else int(value) for value in values], np.int64)
    if (found > checked.MAX_WHOLE).any() or (found < -checked.MAX_WHOLE).any():
        raise ValueError("it has a step number that is too large")
    return found.astype(dtype)
