"""Opens the file of a recording for reading. The file may be damaged or malicious: nothing in it is
executed, and reading is limited in size and time.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._recording.database import (
    APPLICATION,
    FORMAT,
    NAME,
    ONLY_FORMAT_1,
    SCHEMA,
    Row,
)

MAX_ROWS = 200_000
"""Maximum number of rows of a table."""

MAX_TEXT, MAX_ALL_TEXT = 4 << 20, 512 << 20
"""Maximum numbers of characters of one text, and of all texts of a table."""

MAX_SHARE = 4
"""Maximum number of characters per byte of the file: rows of a damaged one may share pages."""

SECONDS = 30.0
"""Maximum time of reading."""


@contextlib.contextmanager
def opened(file: Path) -> Iterator[sqlite3.Connection]:
    """Open a recording for reading: all tables as of one moment, also during a run.

    Raises:
        GuardError: if the file is missing, is not a recording, is of a newer version or is damaged.
            Errors within the block are converted to it, too.
    """
    check_header(file)
    connection = None
    try:
        connection = _connected(file)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA cell_size_check = ON")
        if hasattr(connection, "setlimit"):  # Python 3.11
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 2 * MAX_TEXT)
        end = time.monotonic() + SECONDS
        connection.set_progress_handler(lambda: int(time.monotonic() > end), 100_000)
        connection.execute("BEGIN")
        query = "SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL LIMIT 100"
        tables = {("table", *table) for table in SCHEMA.items()}
        if set(connection.execute(query)) not in (tables, tables | {("table", *ONLY_FORMAT_1)}):
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
    uri = f"{file.resolve().as_uri()}?mode=ro"
    how: dict[str, Any] = {"uri": True, "timeout": 10.0, "isolation_level": None}
    connection: sqlite3.Connection = sqlite3.connect(uri, **how)
    try:
        connection.execute("PRAGMA schema_version").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        connection = sqlite3.connect(f"{uri}&immutable=1", **how)
    return connection


def check_header(file: Path) -> None:
    """Check the first bytes of a recording.

    Raises:
        GuardError: if the file is not a recording that this version reads.
    """
    remedy = f"Give the directory of a run (NanGuard(directory=...)), or its {NAME}."
    if file.exists() and not file.is_file():
        raise GuardError(expected(f"a recording at {file}", "no regular file", remedy))
    try:
        with file.open("rb") as stream:
            head = stream.read(100)
    except (OSError, ValueError) as error:  # a name with NUL
        received = getattr(error, "strerror", "") or plain_text(error)
        raise GuardError(expected(f"a recording at {file}", received, remedy)) from error
    version, application = (int.from_bytes(head[n : n + 4], "big") for n in (60, 68))
    if not head.startswith(b"SQLite format 3\x00") or application != APPLICATION:
        received = f"{file}, which is another file"
        raise GuardError(expected("a recording of NanGuard", received, remedy))
    if version > FORMAT:
        received = f"{file} of format {version}"
        remedy = "Read it with the version that wrote it."
        raise GuardError(expected(f"a recording of format {FORMAT}", received, remedy))


def rows_of(connection: sqlite3.Connection, file: Path) -> dict[str, list[Row]]:
    """Return the last rows of each table of a file in order, without those with a text that is too
    long."""
    parts = (file, file.with_name(f"{file.name}-wal"))  # with its log during a run
    size = sum(part.stat().st_size for part in parts if part.exists())
    max_text = min(MAX_ALL_TEXT, MAX_SHARE * size)
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


def writer_of(file: Path) -> str:
    """Return the identifier of the run that last opened a file for writing, or `""`.

    Raises:
        GuardError: if the file is not a recording, or cannot be read.
    """
    with opened(file) as connection:
        found = connection.execute("SELECT value FROM meta WHERE key = 'writer'").fetchone()
        return str(json.loads(found[0])) if found is not None else ""
