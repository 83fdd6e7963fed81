"""What the host's side asks of PyTorch: its processes, its generator of random numbers, a pass without gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed

__all__ = ["SPREADS_ARRAYS", "advance_generator", "exchanged", "generator_state", "place", "set_generator_state", "without_gradients"]
SPREADS_ARRAYS = False
"""Whether one array may be spread over several processes, so that none of them can compute with it alone."""


def place() -> tuple[int, int]:
    """Return the number of this process among those that train together, from 0, and how many there are."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def exchanged(number: int) -> list[int]:
    """Return the numbers that all processes hand in, in their order."""
    found = [0] * place()[1]
    torch.distributed.all_gather_object(found, number)
    return found


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

