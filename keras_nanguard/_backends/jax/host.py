"""What the host's side asks of JAX: its processes, its generator of random numbers, a pass without gradients."""

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
    "place",
    "set_generator_state",
    "trains_together",
    "without_gradients",
]

LIMIT = 300
"""Seconds that one process waits for another: a step of it, a validation, or a diagnosis."""

_NUMBERS = itertools.count()
"""The number of the next exchange, the same in all processes."""

SPREADS_ARRAYS = True
"""Whether one array may be spread over several processes, so that none of them can compute with it alone."""


def place() -> tuple[int, int]:
    """Return the number of this process among those that train together, from 0, and how many there are."""
    return jax.process_index(), jax.process_count()


def trains_together(model: Any, loop: bool) -> bool:
    """Return whether this process trains the model together with others."""
    return place()[1] > 1


def gathered(payload: bytes, what: str) -> list[bytes]:
    """Return what each process hands in, by rank.

    The messages go through the coordination service that JAX starts for its processes, on the host, so they need no device and
    cannot be mixed up with the arrays of a step.

    Args:
        payload: what this process hands in.
        what: what is exchanged, in words.

    Raises:
        GuardError: if a process does not answer within `LIMIT` seconds; names it, and what was waited for.
    """
    rank, count = place()
    client, number = distributed.global_state.client, next(_NUMBERS)
    client.key_value_set_bytes(f"keras_nanguard/{number}/{rank}", payload)
    found, started = [], time.monotonic()
    for other in range(count):
        try:
            found.append(client.blocking_key_value_get_bytes(f"keras_nanguard/{number}/{other}", LIMIT * 1000))
        except RuntimeError as error:
            seconds = f"none of rank {other} after {time.monotonic() - started:.1f} s of waiting for {what}"
            remedy = "Check the output of that process: it has ended, or runs a different number of steps. Then restart all of them."
            raise GuardError(expected(f"an answer of all {count} processes", seconds, remedy)) from error
    if number > 1:  # every process has read the message before the last one
        client.key_value_delete(f"keras_nanguard/{number - 2}/{rank}")
    return found


def generator_state() -> np.ndarray[Any, Any] | None:
    """Return the state of the generator that layers draw from and that belongs to no variable, `None` where there is none."""
    return None


def set_generator_state(state: np.ndarray[Any, Any]) -> None:
    """Put it back; a state of another backend says nothing here."""


def advance_generator() -> None:
    """Do nothing: JAX has no generator that belongs to no variable."""


def without_gradients() -> AbstractContextManager[Any]:
    """Return a context in which nothing is kept for a backward pass that will not come."""
    return contextlib.nullcontext()
