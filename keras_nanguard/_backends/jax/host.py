"""What the host's side asks of JAX: its processes, its generator of random numbers, a pass without gradients."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

__all__ = ["SPREADS_ARRAYS", "advance_generator", "exchanged", "generator_state", "place", "set_generator_state", "without_gradients"]

SPREADS_ARRAYS = True
"""Whether one array may be spread over several processes, so that none of them can compute with it alone."""


def place() -> tuple[int, int]:
    """Return the number of this process among those that train together, from 0, and how many there are."""
    return jax.process_index(), jax.process_count()


def exchanged(number: int) -> list[int]:
    """Return the numbers that all processes hand in, in their order."""
    found: list[int] = np.ravel(multihost_utils.process_allgather(np.asarray(number))).tolist()
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
