"""Training that is spread over several processes: which of them this one is, and what all of them hold together.

Every process sees the same verdicts and so decides the same, step for step. Only the first one prints, and writes to the
guard's directory; the others run the same code with a folder of their own that goes when they end, for some of what it does
(reading a value that is spread over processes, giving a variable a value) has to be done by all of them at once.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_nanguard._errors import GuardError, expected

__all__ = ["agreed", "as_array", "count", "folder", "index", "waiting_for", "whole"]


def count() -> int:
    """Return how many processes train together."""
    return _place()[1]


def index() -> int:
    """Return the number of this process among them, from 0."""
    return _place()[0]


def _place() -> tuple[int, int]:
    if keras.backend.backend() == "jax":
        import jax

        return jax.process_index(), jax.process_count()
    if keras.backend.backend() == "torch":
        import torch.distributed

        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def whole(value: Any) -> Any:
    """Return an array that this process can read: where it is spread over processes, gathered by all of them."""
    if getattr(value, "is_fully_addressable", True) or value.is_fully_replicated:
        return value
    from jax.experimental import multihost_utils

    with waiting_for("an array that is spread over them"):
        return multihost_utils.process_allgather(value, tiled=True)


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """Return a tensor or array of any backend as a NumPy array, in its own memory where that can be read."""
    return np.asarray(value.numpy() if hasattr(value, "numpy") else whole(value))


@contextlib.contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Say what was waited for, and how long, where another process is gone or does not answer.

    The backend has the limit: that of the process group on PyTorch, that of its coordination service on JAX. It ends the wait with
    a `RuntimeError` that says neither.

    Args:
        what: what the processes exchange, in words.

    Raises:
        GuardError: in place of that.
    """
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        seconds = f"after {time.monotonic() - began:.1f} s of waiting for {what}: {str(error).strip().partition(chr(10))[0]}"
        remedy = "Look at the output of the other processes: one has ended, or makes another number of steps. Then start all of them again."
        raise GuardError(expected(f"an answer of all {count()} processes", f"none {seconds}", remedy)) from error


def folder(directory: Path | None) -> tuple[Path | None, Any]:
    """Return where this process writes, and what keeps that folder alive: the guard's directory in the first process."""
    if directory is None or index() == 0:
        return directory, None
    scratch = tempfile.TemporaryDirectory(prefix="keras_nanguard-")
    return Path(scratch.name), scratch


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
    if keras.backend.backend() == "jax":
        from jax.experimental import multihost_utils

        with waiting_for(what):
            found = np.ravel(multihost_utils.process_allgather(np.asarray(number))).tolist()
    else:
        import torch.distributed

        found = [0] * count()
        with waiting_for(what):
            torch.distributed.all_gather_object(found, number)
    if len(set(found)) > 1:
        remedy = "Give all of them the same directory, on a file system that they share."
        raise GuardError(expected(f"all processes to find the same {what}", f"{found}, by process", remedy))
