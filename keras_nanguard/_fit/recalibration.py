"""Estimating BatchNorm statistics anew while training goes on: the cumulative average of the batches to come.

BatchNorm moves its statistics by ``new = momentum * old + (1 - momentum) * batch``. Over the `k` steps between two looks
of the host that is::

    new = momentum**k * old + (1 - momentum**k) * mean of the k batches, the later ones weighing a little more

so that mean follows from the value before and the value after, and the running mean of all batches so far replaces the
moving average. (The cumulative moving average is what PyTorch's BatchNorm does with ``momentum=None``.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_nanguard._keras import variables as keras_variables

__all__ = ["Recalibration"]


class Recalibration:
    """The estimate in progress; start it when the statistics hold any finite value.

    Args:
        layers: BatchNormalization layers that learn their statistics.
        batches: how many batches to average over.
        seen: how many batches are in the statistics already.

    Attributes:
        left: how many batches are still to come.
    """

    def __init__(self, layers: list[Any], batches: int, seen: int = 0):
        self.layers, self.left, self.seen = layers, batches, seen
        self._good: int | None = None
        self._variables = [
            (variable, float(layer.momentum)) for layer in layers for variable in (layer.moving_mean, layer.moving_variance)
        ]
        self._before = self._read()

    def step(self, good: int) -> bool:
        """Take the steps in that were committed since the last look; returns whether the estimate is complete.

        Args:
            good: how many good steps the fit has seen.
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
        """Count from here, where the estimate was started or restarted since the last execution."""
        self._good = good if self._good is None else self._good

    def restart(self) -> None:
        """Start over from what the statistics are now, after something else has written them."""
        self.left += self.seen
        self.seen, self._good = 0, None
        self._before = self._read()

    def _read(self) -> list[np.ndarray[Any, Any]]:
        return [_wide(variable) for variable, _ in self._variables]


def _wide(variable: Any) -> np.ndarray[Any, Any]:
    return keras_variables.read(variable).astype(np.float64)
