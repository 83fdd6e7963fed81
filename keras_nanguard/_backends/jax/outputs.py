"""The outputs of a JAX step besides its state, and their replacement after a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_nanguard._backends.jax import reductions
from keras_nanguard._backends.jax.metric_results import MetricResults
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.verdict import logged_losses

__all__ = ["LogOutputs", "PlainOutputs"]


def _scalars(tree: Any) -> list[Any]:
    found = jax.tree_util.tree_leaves(tree)
    leaves = [jnp.asarray(leaf) for leaf in found if isinstance(leaf, (float, jax.Array))]
    return [leaf for leaf in leaves if leaf.ndim == 0 and reductions.can_be_bad(leaf)]


class PlainOutputs:
    """For a step without a trainer: its outputs are returned unchanged, and each scalar among them
    counts as its loss.
    """

    lasting = False
    """Whether every log of a refused step is that of the restored metrics."""

    def split_outputs(self, result: Any) -> tuple[Any, Any]:
        """Return outputs and state from the result of the body."""
        if not isinstance(result, tuple) or len(result) != 2:
            remedy = "Write a step as `def step(state, *batch): ...; return loss, state`."
            found = type(result).__name__
            raise GuardError(expected("a step that returns (outputs, state)", found, remedy))
        return result

    def check(self, found: Any, wanted: Any) -> None:
        """Raise if the structure of the new state differs from the old one."""
        if found != wanted:
            remedy = "Return the new state in the structure of the state that the step is given."
            what = f"a step that returns a state of the structure {wanted}"
            raise GuardError(expected(what, f"{found}", remedy))

    def losses(self, outputs: Any) -> list[Any]:
        """Return the scalars among the outputs."""
        return _scalars(outputs)

    def watched(self) -> AbstractContextManager[None]:
        """Return a context in which the body runs."""
        return nullcontext()

    def note(self, outputs: Any) -> None:
        """Store the outputs of the body."""

    def results(self, outputs: Any, metrics: Any) -> Any:
        """Return the outputs for these values of the metrics."""
        return outputs


class LogOutputs(PlainOutputs):
    """For a Keras train step: a dict of logs."""

    def __init__(self, model: Any):
        self._results = MetricResults(model, jax.tree_util.tree_leaves)
        self._held: list[tuple[Any, int] | None] = []

    def losses(self, outputs: Any) -> list[Any]:
        """Return the logs that are losses."""
        return _scalars(logged_losses(outputs))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the results of metrics while the body runs, to recognize them among the logs."""
        with self._results.noted():
            yield
        self._results.forget()

    def note(self, outputs: Any) -> None:
        """Find the logs among the recorded results."""
        leaves = jax.tree_util.tree_leaves(outputs)
        self._held = [self._results.source(leaf) for leaf in leaves]
        self.lasting = None not in self._held

    def results(self, outputs: Any, metrics: Any) -> Any:
        """Return the logs, with results of metrics computed from these values of the metrics."""
        leaves, tree = jax.tree_util.tree_flatten(outputs)
        with keras.StatelessScope(state_mapping=metrics):
            now = self._results.now(self._held)
        leaves = [leaf if result is None else result for leaf, result in zip(leaves, now)]
        return jax.tree_util.tree_unflatten(tree, leaves)
