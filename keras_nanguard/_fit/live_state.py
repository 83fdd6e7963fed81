"""The train state of the model in training, as the host reads it between two steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_nanguard._backends.interface import StateAccess
from keras_nanguard._core import finiteness
from keras_nanguard._fit.snapshots import compact
from keras_nanguard._keras import layers as keras_layers, variables as keras_variables
from keras_nanguard._keras.train_state import TrainState

__all__ = ["LiveState"]


class LiveState:
    """The train state of one run.

    Args:
        model: the guarded model.
        optimizers: the optimizers of a loop without a trainer; by default those of the model.

    Attributes:
        access: host access to the state, from the backend.
        tolerated: the `id` of each variable that may be infinite, because it was at first.
        nan_markers: the `id` of each of those that may be NaN as well.
    """

    def __init__(self, model: Any, optimizers: Any = None):
        self.model, self.optimizers = model, optimizers
        self.access = StateAccess()
        self.tolerated: set[int] = set()
        self.nan_markers: set[int] = set()
        self._created: dict[int, Any] | None = {}
        self._traced: TrainState | None = None

    def train_state(self) -> TrainState:
        """Return the train state of the last trace. The model's variables have or read as the
        present values.
        """
        self.access.sync_variables()
        return self._traced or self.read_train_state()

    def read_train_state(self) -> TrainState:
        """Return the present train state of the model."""
        train_state = TrainState.of(self.model, self.optimizers)
        self._traced = train_state if self._created is None else None
        return train_state

    def note_created(self, native: Any, value: Any) -> bool:
        """Store the first value of a backend variable that was created while tracing; return
        whether a new trace began.
        """
        begins = self._created is None
        if self._created is None:
            self._created = {}
        self._created[id(native)] = compact(value) if isinstance(value, np.ndarray) else value
        return begins

    def first_values(self) -> list[tuple[Any, Any]]:
        """Return the variables that were created while tracing, each with its first value."""
        created = self._created or {}
        return [
            (v, created[id(v.value)])
            for v in self.train_state().everything
            if id(v.value) in created
        ]

    def end_trace(self) -> list[tuple[Any, Any]]:
        """Return and forget the same, after the first step of a trace."""
        created = self.first_values() if self._created is not None else []
        self._created = None
        return created

    def tolerate(self, train_state: TrainState) -> list[Any]:
        """Tolerate Inf or NaN in variables that have them on purpose, besides those of an earlier
        fit; return all of them.
        """
        constants = train_state.constants
        bad = [v for v in constants if not finiteness.is_finite(keras_variables.view(v))]
        nan = {id(v) for v in bad if finiteness.counts(keras_variables.view(v))[0]}
        self.nan_markers |= nan & keras_layers.states_of_own_layers(self.model) if nan else set()
        self.tolerated |= self.nan_markers | {id(v) for v in bad} - nan
        return [v for v in constants if id(v) in self.tolerated]
