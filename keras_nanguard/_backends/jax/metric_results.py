"""Finds the logs of a train step that are results of metrics. A refused step logs the results of
the restored metrics instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from keras_nanguard._keras.overrides import Overrides

__all__ = ["MetricResults"]

Source = tuple[Any, int]
"""A metric, and the index among the leaves of its result."""


class MetricResults:
    """Recognizes the results of a model's metrics among the logs of its train step.

    Args:
        model: the model.
        leaves: returns the leaves of a nested structure of tensors.
    """

    def __init__(self, model: Any, leaves: Callable[[Any], list[Any]]):
        self.model, self.leaves = model, leaves
        self._noted: dict[int, tuple[Any, Any, int]] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Record the results of the metrics while the body of a step runs."""
        self.forget()
        with Overrides() as overrides:
            for metric in self.model.metrics:
                overrides.set(metric, "result", self._noting(metric, metric.result))
            yield

    def _noting(self, metric: Any, real: Callable[[], Any]) -> Callable[[], Any]:
        def result() -> Any:
            found = real()
            for place, leaf in enumerate(self.leaves(found)):
                self._noted[id(leaf)] = leaf, metric, place
            return found

        return result

    def forget(self) -> None:
        """Release the recorded results."""
        self._noted = {}

    def source(self, leaf: Any) -> Source | None:
        """Return the recorded metric result that a log is, or `None`."""
        noted = self._noted.get(id(leaf))
        return None if noted is None else noted[1:]

    def now(self, sources: Sequence[Source | None]) -> list[Any]:
        """Return the present result of each source, or `None`."""
        results = {id(source[0]): source[0] for source in sources if source is not None}
        leaves = {key: self.leaves(metric.result()) for key, metric in results.items()}
        return [None if source is None else leaves[id(source[0])][source[1]] for source in sources]
