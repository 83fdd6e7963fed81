"""The gradient that an optimizer used in its last step, computed from one of its arrays before and
after that step.

Most optimizers add the gradient, or its square, to an array::

    after = kept * before + scale * gradient

so its norm, after clipping and without the loss scale, can be computed between two steps on every
backend without further measurements.

Private Keras names used here, because there is no public API: the lists of slots of
each optimizer (``_momentums``, ``_velocities``, ``_accumulators``, ``_accumulated_grads``, ``_m``,
``_u``), one for each variable that it trains. ``tests/keras_internals/test_internals.py`` fails
when a release of Keras removes one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import ml_dtypes
import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._keras import optimizers as keras_optimizers

LEAST = 20.0
"""Multiple of the rounding error above which a difference is significant."""

BLOCK = 1 << 13
"""Entries that are compared at once: below 10,000, above which OpenBLAS wakes threads for each
`dot` (interface/dot.c), which takes 2 ms if all cores are busy.
"""


@dataclass(frozen=True, slots=True)
class GradientSlot:
    """An array to which an optimizer adds the gradient of one weight.

    Attributes:
        variable: the array.
        kept: the share of it that remains after a step.
        scale: the factor of the gradient.
        squared: whether its square is added.
        updates: the variable that counts the updates of the optimizer: the gradient is known if
            there was one.
    """

    variable: Any
    kept: float
    scale: float
    squared: bool = False
    updates: Any = None

    def norm(self, before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> float:
        """Return the norm of the gradient of the step between; NaN if rounding hides it."""
        total, squares = 0.0, np.zeros(3)
        flat = before.reshape(-1), after.reshape(-1)
        for start in range(0, before.size, BLOCK):
            parts = (finiteness.widen(array[start : start + BLOCK]) for array in flat)
            old, new = (part.astype("float64") for part in parts)
            added = new - self.kept * old
            total += float(added.sum())
            squares += [float(np.dot(values, values)) for values in (old, new, added)]
        size_before, size_after, size = np.sqrt(squares).tolist()
        rounding = float(ml_dtypes.finfo(after.dtype).eps) * (size_before + size_after)
        if not size > LEAST * rounding or not self.scale:
            return 0.0 if size == 0.0 else math.nan
        if self.squared:
            return math.sqrt(max(total / self.scale, 0.0))
        return float(size / abs(self.scale))


class Moments(NamedTuple):
    """The attributes of an optimizer that hold its averages of gradients; `""` if there are none.

    Attributes:
        first: slots to which a step adds the gradient.
        decay: the share of `first` that a step leaves; of `second` if there is no `first`.
        second: slots that average or sum squared gradients. Adamax keeps their largest magnitude.
    """

    first: str
    decay: str
    second: str


_ADAM = Moments("_momentums", "beta_1", "_velocities")

SLOTS: dict[type, Moments] = {
    keras.optimizers.SGD: Moments("momentums", "momentum", ""),
    keras.optimizers.Adam: _ADAM,
    keras.optimizers.AdamW: _ADAM,
    keras.optimizers.Nadam: _ADAM,
    keras.optimizers.Lamb: _ADAM,
    keras.optimizers.Adamax: Moments("_m", "beta_1", "_u"),
    keras.optimizers.Lion: Moments("_momentums", "beta_2", ""),
    keras.optimizers.RMSprop: Moments("", "rho", "_velocities"),
    keras.optimizers.Adagrad: Moments("", "", "_accumulators"),
    keras.optimizers.Adadelta: Moments("", "rho", "_accumulated_grads"),
}
"""How each optimizer of Keras stores its gradients. The gradients of other optimizers cannot be
computed from their arrays.
"""


def second_moments(optimizers: Iterable[Any]) -> list[Any]:
    """Return the slots that only squared gradients change; none for custom classes."""
    found: list[Any] = []
    for optimizer in map(keras_optimizers.inner, optimizers):
        moments = _moments(optimizer)
        if moments is not None and moments.second:
            found += getattr(optimizer, moments.second)
    return found


def _moments(optimizer: Any) -> Moments | None:
    """Return the moments of a built optimizer of a known class; a custom class may update in
    another way.
    """
    kinds = type(optimizer).__mro__
    kind = next(c for c in kinds if c in SLOTS or not c.__module__.startswith("keras."))
    return SLOTS.get(kind) if optimizer.built else None


def gradient_slots(optimizers: Iterable[Any]) -> dict[int, GradientSlot]:
    """Return the slot that has the gradient of each weight, by `id` of the weight. The variables
    hold the state before a step.
    """
    found: dict[int, GradientSlot] = {}
    for optimizer in map(keras_optimizers.inner, optimizers):
        moments = _moments(optimizer)
        if moments is None or keras_optimizers.accumulation_steps(optimizer) > 1:
            continue
        for number, weight in enumerate(keras_optimizers.trained_by(optimizer)):
            slot = _slot(optimizer, moments, number, weight)
            if slot is not None:
                found[id(weight)] = slot
    return found


def _slot(optimizer: Any, moments: Moments, number: int, weight: Any) -> GradientSlot | None:
    """Return where the gradient of a weight is kept, given its number among those trained."""
    name, updates = moments.first or moments.second, optimizer.iterations
    kept = float(getattr(optimizer, moments.decay)) if moments.decay else 1.0
    if moments.decay == "momentum":  # SGD adds the step, with momentum to a separate slot
        if not keras_optimizers.rate_is_pure(optimizer):
            return None
        rate = keras_optimizers.learning_rate(optimizer)
        if kept:
            return GradientSlot(getattr(optimizer, name)[number], kept, -rate, updates=updates)
        changed = optimizer.weight_decay or getattr(weight, "constraint", None) is not None
        return None if changed else GradientSlot(weight, 1.0, -rate, updates=updates)
    scale = 1.0 - kept if moments.decay else 1.0
    return GradientSlot(getattr(optimizer, name)[number], kept, scale, not moments.first, updates)
