"""A guarded run, as a diagnosis reads it."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Protocol

from keras_nanguard._core.history import History
from keras_nanguard._keras.train_state import TrainState

__all__ = ["GuardedRun"]


class GuardedRun(Protocol):
    """A guarded run, as a diagnosis reads it."""

    directory: str | None
    history: History
    ring: Any
    recent: Any
    transaction: Any

    @property
    def model(self) -> Any:
        """The guarded model."""

    @property
    def step(self) -> int:
        """How many train steps are complete."""

    @property
    def tolerated(self) -> Set[int]:
        """The `id` of each variable that may be infinite."""

    def train_state(self) -> TrainState:
        """Return the train state of this moment."""
