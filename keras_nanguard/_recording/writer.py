"""Writes a recording to its file in a thread of its own, so that no step waits for a disk."""

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
"""Seconds that the end of a run waits for the disk at most."""


class Writer:
    """The thread that writes.

    Args:
        path: the file.
        writer: identifies the run.
        end: a method that is called where the process ends before this is closed; it is not kept alive.

    Attributes:
        problem: why nothing is written any more, `""` while all is well.
        ending: whether the run ends: who holds the file locked is waited for once more, and no longer.
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
        """Whether this is the process that writes, and none that was forked off it."""
        return os.getpid() == self._process

    @property
    def ready(self) -> bool:
        """Whether what is given now is written at once. Never in a process that was forked off the one that writes."""
        return self._idle.is_set() and not self.problem and self.here

    def put(self, changes: Changes) -> None:
        """Have this written."""
        self._idle.clear()
        self._jobs.put(changes)

    def wait(self) -> bool:
        """Wait until all is written, a limited time; returns whether it is."""
        return self.here and self._idle.wait(WAIT) and not self.problem

    def close(self) -> None:
        """Write what is left, and close the file."""
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
    """Whether somebody else only has the file locked for long, who may let it go."""
    return isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
