"""The process in which model files are read, seen from the program that asks for it.

The HDF5 library (1.14.6) is known to loop forever on damaged group tables and string heaps and to
crash on others (found by fuzzing), and a file on a broken disk or a pipe blocks whoever reads it.
None of this can be caught inside a process, so another one reads: `python -m
keras_nanguard._files.worker`. It imports NumPy and h5py and no backend, gets one line of JSON for
each file, and answers in lines of JSON: nothing in a file is ever evaluated.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

from keras_nanguard._core.errors import FileFormatError, GuardError, expected
from keras_nanguard._core.plain_text import plain_text

__all__ = ["STALL_SECONDS", "Progress", "Worker", "ask", "one_worker"]

STALL_SECONDS = 30.0
"""Seconds without a line from the worker after which it counts as hung. It writes one at least
every second between calls of a library, each of which reads at most 4 MiB; a disk that takes 30 s
for that is broken."""

START_SECONDS = 120.0
"""Seconds to wait for a worker that starts: it loads NumPy and h5py, on a busy machine or a slow
disk."""

EXIT_SECONDS = 5.0
"""Seconds to wait for a worker that is ended. One that waits for an unresponsive disk cannot be; it
is abandoned."""

Progress = Callable[[int, int], None]
"""Takes the number of bytes read so far and of all bytes."""


class Worker:
    """A process that reads model files, one after the other. It starts with the first file; also a
    context manager."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def ask(
        self, task: str, path: str, progress: Progress | None = None, **details: Any
    ) -> dict[str, Any]:
        """Return the answer to a task about a file.

        Args:
            task: a key of `keras_nanguard._files.worker.TASKS`.
            path: the file.
            progress: called with the progress that the worker reports.
            details: further arguments of the task, plain JSON values.

        Returns:
            The answer, plain JSON values.

        Raises:
            FileFormatError: if the file is refused, or the library that reads it crashes or hangs.
            OSError: if a file cannot be written.
        """
        request = {"task": task, "folder": _current_folder(), "path": path, "details": details}
        try:
            if self._process is None:
                self._process = self._started()
                self._message(plain_text(path), START_SECONDS)
            self._send(json.dumps(request).encode() + b"\n")
            while "answer" not in (message := self._message(plain_text(path), STALL_SECONDS)):
                if progress and "progress" in message:
                    progress(*message["progress"])
            return dict(message["answer"])
        except (FileFormatError, OSError):
            raise
        except BaseException:
            self.close()  # it may not have answered
            raise

    def _send(self, line: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has crashed, and there is no answer
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _started(self) -> subprocess.Popen[bytes]:
        if getattr(sys, "frozen", False) or not sys.executable:
            remedy = "Read the file with a Python that has keras_nanguard installed."
            raise GuardError(
                expected("a Python interpreter", f"sys.executable={sys.executable!r}", remedy)
            )
        home = Path(__file__).parents[
            2
        ]  # not the current folder, which may hold modules of whoever made the file
        process = subprocess.Popen(
            [sys.executable, "-m", "keras_nanguard._files.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=home,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(home), *filter(os.path.isabs, sys.path)]),
            },
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
        self._lines = queue.SimpleQueue()
        threading.Thread(target=_forward, args=(process.stdout, self._lines), daemon=True).start()
        return process

    def _message(self, name: str, seconds: float) -> dict[str, Any]:
        """Return the next line of the worker, or raise what it reports."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self.close()
            received = f"nothing was read for {seconds:g} seconds"
            raise FileFormatError(
                f"{name} cannot be read: it is damaged, or its disk hangs; {received}."
            ) from None
        if not line.endswith(b"\n"):
            self.close()
            raise FileFormatError(
                f"{name} cannot be read: it is damaged, and the library that reads it crashes."
            )
        message: dict[str, Any] = json.loads(line)
        if "refused" in message:
            raise FileFormatError(message["refused"])
        if "unwritable" in message:
            raise OSError(*message["unwritable"])
        if "fault" in message:
            raise RuntimeError(f"reading {name} failed: {message['fault']}")
        return message

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        until = time.monotonic() + EXIT_SECONDS
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()


def _current_folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _forward(source: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Put each line of the worker into a queue, on which a thread can wait for a limited time on
    every system."""
    with source:
        for line in source:
            lines.put(line)
    lines.put(b"")


_current: ContextVar[Worker | None] = ContextVar("worker", default=None)


@contextlib.contextmanager
def one_worker() -> Iterator[Worker]:
    """Use one worker for all files that are read inside the context."""
    if (outer := _current.get()) is not None:
        yield outer
        return
    with Worker() as worker:
        token = _current.set(worker)
        try:
            yield worker
        finally:
            _current.reset(token)


def ask(task: str, path: str, progress: Progress | None = None, **details: Any) -> dict[str, Any]:
    """Return the answer of a worker; see `Worker.ask`."""
    with one_worker() as worker:
        return worker.ask(task, path, progress, **details)
