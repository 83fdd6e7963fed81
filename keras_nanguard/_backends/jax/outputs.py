"""What a JAX step returns beside its state, and what a refused one hands back in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_nanguard._backends.jax import reductions
from keras_nanguard._backends.shared.outputs import MetricResults
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.verdict import logged_losses

__all__ = ["LogOutputs", "PlainOutputs"]


def _scalars(tree: Any) -> list[Any]:
    leaves = [jnp.asarray(leaf) for leaf in jax.tree_util.tree_leaves(tree) if isinstance(leaf, (float, jax.Array))]
    return [leaf for leaf in leaves if leaf.ndim == 0 and reductions.can_be_bad(leaf)]


def _check(found: Any, wanted: Any) -> None:
    if found != wanted:
        remedy = "Return the new state in the structure of the state that the step is given."
        raise GuardError(expected(f"a step that returns a state of the structure {wanted}", f"{found}", remedy))


class PlainOutputs:
    """For a step with no trainer: its outputs go back as they are, and each scalar among them counts as its loss.

    Attributes:
        apart: whether outputs stay arrays of their own, because nobody waits for the vector before they are needed.
    """

    apart = False

    def split_outputs(self, result: Any) -> tuple[Any, Any]:
        """Return outputs and state of what the body returned."""
        if not isinstance(result, tuple) or len(result) != 2:
            remedy = "Write a step as `def step(state, *batch): ...; return loss, state`."
            raise GuardError(expected("a step that returns (outputs, state)", f"{type(result).__name__}", remedy))
        return result

    def check(self, found: Any, wanted: Any) -> None:
        """Raise where the new state is not of the structure of the old one."""
        _check(found, wanted)

    def losses(self, outputs: Any) -> list[Any]:
        """Return the scalars among the outputs."""
        return _scalars(outputs)

    def watched(self) -> AbstractContextManager[None]:
        """Nothing has to be known of how they come about."""
        return nullcontext()

    def note(self, outputs: Any) -> None:
        """Nothing has to be known of them."""

    def results(self, outputs: Any, metrics: Any) -> Any:
        """Return the outputs as they are."""
        return outputs

    def join(self, outputs: Any, dtype: Any) -> tuple[Any, list[Any]]:
        """Return what leaves the step by itself, and the scalars that leave it in one vector with the verdict."""
        return outputs, []

    def split(self, outputs: Any, numbers: list[float]) -> Any:
        """Return the outputs again, on the host."""
        return outputs


class LogOutputs(PlainOutputs):
    """For a Keras train step: a dict of logs.

    Attributes:
        lasting: whether every log is the result of a metric, and so that of the restored one where the step is refused.
        keys: the logs that leave the step as numbers in one vector; `None` where they do not.
    """

    def __init__(self, model: Any):
        self.lasting = False
        self.keys: tuple[str, ...] | None = None
        self._results = MetricResults(model, jax.tree_util.tree_leaves)
        self._held: list[tuple[Any, int] | None] = []

    def losses(self, outputs: Any) -> list[Any]:
        """Return the logs that are losses."""
        return _scalars(logged_losses(outputs))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While the body of a step runs, note the results of metrics: a log that is one of them is known again."""
        with self._results.noted():
            yield
        self._results.forget()

    def note(self, outputs: Any) -> None:
        """Find the logs among the results that were noted."""
        self._held = [self._results.source(leaf) for leaf in jax.tree_util.tree_leaves(outputs)]
        self.lasting = None not in self._held

    def results(self, outputs: Any, metrics: Any) -> Any:
        """Return the logs with those that are results of metrics taken from these values of the metrics."""
        leaves, tree = jax.tree_util.tree_flatten(outputs)
        with keras.StatelessScope(state_mapping=metrics):
            now = self._results.now(self._held)
        leaves = [leaf if result is None else result for leaf, result in zip(leaves, now)]
        return jax.tree_util.tree_unflatten(tree, leaves)

    def join(self, outputs: Any, dtype: Any) -> tuple[Any, list[Any]]:
        """Put all logs into the vector, where each is a scalar of its dtype: reading one array is cheaper than several."""
        values = list(outputs.values()) if isinstance(outputs, dict) else []
        arrays = [jnp.asarray(v) for v in values if isinstance(v, (float, jax.Array, np.ndarray, np.generic))]
        if self.apart or not values or len(arrays) < len(values) or any(a.ndim or a.dtype != dtype for a in arrays):
            self.keys = None
            return outputs, []
        self.keys = tuple(outputs)
        return None, arrays

    def split(self, outputs: Any, numbers: list[float]) -> Any:
        """Return the logs."""
        return outputs if self.keys is None else dict(zip(self.keys, numbers))
