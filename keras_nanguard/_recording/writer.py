"""Writes a recording to its file in a separate thread, so that no step waits for a disk."""

from __future__ import annotations

import atexit
import os
import queue
import sqlite3
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from keras_nanguard._recording.database import Changes, Database

__all__ = ["Writer"]

WAIT = 30.0
"""Maximum seconds that the end of a run waits for the disk."""


class Writer:
    """The writing thread.

    Args:
        path: the file.
        writer: identifies the run.
        end: a method that is called if the process exits before `close`; only a weak reference is
            kept.

    Attributes:
        problem: why nothing is written any more, or `""`.
        ending: whether the run is ending; a lock is then waited for only once more.
    """

    def __init__(self, path: Path, writer: str, end: Callable[[], None]):
        self.path, self.problem, self.ending = path, "", False
        self._writer, self._process = writer, os.getpid()
        self._jobs: queue.SimpleQueue[Changes | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name="NanGuard recording", daemon=True)
        self._thread.start()
        self._end = weakref.WeakMethod(end)
        atexit.register(self._at_exit)

    @property
    def here(self) -> bool:
        """Whether this is the writing process, not a fork of it."""
        return os.getpid() == self._process

    @property
    def ready(self) -> bool:
        """Whether new data would be written at once. Never true in a fork of the writing process.
        """
        return self._idle.is_set() and not self.problem and self.here

    def put(self, changes: Changes) -> None:
        """Queue data for writing."""
        self._idle.clear()
        self._jobs.put(changes)

    def wait(self) -> bool:
        """Wait until everything is written, for a limited time; return whether it is."""
        return self.here and self._idle.wait(WAIT) and not self.problem

    def close(self) -> None:
        """Write the remaining data, and close the file."""
        atexit.unregister(self._at_exit)
        if self.here:
            self._jobs.put(None)
            self._thread.join(WAIT)
            if self._thread.is_alive():
                self.problem = self.problem or f"{self.path} was not written within {WAIT:g} seconds"

    def _at_exit(self) -> None:
        end = self._end()
        if end is not None and self.here:
            end()

    def _run(self) -> None:
        database = None
        while (changes := self._jobs.get()) is not None:
            while not self.problem:
                try:
                    if database is None:
                        database = Database(self.path, self._writer, changes)
                    elif not database.write(changes):
                        self.problem = f"another run writes to {self.path}"
                    break
                except Exception as error:  # noqa: BLE001  whatever it is: training goes on, and a line says so
                    if self.ending or not _is_locked(error):
                        self.problem = str(error) or type(error).__name__
            self._idle.set()
        if database is not None:
            database.close()


def _is_locked(error: Exception) -> bool:
    """Whether the error is only a lock of another process, which may be released."""
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
