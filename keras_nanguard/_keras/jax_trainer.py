"""Where the train state is while Keras trains on JAX: in arrays that go from step to step, or in the variables.

Names private to Keras that are used here, each because no public way exists:

- ``Model._jax_state``, ``Model._jax_state_synced``: what ``jax_state_sync`` writes back to the variables, and whether it
  has been done; a state that is put back or changed between two steps has to be announced there.
- ``Model._get_jax_state``: gathers the state from the variables as ``fit`` does, and empties them, so that no variable
  keeps an array that the next step is given to destroy.
- ``Model._make_function``: the loop over ``steps_per_execution``; standing inside of it keeps it Keras' own.
- ``Model._get_state_sharding_spec``: on several devices, where each array of the state lies.
- ``Model._symbolic_build``: builds metrics and optimizer as ``fit`` does before its first step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras

__all__ = ["TrainerState", "by_part", "in_executions", "ready", "shardings", "variables"]

_PARTS = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")


class TrainerState:
    """The train state between two steps.

    A healthy step never touches the variables. When the host has to look at the state or change it, `sync_variables` puts it
    into them, and `take` gathers it again.

    Args:
        model: the model that `fit` trains.
        values: returns the arrays of a state, flat, to be looked at.
    """

    def __init__(self, model: Any, values: Callable[[Any], list[Any]] = jax.tree_util.tree_leaves):
        self.model, self._values = model, values
        self.state: Any = None
        self.synced = self.showing = False
        self._ids: list[int] | None = None

    def receive(self, state: Any) -> None:
        """Note the state that Keras hands to a step; another one than it was handed was gathered from the variables."""
        if state is not self.state:
            self._ids = None
        self.hold(state)

    def hold(self, state: Any) -> None:
        """Note the state of this moment."""
        self.state, self.synced = state, False

    def sync_variables(self) -> None:
        """Make the variables hold the state of this moment."""
        if self.state is None or self.synced or self.showing or self.model._jax_state_synced:
            return
        self.synced = True
        self.model._jax_state = dict(zip(_PARTS, self.state))
        self.model._jax_state_synced = False
        self.model.jax_state_sync()

    @contextlib.contextmanager
    def variables_readable(self) -> Iterator[None]:
        """Let the variables read as the state of this moment without holding it, which is enough to look at it."""
        if self.state is None or self.synced or self.showing or self.model._jax_state_synced:
            yield
            return
        if self._ids is None:
            self._ids = list(map(id, variables(self.model)))
        self.showing = True
        try:
            with keras.StatelessScope() as scope:
                scope.state_mapping.update(zip(self._ids, self._values(self.state)))
                yield
        finally:
            self.showing = False

    def take(self) -> Any:
        """Return the state of this moment, as the next step wants it."""
        if self.synced:
            self.state = self.model._get_jax_state(**dict.fromkeys(_PARTS, True), purge_model_variables=True)
            self.model._jax_state_synced = False
            self.synced = False
        return self.state

    def rescue(self) -> None:
        """Leave the state in the variables when a step has failed, unless it was consumed."""
        leaves = jax.tree_util.tree_leaves(self.state)
        if not any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            self.sync_variables()


def by_part(model: Any) -> tuple[list[Any], ...]:
    """Return the variables of a model in the four lists in which `fit` hands out their values."""
    return model.trainable_variables, model.non_trainable_variables, model.optimizer.variables, model.metrics_variables


def variables(model: Any) -> list[Any]:
    """Return the variables of a model in the order in which `fit` hands out their values."""
    return [v for part in by_part(model) for v in part]


def ready(model: Any, data: Any) -> None:
    """Build what `fit` would build before a first step on this data."""
    if not model.optimizer.built or not model.metrics_variables:
        model._symbolic_build(data_batch=data)
        model.optimizer.build(model.trainable_variables)


def in_executions(model: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step as Keras runs it: taking its batches from an iterator, `steps_per_execution` at a time."""
    made: Callable[..., Any] = model._make_function(step)
    return made


def shardings(model: Any) -> Any:
    """Return where the arrays of the state lie, `None` where all of them are on one device."""
    return model._get_state_sharding_spec() if keras.distribution.distribution() is not None else None
