"""The process that reads a model file: `python -m keras_nanguard._files.worker`, started by
`isolated.py`.

It writes a line of JSON when it has started, takes one line of JSON, and writes any number of lines
`{"progress": [done, total]}` and then an answer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import IO, Any

from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._files.formats.limits import readable, size_on_disk
from keras_nanguard._files.formats.names import LayerConfig
from keras_nanguard._files.formats.opening import opened
from keras_nanguard._files.formats.orbax import orbax_tree
from keras_nanguard._files.isolated import Progress
from keras_nanguard._files.problems import Limits
from keras_nanguard._files.repair_file import Unwritable, copy_values, repair_file
from keras_nanguard._files.scan import scan_contents

MAX_MEMORY = 1 << 30
"""Memory limit for files of any size, in bytes, in addition to the memory of the process before
reading. Reading in pieces takes a tenth of it. Only a damaged file that makes HDF5 reserve the
declared size needs more.
"""

ORBAX_MEMORY = 8 << 30
"""The same for a checkpoint: TensorStore reserves stacks and arenas of memory for each of its
threads."""

MEMORY_PER_BYTE = 16
"""Additional memory limit per byte of the files."""


def _scan(path: str, progress: Progress, limits: dict[str, Any]) -> dict[str, Any]:
    with opened(path) as contents:
        return asdict(scan_contents(contents, Limits(**limits), progress))


def _names(path: str, progress: Progress) -> dict[str, Any]:
    """Return the name of a model, `""` if it has none, and layer, name and role of each array."""
    with opened(path) as contents:
        root = LayerConfig(contents.config).name or contents.names.get("", "")
        identities = (array.who for array in contents.arrays)
        variables = [(*map(plain_text, (who.layer, who.name)), who.role) for who in identities]
        return {"root": root, "variables": variables}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "scan": _scan,
    "repair": repair_file,
    "values": copy_values,
    "names": _names,
}
"""The tasks of the worker: functions of a path, a `Progress` and further arguments by name."""


def answer(request: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Return the last line for a request: the answer, or the reason of a failure."""
    path = request["path"]
    try:
        with readable(path):
            return {"answer": TASKS[request["task"]](path, progress, **request["details"])}
    except FileFormatError as error:
        return {"refused": str(error)}
    except Unwritable as error:
        return {"unwritable": error.args}
    except Exception as error:  # noqa: BLE001 (the parent process raises it)
        return {"fault": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Answer the request on the standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    lines = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output of a library must not mix with the answer

    def progress(done: int, total: int) -> None:
        _write(lines, {"progress": [done, total]})

    _write(lines, {})
    request = json.loads(sys.stdin.buffer.readline())
    os.chdir(request["folder"])
    _limit_memory(request["files"])
    _write(lines, answer(request, progress))


def _write(lines: IO[bytes], message: dict[str, Any]) -> None:
    lines.write(json.dumps(message).encode() + b"\n")
    lines.flush()


def _limit_memory(paths: Sequence[str]) -> None:
    """Limit the memory of this process to its current use plus the limit for these files. Only
    Linux reports the current use."""
    try:
        import resource

        with open("/proc/self/statm", "rb") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        limit = now + (ORBAX_MEMORY if any(map(orbax_tree, paths)) else MAX_MEMORY)
        limit += MEMORY_PER_BYTE * sum(map(size_on_disk, paths))
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ImportError, OSError, ValueError):
        pass


if __name__ == "__main__":
    main()
