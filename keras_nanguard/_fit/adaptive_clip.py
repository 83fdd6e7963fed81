"""Clipping of gradients that stand out from those of the run itself.

With mean and variance running over the global norms of the committed steps, as they were after clipping, this is reciprocal
ZClip (A. Kumar et al., ZClip: Adaptive Spike Mitigation for LLM Pre-Training, arXiv:2504.02507)::

    width = deviations * standard deviation
    norm <= mean + width    the gradients stay as they are
    norm >  mean + width    they are scaled to a norm of mean + width^2 / (norm - mean)

so that a gradient counts the less the more it stands out. The clipping is part of the compiled step. Mean and width are computed on the
host, from the norm that each step measures anyway, and are those of the steps before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import keras
import numpy as np

from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras.overrides import Overrides
from keras_nanguard._policy.progress import NORMAL

__all__ = ["AdaptiveClip"]

LEAST_DEVIATION = 0.1
"""Least standard deviation, as a share of the mean: norms that happen to agree for some steps are not without noise."""

USUAL = 50
"""Steps in a row whose norms stand out after which these are what is usual: another loss, other data, layers made trainable."""

CHANGE = 0.01
"""Change of mean or width, as a share of the limit, from which on they are written into the variable that the step reads."""


class AdaptiveClip:
    """Clips the gradients of one optimizer by their global norm.

    Attributes:
        deviations: standard deviations above the mean at which gradients are clipped.
        smoothing: share of mean and variance that one step leaves.
        mean, variance: those of the norms so far.
        given: stands in for mean and width while a step that is a pure function is traced.
    """

    def __init__(self, optimizer: Any):
        self.optimizer = keras_optimizers.inner(optimizer)
        self.deviations, self.smoothing = math.inf, 0.97
        self.mean = self.variance = 0.0
        self.given: Any = None
        self._overrides = Overrides()
        self._written: Any = None
        self._read = np.zeros(2, "float32")
        self._beyond: list[float] = []

    @property
    def width(self) -> float:
        """How far above the mean a norm may be."""
        return self.deviations * max(math.sqrt(self.variance), LEAST_DEVIATION * self.mean)

    @property
    def limit(self) -> float:
        """The global norm above which the gradients of the next step are clipped."""
        return self.mean + self.width

    @property
    def numbers(self) -> np.ndarray[Any, Any]:
        """Mean and width as the next step reads them: float32, shape `(2,)`."""
        return np.array([self.mean, self.width], "float32")

    def learn(self, norms: Sequence[float]) -> None:
        """Begin with the norms of these steps, a few of which may stand out themselves, and clip from the next step on."""
        self.mean = median(norms)
        self.variance = (NORMAL * median(abs(norm - self.mean) for norm in norms)) ** 2
        self._install()

    def push(self, norm: float) -> None:
        """Add the norm of a committed step, as it was before clipping."""
        if not norm < math.inf:
            return
        self._beyond = [*self._beyond, norm] if norm > self.limit else []
        if len(self._beyond) >= USUAL:
            self.learn(self._beyond)
            return
        if norm > self.limit:
            norm = self.mean + self.width**2 / (norm - self.mean)
        share = 1.0 - self.smoothing
        self.mean += share * (norm - self.mean)
        self.variance += share * ((norm - self.mean) ** 2 - self.variance)
        if self._written is not None and np.abs(self.numbers - self._read).max() > CHANGE * self.limit:
            self._write()

    def _write(self) -> None:
        self._read = self.numbers
        self._written.assign(self._read)

    def _install(self) -> None:
        if self._written is None:
            keras_optimizers.set_clipping(self.optimizer, self._clipped, self._overrides)
            self._written = keras.Variable(np.zeros(2), trainable=False, dtype="float32", name="nanguard_gradient_norm")
        self._write()

    def _clipped(self, grads: list[Any], clipped: list[Any]) -> list[Any]:
        known = [g for g in grads if g is not None]
        if not known:
            return clipped
        squares = [keras.ops.sum(keras.ops.square(keras.ops.cast(g, "float32"))) for g in known]
        norm = keras.ops.sqrt(sum(squares[1:], start=squares[0]))
        read = keras.ops.convert_to_tensor(self._written if self.given is None else self.given, "float32")
        mean, width = read[0], read[1]
        beyond = keras.ops.logical_and(norm > mean + width, mean + width > 0.0)
        target = mean + width * width / keras.ops.where(beyond, norm - mean, keras.ops.ones_like(norm))
        factor = keras.ops.where(beyond, target / norm, keras.ops.ones_like(norm))
        return [g if g is None else keras.ops.multiply(g, keras.ops.cast(factor, g.dtype)) for g in clipped]

    def release(self) -> None:
        """Clip no longer."""
        if self._written is not None:
            self._overrides.give_back()
            self._written = None

    def to_dict(self) -> dict[str, float]:
        """Return where it stands, as plain JSON values."""
        names = ("deviations", "smoothing", "mean", "variance")
        return {name: getattr(self, name) for name in names}

    def resume(self, found: Mapping[str, Any]) -> None:
        """Go on from what `to_dict` returned."""
        self.deviations, self.smoothing = float(found["deviations"]), float(found["smoothing"])
        self.mean, self.variance = float(found["mean"]), float(found["variance"])
        self._install()
