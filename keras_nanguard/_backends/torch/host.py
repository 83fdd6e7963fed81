"""Process functions of PyTorch: its processes, its random generator, a pass without gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from keras_nanguard._backends import interface
from keras_nanguard._backends.torch import group, local_replay

__all__ = ["Host"]


class Host(interface.Host):
    """Functions for the process as a whole."""

    def place(self) -> tuple[int, int]:
        return group.place()

    def trains_together(self, model: Any, loop: bool) -> bool:
        """Return whether this process trains the model with others.

        A loop does if the process group has several members. A `fit` does only if a part of its
        model communicates, because Keras itself trains in one process.
        """
        return self.place()[1] > 1 and (loop or local_replay.communicates(model))

    def is_sharded(self, model: Any) -> bool:
        return local_replay.is_sharded(model)

    def gathered(self, payload: bytes, what: str) -> list[bytes]:
        return group.gathered(payload, what)

    def generator_state(self) -> np.ndarray[Any, Any] | None:
        return np.array(torch.get_rng_state().numpy())

    def set_generator_state(self, state: np.ndarray[Any, Any]) -> None:
        torch.set_rng_state(torch.from_numpy(np.array(state)))

    def advance_generator(self) -> None:
        torch.rand(1)

    def without_gradients(self) -> AbstractContextManager[Any]:
        made: AbstractContextManager[Any] = torch.no_grad()
        return made
