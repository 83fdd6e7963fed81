"""Process functions of PyTorch: its processes, its random generator, a pass without gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from keras_nanguard._backends.torch.group import gathered, place
from keras_nanguard._backends.torch.local_replay import communicates, is_sharded

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


def trains_together(model: Any, loop: bool) -> bool:
    """Return whether this process trains the model with others.

    A loop does if the process group has several members. A `fit` does only if a part of its model
    communicates, because Keras itself trains in one process.
    """
    return place()[1] > 1 and (loop or communicates(model))


def generator_state() -> np.ndarray[Any, Any] | None:
    """Return the state of the generator that belongs to no variable, or `None`."""
    return np.array(torch.get_rng_state().numpy())


def set_generator_state(state: np.ndarray[Any, Any]) -> None:
    """Restore this state. A state of another backend is ignored."""
    torch.set_rng_state(torch.from_numpy(np.array(state)))


def advance_generator() -> None:
    """Advance the generator of the process."""
    torch.rand(1)


def without_gradients() -> AbstractContextManager[Any]:
    """Return a context without recording for a backward pass."""
    made: AbstractContextManager[Any] = torch.no_grad()
    return made
