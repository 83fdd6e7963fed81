"""The outputs of a JAX step besides its state, and their replacement after a refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_nanguard._backends.jax import reductions
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.verdict import logged_losses
from keras_nanguard._keras.overrides import Overrides


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
    """For a Keras train step: a dict of logs, in which the results of metrics are recognized.

    A refused step logs the results of the restored metrics instead.
    """

    def __init__(self, model: Any):
        self.model = model
        self._results: dict[int, tuple[Any, Any, int]] = {}
        self._sources: list[tuple[Any, int] | None] = []

    def losses(self, outputs: Any) -> list[Any]:
        """Return the logs that are losses."""
        return _scalars(logged_losses(outputs))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the results of metrics while the body runs, to recognize them among the logs."""
        with Overrides() as overrides:
            for metric in self.model.metrics:
                overrides.set(metric, "result", self._noting(metric, metric.result))
            yield
        self._results = {}

    def _noting(self, metric: Any, real: Callable[[], Any]) -> Callable[[], Any]:
        def result() -> Any:
            found = real()
            for index, leaf in enumerate(jax.tree_util.tree_leaves(found)):
                self._results[id(leaf)] = leaf, metric, index
            return found

        return result

    def note(self, outputs: Any) -> None:
        """Store of each log which metric, and which leaf of its result, it is."""
        found = [self._results.get(id(leaf)) for leaf in jax.tree_util.tree_leaves(outputs)]
        self._sources = [None if one is None else one[1:] for one in found]
        self.lasting = None not in self._sources

    def results(self, outputs: Any, metrics: Any) -> Any:
        """Return the logs, with results of metrics computed from these values of the metrics."""
        logs, tree = jax.tree_util.tree_flatten(outputs)
        with keras.StatelessScope(state_mapping=metrics):
            known = {id(source[0]): source[0] for source in self._sources if source is not None}
            leaves = {key: jax.tree_util.tree_leaves(m.result()) for key, m in known.items()}
        for place, source in enumerate(self._sources):
            if source is not None:
                logs[place] = leaves[id(source[0])][source[1]]
        return jax.tree_util.tree_unflatten(tree, logs)
