"""Writes a recording to its file, in a thread, so that no step waits for a disk."""

from __future__ import annotations

import atexit
import json
import queue
import sqlite3
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._recording.database import (
    NAME,
    Statement,
    make,
    transaction,
    upgrade,
)
from keras_nanguard._recording.reading import check_header

WAIT = 30.0
"""Maximum time that the end of a run waits for the disk, in seconds."""

LOCKED = 10.0
"""Maximum time that one attempt waits for a file that is locked by a program, in seconds."""

PAUSE = 0.05
"""Time between two attempts, in seconds: SQLite may find at once that a file is locked."""

_NAMES_ANOTHER = bytes.fromhex("d9d505f920a163d7")
"""The last bytes of an SQLite journal of a transaction over several files: it names another one."""


class File:
    """The file while its run writes it: in WAL mode, and intact whenever the process ends.

    Args:
        name: identifies the run. The file belongs to the run that opened it last.
        statements: the first statements. A reader sees all of their results, or the previous file.

    Raises:
        GuardError: if the path has a file that is not a recording, or unsafe to write to.
        sqlite3.Error, OSError: if it cannot be written.
    """

    def __init__(self, path: Path, name: str, statements: Sequence[Statement]):
        self._path, self._writer = path, (json.dumps(name),)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = not path.exists() or (path.is_file() and not path.stat().st_size)
        _check_safe(path)
        if not fresh:
            check_header(path)
        self._connection = sqlite3.connect(
            path, timeout=LOCKED, isolation_level=None, check_same_thread=False
        )
        run = self._connection.execute
        try:
            if not fresh:
                run("PRAGMA journal_mode = WAL").fetchone()
            run("PRAGMA synchronous = NORMAL")
            run("PRAGMA cache_size = -512")  # KiB
            with transaction(self._connection):
                (make if fresh else upgrade)(self._connection)
                run("INSERT OR REPLACE INTO meta VALUES ('writer', ?)", self._writer)
                self._execute(statements)
            run("PRAGMA journal_mode = WAL").fetchone()
        except BaseException:
            self._connection.close()
            raise

    def write(self, statements: Sequence[Statement]) -> None:
        """Execute statements in one transaction.

        Raises:
            GuardError: if the file belongs to another run.
            sqlite3.Error: if it cannot be written.
        """
        with transaction(self._connection):
            query = "SELECT value FROM meta WHERE key = 'writer'"
            if self._connection.execute(query).fetchone() != self._writer:
                raise GuardError(f"{self._path} is in use by another run")
            self._execute(statements)

    def _execute(self, statements: Sequence[Statement]) -> None:
        for statement, rows in statements:
            self._connection.executemany(statement, rows)

    def close(self) -> None:
        """Close the file. Its log is merged into it, unless a program reads it."""
        try:
            self._connection.execute("PRAGMA busy_timeout = 0")
            self._connection.execute("PRAGMA journal_mode = DELETE").fetchone()
        except sqlite3.Error:
            pass
        self._connection.close()


def _check_safe(file: Path) -> None:
    """Check that SQLite will write to this file alone.

    When SQLite opens a file, it rolls back a journal in the same folder, and removes a file that is
    named in the journal of a transaction over several files. A recording has no such journal.

    Raises:
        GuardError: if SQLite would write to another file, or remove one.
    """
    remedy = "Use one directory per run, or remove the file."
    if file.is_symlink():
        raise GuardError(expected(f"a recording at {file}", "a link", remedy))
    journal = file.with_name(f"{file.name}-journal")
    if journal.is_file() and journal.read_bytes().endswith(_NAMES_ANOTHER):
        received = "one that names another file"
        raise GuardError(expected(f"the journal of one recording at {journal}", received, remedy))


def unwritten(reason: object) -> str:
    """Return the sentence about a recording that is not written."""
    return f"{NAME} is not written: {str(reason) or type(reason).__name__}"


class Writer:
    """The thread that writes during one fit.

    Args:
        end: a method that is called if the process ends before `close`. It is not kept alive.

    Attributes:
        name: identifies the run.
        problem: why nothing is written any more; `""` if there is no problem.
    """

    def __init__(self, path: Path, end: Callable[[], None]):
        self.name, self.problem = uuid.uuid4().hex, ""
        self._path, self._ending = path, False  # at the end, a locked file is tried only once
        self._jobs: queue.SimpleQueue[Sequence[Statement] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="NanGuard recording", daemon=True)
        self._thread.start()
        self._end = weakref.WeakMethod(end)
        atexit.register(self._at_exit)

    @property
    def ready(self) -> bool:
        """Whether statements that are put now are executed at once."""
        return self._idle.is_set() and not self.problem and self._thread.is_alive()

    def put(self, statements: Sequence[Statement]) -> None:
        """Have statements executed in one transaction."""
        self._idle.clear()
        self._jobs.put(statements)

    def fail(self, reason: object) -> None:
        """Write nothing any more; the first reason is kept."""
        self.problem = self.problem or unwritten(reason)

    def close(self) -> None:
        """Write the remaining data, and close the file."""
        atexit.unregister(self._at_exit)
        self._ending = True
        if self._thread.is_alive():  # not in a fork of the process
            self._jobs.put(None)
            self._thread.join(WAIT)
            if self._thread.is_alive():
                self.fail(f"{self._path} was not written within {WAIT:g} seconds")

    def _at_exit(self) -> None:
        end = self._end()
        if end is not None and self._thread.is_alive():
            end()

    def _run(self) -> None:
        file = None
        while (statements := self._jobs.get()) is not None:
            while not self.problem:
                try:
                    if file is None:
                        file = File(self._path, self.name, statements)
                    else:
                        file.write(statements)
                    break
                except Exception as error:  # noqa: BLE001  training continues, and a line warns
                    locked = isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
                    if self._ending or not locked:
                        self.fail(error)
                    else:
                        time.sleep(PAUSE)
            self._idle.set()
        if file is not None:
            file.close()
