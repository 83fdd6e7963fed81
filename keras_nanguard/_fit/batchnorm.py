"""The moving statistics of BatchNormalization, and their re-estimation while training continues.

The estimate is the cumulative average over the next batches: an estimate from the last ones would
soon be outdated, as the weights may change fast, and the moving average follows late. BatchNorm
updates its statistics by ``new = momentum * old + (1 - momentum) * batch``. Over the `k` steps
between two readings on the host this is

    new = momentum**k * old + (1 - momentum**k) * mean of the k batches (later ones weigh slightly
    more)

So this mean follows from the values before and after, and the running mean of all batches replaces
the moving average. (PyTorch's BatchNorm computes the same with ``momentum=None``.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_nanguard._keras import layers as keras_layers, variables as keras_variables


def trained(model: Any) -> list[Any]:
    """Return the BatchNormalization layers that are not frozen."""
    return [layer for layer in keras_layers.batchnorms(model) if layer.trainable]


def learning(model: Any) -> list[Any]:
    """Return the BatchNormalization layers whose statistics a train step updates."""
    return [layer for layer in trained(model) if layer.momentum < 1.0]


def initial_statistics(layers: list[Any]) -> list[tuple[Any, Any]]:
    """Return the statistics of BatchNormalization layers with their initial values."""
    pairs = [(layer.moving_mean, layer.moving_mean_initializer) for layer in layers]
    pairs += [(layer.moving_variance, layer.moving_variance_initializer) for layer in layers]
    return [
        (v, keras_variables.read_tensor(initializer(tuple(v.shape), dtype=v.dtype)))
        for v, initializer in pairs
    ]


class Recalibration:
    """An estimate in progress. Start it when the statistics have any finite value.

    Args:
        layers: BatchNormalization layers that update their statistics.
        batches: number of batches to average over.
        seen: number of batches that are already included.
    """

    def __init__(self, layers: list[Any], batches: int, seen: int = 0):
        self.layers, self.left, self.seen = layers, batches, seen
        self._good: int | None = None
        self._variables = [
            (variable, float(layer.momentum))
            for layer in layers
            for variable in (layer.moving_mean, layer.moving_variance)
        ]
        self._before = self._read()

    def step(self, good: int) -> bool:
        """Include the steps that were committed since the last call; return whether the estimate is
        complete.

        Args:
            good: number of committed steps of the fit.
        """
        if self._good is None or good <= self._good:
            return False
        count, self._good = good - self._good, good
        self.seen += count
        self.left -= count
        for before, (variable, momentum) in zip(self._before, self._variables):
            kept = momentum**count
            batches = (_wide(variable) - kept * before) / (1.0 - kept)
            mean = before + (batches - before) * count / self.seen
            keras_variables.write(variable, mean.astype(keras_variables.view(variable).dtype))
        self._before = self._read()
        return self.left <= 0

    def begin_counting(self, good: int) -> None:
        """Begin to count, if the estimate was started since the last execution."""
        self._good = good if self._good is None else self._good

    def restart(self) -> None:
        """Restart from the current statistics, after other code has written them."""
        self.left += self.seen
        self.seen, self._good = 0, None
        self._before = self._read()

    def _read(self) -> list[np.ndarray[Any, Any]]:
        return [_wide(variable) for variable, _ in self._variables]


def _wide(variable: Any) -> np.ndarray[Any, Any]:
    return keras_variables.read(variable).astype(np.float64)
