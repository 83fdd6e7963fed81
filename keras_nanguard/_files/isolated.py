"""Runs the reading of a file in a child process, so that no file can crash or hang the program that looks at it.

The HDF5 library (1.14.6) is known to loop for ever on damaged group tables and string heaps and to crash on others
(found by fuzzing it); neither can be caught inside a process. A forked child costs a few milliseconds, inherits what
is imported, and hands back plain JSON: nothing that stands in a file is ever evaluated. Where there is no `fork`
(Windows) the work runs in place.
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
"""Seconds without a sign of life after which the child is taken for hung. It gives one twice a second between any two
calls into a C library, each of which reads 4 MiB at most; a disk that takes 30 s for that is broken."""

KILL_SECONDS = 5.0
"""Seconds in which a killed child has to be gone. One that waits for a disk that does not answer cannot be ended; it is left behind."""

_BEAT_SECONDS = 0.5

MAX_MEMORY = 1 << 30
"""Bytes of memory that the child may take for any file. Reading in pieces takes a tenth of it; what goes beyond is a damaged file that
has HDF5 reserve what it declares."""

_MEMORY_PER_BYTE = 16
"""Bytes that it may take beside, for each byte of the file."""

Progress = Callable[[int, int], None]

Work = Callable[[Progress], AbstractContextManager[dict[str, Any]]]
"""Takes a function to report progress to; what it gives is the answer, and leaving it releases what it opened."""


def isolated(work: Work, progress: Progress | None, name: str, size: int = 0) -> dict[str, Any]:
    """Return what `work` gives, run in a child process.

    Args:
        work: gives plain JSON values.
        progress: called in this process with what `work` reports.
        name: name of the file, for messages.
        size: bytes of the file, in relation to which the child may take memory.

    Returns:
        What `work` gave.

    Raises:
        FileFormatError: if `work` raised it, or the child crashed or hung.
    """
    if not hasattr(os, "fork"):
        with work(progress or (lambda done, total: None)) as answer:
            return answer
    reading, writing = os.pipe()
    with without_warnings():  # of threads at a fork: the child runs h5py and NumPy only, never a backend
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
    """Do the work and leave without running anything of the parent's: no exit handlers, no buffers flushed."""
    status = 1
    try:
        gc.disable()  # a collection would touch, and so copy, every page that is shared with the parent
        faulthandler.disable()  # the parent tells of a crash in one sentence
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
                os._exit(0)  # before the file is closed: HDF5 takes its time over thousands of open datasets
        except FileFormatError as error:
            end({"refused": str(error)})
        except Exception as error:  # noqa: BLE001 (whatever it is, the parent raises it)
            end({"fault": f"{type(error).__name__}: {error}"})
        status = 0
    finally:
        os._exit(status)


def _bound_memory(extra: int) -> None:
    """Let this process take so many bytes beyond what it inherited; where the system cannot tell (not Linux), any number."""
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
            raise FileFormatError(f"{name} cannot be read: it is damaged so that the library that reads it hangs.")
        block = os.read(reading, 1 << 20)
        if not block:
            raise FileFormatError(f"{name} cannot be read: it is damaged so that the library that reads it crashes.")
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
    with contextlib.suppress(ChildProcessError):  # someone else waits for all children, as some servers do
        if os.waitpid(child, os.WNOHANG) == (0, 0):  # it is there and it is ours: its number cannot be another's
            os.kill(child, signal.SIGKILL)
            until = time.monotonic() + KILL_SECONDS
            while os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < until:
                time.sleep(0.001)
