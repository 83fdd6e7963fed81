"""What the host's side asks of PyTorch: its processes, its generator of random numbers, a pass without gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from keras_nanguard._backends.torch.group import gathered, place
from keras_nanguard._backends.torch.local_replay import communicates

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


def trains_together(model: Any, loop: bool) -> bool:
    """Return whether this process trains the model together with others.

    A loop does wherever the process group has several members. A `fit` does only if a part of its model communicates, as Keras
    itself trains in one process.
    """
    return place()[1] > 1 and (loop or communicates(model))


def generator_state() -> np.ndarray[Any, Any] | None:
    """Return the state of the generator that layers draw from and that belongs to no variable, `None` where there is none."""
    return np.array(torch.get_rng_state().numpy())


def set_generator_state(state: np.ndarray[Any, Any]) -> None:
    """Put it back; a state of another backend says nothing here."""
    torch.set_rng_state(torch.from_numpy(np.array(state)))


def advance_generator() -> None:
    """Move the generator of the process on."""
    torch.rand(1)


def without_gradients() -> AbstractContextManager[Any]:
    """Return a context in which nothing is kept for a backward pass that will not come."""
    made: AbstractContextManager[Any] = torch.no_grad()
    return made

