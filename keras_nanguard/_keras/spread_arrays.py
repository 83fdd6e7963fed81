"""Arrays that are spread over several processes, and what is said where one of these does not answer."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_nanguard._core.errors import GuardError, expected

__all__ = ["as_array", "waiting_for", "whole"]


def whole(value: Any) -> Any:
    """Return an array that this process can read: where it is spread over processes, gathered by all of them."""
    if getattr(value, "is_fully_addressable", True) or value.is_fully_replicated:
        return value
    import jax
    from jax.experimental import multihost_utils

    with waiting_for("an array that is spread over them", jax.process_count()):
        return multihost_utils.process_allgather(value, tiled=True)


def as_array(value: Any) -> np.ndarray[Any, Any]:
    """Return a tensor or array of any backend as a NumPy array, in its own memory where that can be read."""
    return np.asarray(value.numpy() if hasattr(value, "numpy") else whole(value))


@contextlib.contextmanager
def waiting_for(what: str, processes: int) -> Iterator[None]:
    """Say what was waited for, and how long, where another process is gone or does not answer.

    The backend has the limit: that of the process group on PyTorch, that of its coordination service on JAX. It ends the wait with
    a `RuntimeError` that says neither.

    Args:
        what: what the processes exchange, in words.
        processes: how many there are.

    Raises:
        GuardError: in place of that.
    """
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        seconds = f"after {time.monotonic() - began:.1f} s of waiting for {what}: {str(error).strip().partition(chr(10))[0]}"
        remedy = "Look at the output of the other processes: one has ended, or makes another number of steps. Then start all of them again."
        raise GuardError(expected(f"an answer of all {processes} processes", f"none {seconds}", remedy)) from error
