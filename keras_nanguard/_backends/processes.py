"""Training in several processes: the place of this process, and exchange between all of them.

Every process makes the same decisions from exchanged facts. Only the first one prints and writes to
the guard's directory. The others run the same code with a temporary folder, because some operations
(reading or writing a value that is distributed over processes) need all of them at once.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

from keras_nanguard._backends import current
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._keras.fitting import print_message


def count() -> int:
    """Return the number of processes that train together."""
    return current.host().place()[1]


def index() -> int:
    """Return the rank of this process, from 0."""
    return current.host().place()[0]


def print_line(text: str) -> None:
    """Print a line like Keras, on the screen or into the log; only in the first process.

    Never raises, not even for a full disk, a broken pipe or a logger without `flush`.
    """
    if index() == 0:
        with contextlib.suppress(Exception):
            print_message(text)


def folder(directory: Path | None) -> tuple[Path | None, Any]:
    """Return the folder for files of this process, and an object that keeps it alive."""
    if directory is None or index() == 0:
        return directory, None
    scratch = tempfile.TemporaryDirectory(prefix="keras_nanguard-")
    return Path(scratch.name), scratch


def exchange(value: Any, what: str) -> list[Any]:
    """Return the values of all processes, by rank.

    Args:
        value: JSON data, including NaN and Inf.
        what: a description of it, for the error if a process does not answer.

    Raises:
        GuardError: if a process has ended or does not answer within the time limit of the backend.
    """
    messages = current.host().gathered(json.dumps(value).encode(), what)
    return [json.loads(message) for message in messages]


def require_agreement(number: int, what: str) -> None:
    """Check that all processes have the same number.

    Args:
        what: a description of it.

    Raises:
        GuardError: if another process has a different one.
    """
    if count() == 1:
        return
    found = exchange(number, what)
    if len(set(found)) > 1:
        remedy = "Give all of them the same directory, on a file system that they share."
        raise GuardError(
            expected(f"all processes to find the same {what}", f"{found}, by process", remedy)
        )
