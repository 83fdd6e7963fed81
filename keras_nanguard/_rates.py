"""Lowering the learning rate of one optimizer so that it stays lowered, and putting it back.

A plain rate is lowered in its own variable, where every other callback sees it. A schedule or a callable stays
untouched (so does the saved config): what it gives is scaled, on the instance, by a factor that the compiled step
reads from a variable.
"""

from __future__ import annotations

import math
from typing import Any

import keras

from keras_nanguard import _state

__all__ = ["Rate"]


class Rate:
    """The learning rate of one optimizer.

    Attributes:
        factor: what the guard multiplies the rate by now.
        lowest: the smallest factor since the rate was last what it would have been.
    """

    def __init__(self, optimizer: Any):
        self.optimizer = _state.inner(optimizer)
        self.factor = self.lowest = 1.0
        self._left: float | None = None
        self._scale: Any = None

    @property
    def plain(self) -> bool:
        """Whether the rate is a number in a variable, not a schedule or a callable."""
        return isinstance(self.optimizer._learning_rate, keras.Variable)

    @property
    def value(self) -> float:
        """The rate of the next step."""
        return _state.learning_rate(self.optimizer)

    def lower(self, factor: float, min_lr: float) -> tuple[float, float, bool]:
        """Multiply the rate; returns `(before, after, retrace)`, the last where the step has to be compiled anew."""
        before = self.value
        after = min(before, max(before * factor, min_lr))
        retrace = self._set(self.factor * (after / before if before else 1.0), after)
        return before, after, retrace

    def raise_to(self, factor: float) -> None:
        """Bring the factor back up to this value, at most 1."""
        factor = min(max(factor, self.factor), 1.0)
        self._set(factor, self.value * factor / self.factor if self.factor else self.value)

    def _set(self, factor: float, value: float) -> bool:
        self.factor = factor
        self.lowest = 1.0 if factor >= 1 else min(self.lowest, factor)
        if self.plain:
            self.optimizer._learning_rate.assign(value)
            self._left = self.value
            return False
        first = self._scale is None
        if first:
            self._scale = keras.Variable(1.0, trainable=False, dtype="float32", name="nanguard_rate_factor")
            real, scale = self.optimizer._get_current_learning_rate, self._scale
            _state.set_instance(
                self.optimizer,
                "_get_current_learning_rate",
                lambda: (rate := keras.ops.convert_to_tensor(real())) * keras.ops.cast(scale, rate.dtype),
            )
        self._scale.assign(factor)
        return first

    def hold(self) -> float | None:
        """Keep the rate lowered where another callback has set it to an absolute value since.

        Returns the rate that was set instead, or `None`. A callback that scales the rate it finds (ReduceLROnPlateau)
        goes on from the lowered one and is left alone; one that computes it from the epoch (LearningRateScheduler)
        brings back the old level. The geometric mean of the two levels tells one from the other.
        """
        if self._left is None or not self.plain or self.factor >= 1:
            return None
        found = self.value
        if math.isclose(found, self._left, rel_tol=1e-6):
            return None
        if found > self._left / math.sqrt(self.factor):
            self.optimizer._learning_rate.assign(found * self.factor)
        self._left = self.value
        return self._left

    def release(self) -> None:
        """Take the scaling off the optimizer; a plain rate stays where it is."""
        if self._scale is not None:
            _state.unset_instance(self.optimizer, "_get_current_learning_rate")
            self._scale = None
            self.factor = 1.0
