"""Finds the loss in the outputs of a step on TensorFlow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_nanguard._core.verdict import logged_losses

__all__ = ["LogOutputs", "PlainOutputs"]


def _leaves(outputs: Any) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(outputs, expand_composites=True) if leaf is not None]


def _scalars(outputs: Any) -> list[Any]:
    tensors = [tf.convert_to_tensor(leaf) for leaf in _leaves(outputs) if _is_number(leaf)]
    return [t for t in tensors if t.dtype.is_floating and t.shape.rank == 0]


def _is_number(leaf: Any) -> bool:
    return bool(tf.is_tensor(leaf)) or isinstance(leaf, float)


class PlainOutputs:
    """For a step without a trainer: each scalar among its outputs counts as its loss."""

    def losses(self, outputs: Any) -> list[Any]:
        """Return the scalars among the outputs."""
        return _scalars(outputs)

    def logs(self, outputs: Any) -> list[Any]:
        """Return the components of the logs among the outputs: here none."""
        return []

    def packed(self, logs: Iterable[Any], outputs: Any) -> Any:
        """Return the outputs with these components of logs."""
        return outputs


class LogOutputs(PlainOutputs):
    """For a Keras train step: a dict of logs. The host replaces those of a refused step."""

    def losses(self, outputs: Any) -> list[Any]:
        """Return the logs that are losses."""
        return _scalars(logged_losses(outputs))

    def logs(self, outputs: Any) -> list[Any]:
        """Return the components of all logs."""
        return _leaves(outputs)

    def packed(self, logs: Iterable[Any], outputs: Any) -> Any:
        """Return the logs made of these components."""
        rest = iter(logs)
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(rest), outputs, expand_composites=True
        )
