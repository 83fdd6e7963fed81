"""Reads a model file in another process: `python -m keras_nanguard._files.worker`.

The HDF5 library (1.14.6) is known to loop forever on damaged group tables and string heaps and to
crash on others (found by fuzzing), and a file on a broken disk or a pipe blocks its reader.
None of this can be caught inside a process. The worker imports NumPy and h5py and no backend, takes
one line of JSON, and answers in lines of JSON: nothing in a file is ever evaluated.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from keras_nanguard._core.errors import FileFormatError, GuardError, expected
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._files.formats.limits import size_on_disk

STALL_SECONDS = 30.0
"""Seconds after which reading an empty file counts as hung, with or without progress ..."""

SECONDS_PER_MIB = 1.0
"""... and the seconds that each MiB of its files may take in addition."""

START_SECONDS = 120.0
"""Seconds to wait for a worker that starts: it loads NumPy and h5py, on a busy machine or a slow
disk."""

EXIT_SECONDS = 5.0
"""Seconds to wait for a worker to end. A worker that waits for an unresponsive disk cannot be
ended; it is abandoned.
"""

_HOME = Path(__file__).parents[2]

Progress = Callable[[int, int], None]
"""Takes the number of bytes read so far and of all bytes."""


def run_in_subprocess(
    task: str, path: str, progress: Progress | None = None, **details: Any
) -> dict[str, Any]:
    """Return the answer of a worker to a task about a file.

    Args:
        task: a key of `keras_nanguard._files.worker.TASKS`.
        progress: called with the progress that the worker reports.
        details: further arguments of the task, plain JSON values; `source` is a file, too.

    Returns:
        The answer, plain JSON values.

    Raises:
        FileFormatError: if the file is refused, or the library that reads it crashes or hangs.
        OSError: if a file cannot be written.
    """
    name, files = plain_text(path), [path, *filter(None, [details.get("source")])]
    seconds = STALL_SECONDS + SECONDS_PER_MIB * sum(map(size_on_disk, files)) / (1 << 20)
    request = {"task": task, "path": path, "details": details, "files": files}
    with _worker(request) as lines:
        _message(lines, START_SECONDS, name)
        until = time.monotonic() + seconds
        while "answer" not in (message := _message(lines, until - time.monotonic(), name)):
            if progress:
                progress(*message["progress"])
        return dict(message["answer"])


@contextmanager
def _worker(request: dict[str, Any]) -> Iterator[queue.SimpleQueue[bytes]]:
    """Start a worker, and yield the queue of the lines that it writes; end it afterwards.

    It starts in the folder of this package, not in the current one, which may contain modules from
    the author of the file.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        received = f"sys.executable={sys.executable!r}"
        remedy = "Read the file with a Python that has keras_nanguard installed."
        raise GuardError(expected("a Python interpreter", received, remedy))
    modules = os.pathsep.join([str(_HOME), *filter(os.path.isabs, sys.path)])
    process = subprocess.Popen(
        [sys.executable, "-m", "keras_nanguard._files.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=_HOME,
        env={**os.environ, "PYTHONPATH": modules},
        creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
    )
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_forward, args=(process.stdout, lines), daemon=True).start()
    try:
        folder = str(_HOME)
        with suppress(OSError):  # the current folder may have been removed
            folder = os.getcwd()
        with suppress(OSError), process.stdin as given:  # type: ignore[union-attr]
            given.write(json.dumps({**request, "folder": folder}).encode() + b"\n")
        yield lines
    finally:
        process.terminate()
        until = time.monotonic() + EXIT_SECONDS
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)


def _forward(source: IO[bytes], lines: queue.SimpleQueue[bytes]) -> None:
    """Put each line of the worker into a queue, on which a thread can wait for a limited time on
    every system."""
    with source:
        for line in source:
            lines.put(line)
    lines.put(b"")


def _message(lines: queue.SimpleQueue[bytes], seconds: float, name: str) -> dict[str, Any]:
    """Return the next message of the worker, or raise what it reports."""
    try:
        line = lines.get(timeout=max(0.0, seconds))
    except queue.Empty:
        reason = "it is damaged, or its disk hangs; reading took too long"
        raise FileFormatError(f"{name} cannot be read: {reason}.") from None
    if not line.endswith(b"\n"):
        reason = "it is damaged, and the library that reads it crashes"
        raise FileFormatError(f"{name} cannot be read: {reason}.")
    message: dict[str, Any] = json.loads(line)
    if "refused" in message:
        raise FileFormatError(message["refused"])
    if "unwritable" in message:
        raise OSError(*message["unwritable"])
    if "fault" in message:
        raise RuntimeError(f"reading {name} failed: {message['fault']}")
    return message
