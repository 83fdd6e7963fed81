"""Estimating BatchNorm statistics anew while training goes on: the cumulative average of the batches to come.

BatchNorm moves its statistics by ``new = momentum * old + (1 - momentum) * batch``. From the value before and the value
after a step the batch's own statistic follows, and the running mean of those replaces the moving average. (The cumulative
moving average is what PyTorch's BatchNorm does with ``momentum=None``.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_nanguard import _state

__all__ = ["Recalibration"]


class Recalibration:
    """The estimate in progress; start it when the statistics hold any finite value.

    Args:
        layers: BatchNormalization layers.
        batches: how many batches to average over.
    """

    def __init__(self, layers: list[Any], batches: int):
        self.left = batches
        self.seen = 0
        self.variables = [
            (variable, float(layer.momentum)) for layer in layers for variable in (layer.moving_mean, layer.moving_variance)
        ]
        self.before = [_state.read(variable).astype(np.float64) for variable, _ in self.variables]

    def step(self) -> bool:
        """Take one committed step in; returns whether the estimate is complete."""
        self.seen += 1
        for i, (variable, momentum) in enumerate(self.variables):
            after = _state.read(variable)
            if momentum < 1.0:
                batch = (after.astype(np.float64) - momentum * self.before[i]) / (1.0 - momentum)
                mean = batch if self.seen == 1 else self.before[i] + (batch - self.before[i]) / self.seen
                _state.write(variable, mean.astype(after.dtype))
                self.before[i] = _state.read(variable).astype(np.float64)
        self.left -= 1
        return self.left <= 0
