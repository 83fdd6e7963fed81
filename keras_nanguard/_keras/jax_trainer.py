"""The train state while Keras trains on JAX: in arrays that are passed from step to step, or in the
variables.

Private names of Keras:

- ``Model._jax_state``, ``Model._jax_state_synced``: the state that ``jax_state_sync`` writes to the
  variables, and whether it has done so; a state that is restored or changed between two steps has
  to be set there.
- ``Model._get_jax_state``: gathers the state from the variables as ``fit`` does, and purges them,
  so that no variable holds an array that is donated to the next step.
- ``Model._make_function``: the loop over ``steps_per_execution``; the guarded step runs inside it.
  Keras 3.6 has none.
- ``Model._symbolic_build``: builds metrics and optimizer as ``fit`` does before its first step.
- ``Model._record_training_state_sharding_spec``: only Keras 3.9 has it. A train step there needs
  its record, which `fit` releases at its end (tested by `make matrix`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras

from keras_nanguard._keras.overrides import Overrides, set_instance

_PARTS = (
    "trainable_variables",
    "non_trainable_variables",
    "optimizer_variables",
    "metrics_variables",
)


class TrainerState:
    """The train state between two steps.

    A healthy step never touches the variables. When the host has to read or change the state,
    `sync_variables` writes it to the variables, and `take` gathers it again.

    Args:
        model: the model that `fit` trains.
    """

    def __init__(self, model: Any):
        self.model = model
        self.state: Any = None
        self.synced = self.reading = False
        self._ids: list[int] | None = None

    def receive(self, state: Any) -> bool:
        """Store the state that Keras passes to a step; return whether it was gathered anew."""
        gathered = state is not self.state
        if gathered:
            self._ids = None
            self.hold(state)
        return gathered

    def hold(self, state: Any) -> None:
        """Store the current state, also in the attribute that Keras reads when `fit` ends early."""
        self.state, self.synced = state, False
        self._publish()

    def _publish(self) -> None:
        """Set the attribute of Keras, without its tracking, which is slower than a small step."""
        set_instance(self.model, "_jax_state", dict(zip(_PARTS, self.state)))

    @property
    def _readable(self) -> bool:
        """Whether the variables read as the current state."""
        known = self.state is None or self.synced or self.reading
        return known or bool(self.model._jax_state_synced)

    def sync_variables(self) -> None:
        """Write the current state to the variables."""
        if self._readable:
            return
        self.synced = True
        self._publish()
        self.model._jax_state_synced = False
        self.model.jax_state_sync()

    @contextlib.contextmanager
    def variables_readable(self) -> Iterator[None]:
        """Let the variables read as the current state inside the context, without writing them."""
        if self._readable:
            yield
            return
        if self._ids is None:
            self._ids = list(map(id, variables(self.model)))
        self.reading = True
        try:
            with keras.StatelessScope() as scope:
                scope.state_mapping.update(zip(self._ids, jax.tree_util.tree_leaves(self.state)))
                yield
        finally:
            self.reading = False

    def take(self) -> Any:
        """Return the current state in the form that the next step takes."""
        if self.synced:
            self.state = self.model._get_jax_state(
                **dict.fromkeys(_PARTS, True), purge_model_variables=True
            )
            self.model._jax_state_synced = False
            self.synced = False
        return self.state

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Let steps run inside the context although the variables hold the state. After it they
        hold it again. Used while callbacks act.
        """
        if not self.model._jax_state_synced:
            yield
            return
        state = self.model._get_jax_state(**dict.fromkeys(_PARTS, True))
        self.hold(
            jax.tree_util.tree_map(
                lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, state
            )
        )
        try:
            yield
        finally:
            self.model._jax_state_synced = self.synced = False
            self.sync_variables()

    def rescue(self) -> None:
        """Write the state to the variables after a step has raised, unless it was donated."""
        leaves = jax.tree_util.tree_leaves(self.state)
        if not any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            self.sync_variables()


def by_part(model: Any) -> tuple[list[Any], ...]:
    """Return the variables of a model in the four lists of the state of `fit`."""
    return (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )


def variables(model: Any) -> list[Any]:
    """Return the variables of a model in the order of the state of `fit`."""
    return [v for part in by_part(model) for v in part]


def stored(model: Any) -> tuple[list[Any], ...]:
    """Return the state of `fit` with the current values of the variables."""
    return tuple([v.value for v in part] for part in by_part(model))


def ready(model: Any, data: Any) -> None:
    """Build metrics and optimizer, and record shardings, as `fit` does before its first step."""
    if not model.optimizer.built or not model.metrics_variables:
        model._symbolic_build(data_batch=data)
        model.optimizer.build(model.trainable_variables)
    record = getattr(model, "_record_training_state_sharding_spec", None)
    if record is not None:
        record()


def in_executions(model: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step as Keras runs it: over an iterator of batches, `steps_per_execution` at a
    time; over a list in Keras 3.6. It compiles itself, so Keras 3.16 must not compile the loop.
    """
    with Overrides() as overrides:
        overrides.set(model, "jit_compile", False)
        function: Callable[..., Any] = getattr(model, "_make_function", over_lists)(step)
    return function


def over_lists(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step over a list of batches."""

    def over_list(state: Any, batches: Any) -> Any:
        logs = None
        for batch in batches:
            logs, state = step(state, batch)
        return logs, state

    return over_list


def shardings(model: Any) -> Any:
    """Return the shardings of the arrays of the state, `None` if all of them are on one device."""
    several = keras.distribution.distribution() is not None
    return tuple([v.value.sharding for v in part] for part in by_part(model)) if several else None


def uses_nnx() -> bool:
    """Whether Keras keeps its variables in NNX modules, which Keras 3.9 and older cannot."""
    return bool(getattr(keras.config, "is_nnx_enabled", bool)())


def shares_memory(data: Any) -> bool:
    """Whether an iterator gives the batch of `train_on_batch`: on a CPU its arrays may be views of
    the caller's NumPy arrays.
    """
    return str(getattr(data, "__qualname__", "")).endswith("train_on_batch.<locals>.data")
