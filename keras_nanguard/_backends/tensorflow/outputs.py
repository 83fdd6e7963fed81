"""Replaces the outputs of a refused step.

The logs of a refused step are those of the restored metrics: the running means without it, so that
no other callback receives NaN. A log of the user's own step that is not the result of a metric gets
the value of the last committed step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import tensorflow as tf

from keras_nanguard._backends.shared.outputs import MetricResults
from keras_nanguard._core.verdict import FIELDS, logged_losses

__all__ = ["LogOutputs", "PlainOutputs"]


def _leaves(outputs: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(outputs, expand_composites=True) if leaf is not None]


def _flat(outputs: Any) -> list[Any]:
    return [tf.convert_to_tensor(t) for t in _leaves(outputs)]


def _scalars(leaves: list[Any]) -> list[Any]:
    return [t for t in leaves if tf.is_tensor(t) and t.dtype.is_floating and t.shape.rank == 0]


def _is_tensor(value: Any) -> bool:
    return tf.is_tensor(value) or isinstance(value, (float, np.generic))


class PlainOutputs:
    """For a step without a trainer: its outputs are returned unchanged, and each scalar among them
    counts as its loss.
    """

    def losses(self, outputs: Any) -> list[Any]:
        """Return the scalars among the outputs."""
        return _scalars(
            [t for t in tf.nest.flatten(outputs, expand_composites=True) if t is not None]
        )

    def watched(self) -> AbstractContextManager[None]:
        """Do nothing while the body runs."""
        return nullcontext()

    def committed(self, outputs: Any) -> list[Any]:
        """Pass nothing through the conditional."""
        return []

    refused = committed

    def pack(self, flat: list[Any], outputs: Any) -> Any:
        """Return the outputs."""
        return outputs

    def join(self, outputs: Any, row: Any) -> Any:
        """Return the outputs of the compiled step."""
        return outputs, row

    def split(self, result: Any) -> tuple[Any, list[float]]:
        """Return outputs and row."""
        outputs, row = result
        return outputs, row.numpy().tolist()


class LogOutputs:
    """For a Keras train step: a dict of logs.

    Attributes:
        last: the logs of the last committed step that are not results of metrics; in a graph two
            variables for each of them.
    """

    def __init__(self, model: Any):
        self.last: dict[int, Any] = {}
        self.order: dict[str, int] | None = None
        self._results = MetricResults(model, tf.nest.flatten)

    def losses(self, outputs: Any) -> list[Any]:
        """Return the logs that are losses."""
        return _scalars([tf.convert_to_tensor(v) for v in tf.nest.flatten(logged_losses(outputs))])

    def watched(self) -> AbstractContextManager[None]:
        """Record the results of metrics while the body runs."""
        return self._results.noted()

    def committed(self, outputs: Any) -> list[Any]:
        """Store the logs that are not results of metrics, and return all logs."""
        for place, leaf in enumerate(_leaves(outputs)):
            if self._results.source(leaf) is not None:
                continue
            if tf.executing_eagerly():
                self.last[place] = tf.identity(leaf)
            else:
                kept, is_known = self._remembered(place, tf.convert_to_tensor(leaf))
                kept.assign(leaf)
                is_known.assign(True)
        return [tf.identity(leaf) for leaf in _leaves(outputs)]

    def refused(self, outputs: Any) -> list[Any]:
        """Return the results of the restored metrics, and the last committed values of all other
        logs.
        """
        leaves = _leaves(outputs)
        now = self._results.now([self._results.source(leaf) for leaf in leaves])
        return [
            self._last(place, leaf) if result is None else tf.cast(result, leaf.dtype)
            for place, (leaf, result) in enumerate(zip(leaves, now))
        ]

    def pack(self, flat: list[Any], outputs: Any) -> Any:
        """Return the logs after the conditional."""
        rest = iter(flat)
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(rest), outputs, expand_composites=True
        )

    def _last(self, place: int, leaf: Any) -> Any:
        """Return one log of the last committed step, or of this step if none has committed; the
        host replaces that.
        """
        value = tf.convert_to_tensor(leaf)
        if tf.executing_eagerly():
            return self.last.get(place, value)
        kept, is_known = self._remembered(place, value)
        return tf.cond(is_known, kept.read_value, lambda: value)

    def _remembered(self, place: int, value: Any) -> tuple[Any, Any]:
        """Return the variable for one log, and one for whether it is set, created outside of the
        graph on first use.
        """
        known = self.last.get(place)
        if (
            known is None
            or known[0].dtype != value.dtype
            or not known[0].shape.is_compatible_with(value.shape)
        ):
            with tf.init_scope():
                zeros = tf.zeros([d or 0 for d in value.shape], value.dtype)
                known = (
                    tf.Variable(zeros, shape=value.shape, trainable=False),
                    tf.Variable(False, trainable=False),
                )
                self.last[place] = known
        return known

    def join(self, outputs: Any, row: Any) -> Any:
        """Return the outputs of the compiled step: one vector, if every log is a scalar of the
        row's dtype.

        For a small model, Keras' handling of each returned tensor on the host costs more than all
        checks. One vector for all logs compensates for the row, too.
        """
        flat = _flat(outputs)
        plain = isinstance(outputs, dict) and all(map(_is_tensor, outputs.values()))
        if not (plain and flat) or any(t.shape.rank != 0 or t.dtype != row.dtype for t in flat):
            self.order = None
            return outputs, row
        places = {key: place for place, key in enumerate(sorted(outputs), int(row.shape[0]))}
        self.order = {key: places[key] for key in outputs}
        return tf.concat([row, tf.stack(flat)], axis=0)

    def split(self, result: Any) -> tuple[Any, list[float]]:
        """Return logs and row."""
        if isinstance(result, tuple):
            outputs, row = result
            return outputs, row.numpy().tolist()
        assert self.order is not None
        numbers = result.numpy().tolist()
        return {key: numbers[place] for key, place in self.order.items()}, numbers[: len(FIELDS)]
