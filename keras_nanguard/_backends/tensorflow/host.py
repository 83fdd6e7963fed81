"""Process functions of TensorFlow: its processes, its random generator, a pass without
gradients.
"""

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
    "is_sharded",
    "place",
    "set_generator_state",
    "trains_together",
    "without_gradients",
]
SPREADS_ARRAYS = False
"""Whether one array may be distributed over several processes, so that no process can compute with
it alone.
"""


def place() -> tuple[int, int]:
    """Return the rank of this process, from 0, and the number of processes that train together."""
    return 0, 1


def trains_together(model: Any, loop: bool) -> bool:
    """Return whether this process trains the model with others."""
    return False


def gathered(payload: bytes, what: str) -> list[bytes]:
    """Return the values of all processes, by rank."""
    return [payload]


def is_sharded(model: Any) -> bool:
    """Return whether no process can save the model without the others: here each can."""
    return False


def generator_state() -> np.ndarray[Any, Any] | None:
    """Return the state of the generator that belongs to no variable, or `None`."""
    return None


def set_generator_state(state: np.ndarray[Any, Any]) -> None:
    """Restore this state. A state of another backend is ignored."""


def advance_generator() -> None:
    """Do nothing: TensorFlow has no generator that belongs to no variable."""


def without_gradients() -> AbstractContextManager[Any]:
    """Return a context without recording for a backward pass."""
    return contextlib.nullcontext()
