"""Process functions of JAX: its processes, its random generator, a pass without gradients."""

from __future__ import annotations

import contextlib
import itertools
import time
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax._src import distributed

from keras_nanguard._core.errors import GuardError, expected

__all__ = [
    "SPREADS_ARRAYS",
    "advance_generator",
    "gathered",
    "generator_state",
    "is_sharded",
    "place",
    "set_generator_state",
    "trains_together",
    "without_gradients",
]

LIMIT = 300
"""Maximum seconds that one process waits for another: for a step, a validation, or a diagnosis."""

_NUMBERS = itertools.count()
"""The number of the next exchange, the same in all processes."""

SPREADS_ARRAYS = True
"""Whether one array may be distributed over several processes, so that no process can compute with
it alone.
"""


def place() -> tuple[int, int]:
    """Return the rank of this process, from 0, and the number of processes that train together."""
    return jax.process_index(), jax.process_count()


def trains_together(model: Any, loop: bool) -> bool:
    """Return whether this process trains the model with others."""
    return place()[1] > 1


def gathered(payload: bytes, what: str) -> list[bytes]:
    """Return the values of all processes, by rank.

    The messages use the coordination service that JAX starts for its processes, on the host. So
    they need no device and cannot be confused with arrays of a step.

    Args:
        payload: the value of this process.
        what: a description of it.

    Raises:
        GuardError: if a process does not answer within `LIMIT` seconds, with its rank and the
            description.
    """
    rank, count = place()
    client, number = distributed.global_state.client, next(_NUMBERS)
    client.key_value_set_bytes(f"keras_nanguard/{number}/{rank}", payload)
    found, started = [], time.monotonic()
    for other in range(count):
        try:
            found.append(
                client.blocking_key_value_get_bytes(
                    f"keras_nanguard/{number}/{other}", LIMIT * 1000
                )
            )
        except RuntimeError as error:
            seconds = (
                f"none of rank {other} after {time.monotonic() - started:.1f} s of waiting for"
                f" {what}"
            )
            remedy = (
                "Check the output of that process: it has ended, or runs a different number of"
                " steps. Then restart all of them."
            )
            raise GuardError(
                expected(f"an answer from all {count} processes", seconds, remedy)
            ) from error
    if number > 1:  # every process has read the message before the last one
        client.key_value_delete(f"keras_nanguard/{number - 2}/{rank}")
    return found


def is_sharded(model: Any) -> bool:
    """Return whether no process can save the model without the others: here each can."""
    return False


def generator_state() -> np.ndarray[Any, Any] | None:
    """Return the state of the generator that belongs to no variable, or `None`."""
    return None


def set_generator_state(state: np.ndarray[Any, Any]) -> None:
    """Restore this state. A state of another backend is ignored."""


def advance_generator() -> None:
    """Do nothing: JAX has no generator that belongs to no variable."""


def without_gradients() -> AbstractContextManager[Any]:
    """Return a context without recording for a backward pass."""
    return contextlib.nullcontext()
