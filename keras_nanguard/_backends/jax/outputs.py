"""The outputs of a JAX step besides its state, and the results of metrics among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import keras

from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._keras.overrides import Overrides


def split(result: Any) -> tuple[Any, Any]:
    """Return outputs and state from the result of a step.

    Raises:
        GuardError: if it is not a pair.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        remedy = "Write a step as `def step(state, *batch): ...; return loss, state`."
        found = type(result).__name__
        raise GuardError(expected("a step that returns (outputs, state)", found, remedy))
    return result


def check_structure(found: Any, wanted: Any) -> None:
    """Check that the new state has the structure of the old one.

    Raises:
        GuardError: if it has not.
    """
    if found != wanted:
        remedy = "Return the new state in the structure of the state that the step is given."
        what = f"a step that returns a state of the structure {wanted}"
        raise GuardError(expected(what, f"{found}", remedy))


class MetricResults(Overrides):
    """Context that records the results of metrics, to recognize them among the outputs.

    Args:
        metrics: the metrics.
    """

    def __init__(self, metrics: Iterable[Any]):
        super().__init__()
        self._metrics = metrics
        self._results: dict[int, tuple[Any, Any, int]] = {}

    def __enter__(self) -> MetricResults:
        for metric in self._metrics:
            self.set(metric, "result", self._noting(metric, metric.result))
        return self

    def _noting(self, metric: Any, real: Callable[[], Any]) -> Callable[[], Any]:
        def result() -> Any:
            found = real()
            for index, leaf in enumerate(jax.tree_util.tree_leaves(found)):
                self._results[id(leaf)] = leaf, metric, index
            return found

        return result

    def sources(self, outputs: Any) -> list[tuple[Any, int] | None]:
        """Return for each output the metric, and the leaf of its result, that it is."""
        found = (self._results.get(id(leaf)) for leaf in jax.tree_util.tree_leaves(outputs))
        return [None if one is None else one[1:] for one in found]


def with_metrics(outputs: Any, sources: Sequence[tuple[Any, int] | None], values: Any) -> Any:
    """Return the outputs, with results of metrics computed from other values of their variables.

    Args:
        outputs: the outputs of a step.
        sources: those that `MetricResults` found.
        values: `(variable, value)` of the metrics.
    """
    leaves, tree = jax.tree_util.tree_flatten(outputs)
    metrics = {id(source[0]): source[0] for source in sources if source is not None}
    with keras.StatelessScope(state_mapping=values):
        results = {key: jax.tree_util.tree_leaves(m.result()) for key, m in metrics.items()}
    for place, source in enumerate(sources):
        if source is not None:
            leaves[place] = results[id(source[0])][source[1]]
    return jax.tree_util.tree_unflatten(tree, leaves)
