"""Training that is spread over several processes: which of them this one is, and what all of them hold together.

Every process decides the same, from what all of them have exchanged. Only the first one prints, and writes to the
guard's directory; the others run the same code with a folder of their own that goes when they end, for some of what it does
(reading a value that is spread over processes, giving a variable a value) has to be done by all of them at once.
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

__all__ = ["agreed", "count", "exchange", "folder", "index", "print_line"]


def count() -> int:
    """Return how many processes train together."""
    return current.host().place()[1]


def index() -> int:
    """Return the number of this process among them, from 0."""
    return current.host().place()[0]


def print_line(text: str) -> None:
    """Print a line the way Keras prints: on the screen, or into the log; only in the first process.

    Never raises: a full disk, a broken pipe or a logger without `flush` ends no training.
    """
    if index() == 0:
        with contextlib.suppress(Exception):
            print_message(text)


def folder(directory: Path | None) -> tuple[Path | None, Any]:
    """Return where this process writes, and what keeps that folder alive: the guard's directory in the first process."""
    if directory is None or index() == 0:
        return directory, None
    scratch = tempfile.TemporaryDirectory(prefix="keras_nanguard-")
    return Path(scratch.name), scratch


def exchange(value: Any, what: str) -> list[Any]:
    """Return the values that all processes hand in, by rank.

    Args:
        value: what JSON can hold, NaN and Inf included; at most some 16 kB of text.
        what: what it is, in words, for the error if a process does not answer.

    Raises:
        GuardError: if a process has ended or does not answer within the limit of the backend.
    """
    messages = current.host().gathered(json.dumps(value).encode(), what)
    return [json.loads(message) for message in messages]


def agreed(number: int, what: str) -> None:
    """Check that all processes found the same.

    Args:
        number: what this one found.
        what: what that is, in words.

    Raises:
        GuardError: if another process found something else.
    """
    if count() == 1:
        return
    found = exchange(number, what)
    if len(set(found)) > 1:
        remedy = "Give all of them the same directory, on a file system that they share."
        raise GuardError(expected(f"all processes to find the same {what}", f"{found}, by process", remedy))
