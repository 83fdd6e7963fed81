"""What the host's side asks of TensorFlow: its processes, its generator of random numbers, a pass without gradients."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

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
SPREADS_ARRAYS = False
"""Whether one array may be spread over several processes, so that none of them can compute with it alone."""


def place() -> tuple[int, int]:
    """Return the number of this process among those that train together, from 0, and how many there are."""
    return 0, 1


def trains_together(model: Any, loop: bool) -> bool:
    """Return whether this process trains the model together with others."""
    return False


def gathered(payload: bytes, what: str) -> list[bytes]:
    """Return what each process hands in, by rank."""
    return [payload]


def generator_state() -> np.ndarray[Any, Any] | None:
    """Return the state of the generator that layers draw from and that belongs to no variable, `None` where there is none."""
    return None


def set_generator_state(state: np.ndarray[Any, Any]) -> None:
    """Put it back; a state of another backend says nothing here."""



def advance_generator() -> None:
    """Do nothing: TensorFlow has no generator that belongs to no variable."""


def without_gradients() -> AbstractContextManager[Any]:
    """Return a context in which nothing is kept for a backward pass that will not come."""
    return contextlib.nullcontext()

