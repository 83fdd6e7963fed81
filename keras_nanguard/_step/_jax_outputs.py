"""What a JAX step returns beside its state, and what a refused one hands back in its place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras

from keras_nanguard._errors import GuardError, expected
from keras_nanguard._step import _jax_sums as _sums
from keras_nanguard._step._verdict import logged_losses

__all__ = ["LogOutputs", "PlainOutputs"]


def _scalars(tree: Any) -> list[Any]:
    leaves = [jnp.asarray(leaf) for leaf in jax.tree_util.tree_leaves(tree) if isinstance(leaf, (float, jax.Array))]
    return [leaf for leaf in leaves if leaf.ndim == 0 and _sums.can_be_bad(leaf)]


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

    def parted(self, result: Any) -> tuple[Any, Any]:
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
        lasting: whether every log is the result of a metric, and so finite even when the step is refused.
        keys: the logs that leave the step as numbers in one vector; `None` where they do not.
    """

    def __init__(self, model: Any):
        self.model = model
        self.lasting = False
        self.keys: tuple[str, ...] | None = None

    def losses(self, outputs: Any) -> list[Any]:
        """Return the logs that are losses."""
        return _scalars(logged_losses(outputs))

    def results(self, outputs: Any, metrics: Any) -> Any:
        """Return the results of the metrics with these values, where they are what the step logs."""
        self.lasting = False
        if not isinstance(outputs, dict):
            return outputs
        with keras.StatelessScope(state_mapping=metrics):
            found = self.model.get_metrics_result()
        self.lasting = set(found) == set(outputs)
        return {key: found[key] for key in outputs} if self.lasting else outputs

    def join(self, outputs: Any, dtype: Any) -> tuple[Any, list[Any]]:
        """Put all logs into the vector, where each is a scalar of its dtype: reading one array is cheaper than several."""
        arrays = {k: jnp.asarray(v) for k, v in outputs.items()} if isinstance(outputs, dict) else {}
        if self.apart or not arrays or any(a.ndim or a.dtype != dtype for a in arrays.values()):
            self.keys = None
            return outputs, []
        self.keys = tuple(arrays)
        return None, list(arrays.values())

    def split(self, outputs: Any, numbers: list[float]) -> Any:
        """Return the logs."""
        return outputs if self.keys is None else dict(zip(self.keys, numbers))
