"""Reading of a file in a child process, so that no file can crash or hang the calling program.

The HDF5 library (1.14.6) is known to loop forever on damaged group tables and string heaps and to crash on others
(found by fuzzing); neither can be caught inside a process. A forked child costs a few milliseconds, inherits the
imported modules, and returns plain JSON: nothing in a file is ever evaluated. Without `fork` (Windows) the work runs in
the calling process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._keras.overrides import without_warnings

__all__ = ["STALL_SECONDS", "isolated"]

STALL_SECONDS = 30.0
"""Seconds without a heartbeat after which the child counts as hung. It sends one twice a second between calls into a C
library, each of which reads at most 4 MiB; a disk that takes 30 s for that is broken."""

KILL_SECONDS = 5.0
"""Seconds to wait for a killed child. A child that waits for an unresponsive disk cannot be killed; it is abandoned."""

_BEAT_SECONDS = 0.5

MAX_MEMORY = 1 << 30
"""Memory limit of the child for any file, in bytes. Reading in pieces takes a tenth of it; more is needed only for a damaged
file that makes HDF5 reserve what it declares."""

_MEMORY_PER_BYTE = 16
"""Additional memory limit per byte of the file."""

Progress = Callable[[int, int], None]

Work = Callable[[Progress], AbstractContextManager[dict[str, Any]]]
"""Takes a function that reports progress; its context is the answer, and leaving the context releases open files."""


def isolated(work: Work, progress: Progress | None, name: str, size: int = 0) -> dict[str, Any]:
    """Return the answer of `work`, run in a child process.

    Args:
        work: its context is a dict of plain JSON values.
        progress: called in this process with the progress that `work` reports.
        name: name of the file, for messages.
        size: size of the file in bytes, on which the memory limit of the child depends.

    Returns:
        The answer.

    Raises:
        FileFormatError: if `work` raised it, or the child crashed or hung.
    """
    if not hasattr(os, "fork"):
        with work(progress or (lambda done, total: None)) as answer:
            return answer
    reading, writing = os.pipe()
    with without_warnings():  # about threads at a fork: the child runs only h5py and NumPy, never a backend
        child = os.fork()
    if child == 0:
        os.close(reading)
        _child(work, writing, size)
    os.close(writing)
    try:
        return _answer(reading, child, progress, name)
    finally:
        os.close(reading)
        _reap(child)


def _child(work: Work, writing: int, size: int) -> None:
    """Do the work and exit without running exit handlers or flushing buffers of the parent."""
    status = 1
    try:
        gc.disable()  # a collection would touch, and so copy, every page that is shared with the parent
        faulthandler.disable()  # the parent reports a crash in one sentence
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _bound_memory(MAX_MEMORY + _MEMORY_PER_BYTE * size)
        done = threading.Event()
        beat = threading.Thread(target=_beat, args=(writing, done), daemon=True)
        beat.start()

        def end(message: dict[str, Any]) -> None:
            done.set()
            beat.join()
            _send(writing, message)

        try:
            with work(lambda now, total: _send(writing, {"progress": [now, total]})) as answer:
                end({"answer": answer})
                os._exit(0)  # without closing the file: HDF5 is slow with thousands of open datasets
        except FileFormatError as error:
            end({"refused": str(error)})
        except Exception as error:  # noqa: BLE001 (whatever it is, the parent raises it)
            end({"fault": f"{type(error).__name__}: {error}"})
        status = 0
    finally:
        os._exit(status)


def _bound_memory(extra: int) -> None:
    """Limit the memory of this process to what it inherited plus `extra` bytes; on systems other than Linux there is no limit."""
    try:
        import resource

        with open("/proc/self/statm", "rb") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limits = [limit for limit in (now + extra, soft, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    except (ImportError, OSError, ValueError):
        pass


def _beat(writing: int, done: threading.Event) -> None:
    while not done.wait(_BEAT_SECONDS):
        os.write(writing, b"\n")


def _send(writing: int, message: dict[str, Any]) -> None:
    left = memoryview(json.dumps(message).encode("utf-8", "surrogatepass") + b"\n")
    while left:
        left = left[os.write(writing, left) :]


def _answer(reading: int, child: int, progress: Progress | None, name: str) -> dict[str, Any]:
    waiting = bytearray()
    while True:
        ready, _, _ = select.select([reading], [], [], STALL_SECONDS)
        if not ready:
            raise FileFormatError(f"{name} cannot be read: it is damaged, and the library that reads it hangs.")
        block = os.read(reading, 1 << 20)
        if not block:
            raise FileFormatError(f"{name} cannot be read: it is damaged, and the library that reads it crashes.")
        waiting += block
        if not block.endswith(b"\n"):
            continue
        for line in bytes(waiting).splitlines():
            message = json.loads(line) if line else {}
            if "answer" in message:
                return dict(message["answer"])
            if "refused" in message:
                raise FileFormatError(message["refused"])
            if "fault" in message:
                raise RuntimeError(f"scanning {name} failed: {message['fault']}")
            if progress and "progress" in message:
                progress(*message["progress"])
        waiting.clear()


def _reap(child: int) -> None:
    with contextlib.suppress(ChildProcessError):  # other code waits for all children, as some servers do
        if os.waitpid(child, os.WNOHANG) == (0, 0):  # it still runs and is our child, so its process id has not been reused
            os.kill(child, signal.SIGKILL)
            until = time.monotonic() + KILL_SECONDS
            while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < until:
                time.sleep(0.001)
