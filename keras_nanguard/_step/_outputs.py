"""What a refused step hands back in place of its outputs.

The logs of a refused step are those of the restored metrics: the running means without it, so that no other callback
sees a NaN. Where a user's own step logs something that no metric holds, the value of the last committed step stands in.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_nanguard._step._verdict import FIELDS, logged_losses

__all__ = ["LogOutputs", "PlainOutputs"]


def _flat(outputs: Any) -> list[Any]:
    return [tf.convert_to_tensor(t) for t in tf.nest.flatten(outputs, expand_composites=True)]


def _scalars(leaves: list[Any]) -> list[Any]:
    return [t for t in leaves if tf.is_tensor(t) and t.dtype.is_floating and t.shape.rank == 0]


class PlainOutputs:
    """For a step with no trainer: its outputs go back as they are, and each scalar among them counts as its loss."""

    def losses(self, outputs: Any) -> list[Any]:
        """Return the scalars among the outputs."""
        return _scalars([t for t in tf.nest.flatten(outputs, expand_composites=True) if t is not None])

    def committed(self, outputs: Any) -> list[Any]:
        """Nothing has to pass through the conditional."""
        return []

    refused = committed

    def pack(self, flat: list[Any], outputs: Any) -> Any:
        """Return the outputs."""
        return outputs

    def join(self, outputs: Any, row: Any) -> Any:
        """Return what leaves the compiled step."""
        return outputs, row

    def split(self, result: Any) -> tuple[Any, list[float]]:
        """Return outputs and row."""
        outputs, row = result
        return outputs, row.numpy().tolist()


class LogOutputs:
    """For a Keras train step: a dict of logs."""

    def __init__(self, model: Any):
        self.model = model
        self.last: list[Any] = []
        self.order: dict[str, int] | None = None

    def losses(self, outputs: Any) -> list[Any]:
        """Return the logs that are losses."""
        return _scalars([tf.convert_to_tensor(v) for v in tf.nest.flatten(logged_losses(outputs))])

    def committed(self, outputs: Any) -> list[Any]:
        """Remember the logs that no metric holds, and return them."""
        if self._from_metrics(outputs) is not None:
            return []
        flat = _flat(outputs)
        for variable, value in zip(self._remembered(flat), flat):
            variable.assign(value)
        return [tf.identity(t) for t in flat]

    def refused(self, outputs: Any) -> list[Any]:
        """Return the logs of the last committed step where no metric holds them."""
        if self._from_metrics(outputs) is not None:
            return []
        return [v.read_value() for v in self._remembered(_flat(outputs))]

    def pack(self, flat: list[Any], outputs: Any) -> Any:
        """Return the logs: what came through the conditional, or the results of the metrics as they are after it."""
        metrics = self._from_metrics(outputs)
        if metrics is not None:
            flat = [tf.cast(t, f.dtype) for t, f in zip(metrics, _flat(outputs))]
        return tf.nest.pack_sequence_as(outputs, flat, expand_composites=True)

    def join(self, outputs: Any, row: Any) -> Any:
        """Return what leaves the compiled step: one vector, where every log is a scalar of the row's dtype.

        What Keras does on the host for each tensor that a step returns costs more than everything else here does for a
        small model; one vector for all logs pays for the row, too.
        """
        flat = _flat(outputs)
        plain = isinstance(outputs, dict) and 0 < len(flat) == len(outputs)
        if not plain or any(t.shape.rank != 0 or t.dtype != row.dtype for t in flat):
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

    def _from_metrics(self, outputs: Any) -> list[Any] | None:
        results = self.model.get_metrics_result()
        if not isinstance(outputs, dict) or set(results) != set(outputs):
            return None
        flat = _flat({key: results[key] for key in outputs})
        return flat if len(flat) == len(_flat(outputs)) else None

    def _remembered(self, flat: list[Any]) -> list[Any]:
        """One variable for each log, made outside of the graph on first use."""
        if len(self.last) != len(flat):
            with tf.init_scope():
                self.last = [
                    tf.Variable(tf.zeros([d or 0 for d in t.shape], t.dtype), shape=t.shape, trainable=False)
                    for t in flat
                ]
        return self.last
