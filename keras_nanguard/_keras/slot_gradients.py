"""The gradient that an optimizer used in its last step, computed from one of its arrays before and
after that step.

Most optimizers add the gradient, or its square, to an array::

    after = kept * before + scale * gradient

so its norm, after clipping and without the loss scale, can be computed between two steps on every
backend without further measurements.

Names private to Keras that are used here, because there is no public way: the lists of slots of
each optimizer (``_momentums``, ``_velocities``, ``_accumulators``, ``_accumulated_grads``, ``_m``,
``_u``), one for each variable that it trains. ``tests/keras_internals/test_internals.py`` fails
when a release of Keras removes one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import keras
import ml_dtypes
import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.history import sizes
from keras_nanguard._keras import optimizers as keras_optimizers

__all__ = ["SECOND_MOMENTS", "SLOTS", "GradientSlot", "gradient_slots", "second_moments"]

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
        unit = (
            largest
            if before.dtype.itemsize == 8
            and 0.0 < (largest := sizes(before)[1] + sizes(after)[1]) < math.inf
            else 1.0
        )
        total, squares = 0.0, np.zeros(3)
        for old, new in _blocks(before, after, unit):
            added = new - self.kept * old
            total += float(added.sum())
            squares += [float(np.dot(values, values)) for values in (old, new, added)]
        size_before, size_after, size = np.sqrt(squares).tolist()
        rounding = float(ml_dtypes.finfo(after.dtype).eps) * (size_before + size_after)
        if not size > LEAST * rounding or not self.scale:
            return 0.0 if size == 0.0 else math.nan
        return (
            math.sqrt(max(unit * total / self.scale, 0.0))
            if self.squared
            else unit * size / abs(self.scale)
        )


def _blocks(
    before: np.ndarray[Any, Any], after: np.ndarray[Any, Any], unit: float
) -> Iterator[tuple[Any, Any]]:
    """Yield the entries of both arrays in float64, in this unit, a block at a time: what fits into
    the cache of a core.
    """
    old, new = before.reshape(-1), after.reshape(-1)
    for start in range(0, old.size, BLOCK):
        first, second = (
            finiteness.widen(part[start : start + BLOCK]).astype("float64") / unit
            for part in (old, new)
        )
        yield first, second


def _first_moment(name: str, decay: str) -> Callable[[Any, int, Any], GradientSlot]:
    def slot(optimizer: Any, number: int, weight: Any) -> GradientSlot:
        kept = float(getattr(optimizer, decay))
        return GradientSlot(getattr(optimizer, name)[number], kept, 1.0 - kept)

    return slot


def _second_moment(name: str, decay: str) -> Callable[[Any, int, Any], GradientSlot]:
    def slot(optimizer: Any, number: int, weight: Any) -> GradientSlot:
        kept = float(getattr(optimizer, decay)) if decay else 1.0
        return GradientSlot(
            getattr(optimizer, name)[number], kept, 1.0 - kept if decay else 1.0, True
        )

    return slot


def _sgd(optimizer: Any, number: int, weight: Any) -> GradientSlot | None:
    rate = keras_optimizers.learning_rate(optimizer)
    if optimizer.momentum:
        return GradientSlot(optimizer.momentums[number], float(optimizer.momentum), -rate)
    changed = optimizer.weight_decay or getattr(weight, "constraint", None) is not None
    return None if changed else GradientSlot(weight, 1.0, -rate)


SLOTS: dict[type, Callable[[Any, int, Any], GradientSlot | None]] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adam: _first_moment("_momentums", "beta_1"),
    keras.optimizers.AdamW: _first_moment("_momentums", "beta_1"),
    keras.optimizers.Nadam: _first_moment("_momentums", "beta_1"),
    keras.optimizers.Lamb: _first_moment("_momentums", "beta_1"),
    keras.optimizers.Adamax: _first_moment("_m", "beta_1"),
    keras.optimizers.Lion: _first_moment("_momentums", "beta_2"),
    keras.optimizers.RMSprop: _second_moment("_velocities", "rho"),
    keras.optimizers.Adagrad: _second_moment("_accumulators", ""),
    keras.optimizers.Adadelta: _second_moment("_accumulated_grads", "rho"),
}
"""How each optimizer of Keras stores its gradients. The gradients of other optimizers cannot be
computed from their arrays.
"""


SECOND_MOMENTS: dict[type, str] = {
    keras.optimizers.Adam: "_velocities",
    keras.optimizers.AdamW: "_velocities",
    keras.optimizers.Nadam: "_velocities",
    keras.optimizers.Lamb: "_velocities",
    keras.optimizers.RMSprop: "_velocities",
    keras.optimizers.Adamax: "_u",
    keras.optimizers.Adagrad: "_accumulators",
    keras.optimizers.Adadelta: "_accumulated_grads",
}
"""The slots of each optimizer of Keras that average or sum squared gradients. Adamax keeps their
largest magnitude instead.
"""


def second_moments(optimizers: Iterable[Any]) -> list[Any]:
    """Return the slots that only squared gradients change; none for custom classes."""
    found: list[Any] = []
    for outer in optimizers:
        optimizer = keras_optimizers.inner(outer)
        kind = _kind(optimizer, SECOND_MOMENTS)
        if kind is not None and optimizer.built:
            found += getattr(optimizer, SECOND_MOMENTS[kind])
    return found


def _kind(optimizer: Any, known: Container[type]) -> type | None:
    """Return the known class of an optimizer; a custom class may update in another way."""
    kinds = type(optimizer).__mro__
    kind = next((c for c in kinds if c in known or not c.__module__.startswith("keras.")), None)
    return kind if kind in known else None


def gradient_slots(optimizers: Iterable[Any]) -> dict[int, GradientSlot]:
    """Return the slot that has the gradient of each weight, by `id` of the weight. The variables
    hold the state before a step.
    """
    found: dict[int, GradientSlot] = {}
    for outer in optimizers:
        optimizer = keras_optimizers.inner(outer)
        kind = _kind(optimizer, SLOTS)
        if (
            kind is None
            or not optimizer.built
            or getattr(optimizer, "gradient_accumulation_steps", None)
        ):
            continue
        for number, weight in enumerate(keras_optimizers.trained_by(optimizer)):
            slot = SLOTS[kind](optimizer, number, weight)
            if slot is not None:
                found[id(weight)] = replace(slot, updates=optimizer.iterations)
    return found
