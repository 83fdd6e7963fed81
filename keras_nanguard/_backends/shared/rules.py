"""The rules of the transaction for all backends: when a step may commit, how a refusal changes the
loss scale, and when slots are read.

The rules are arithmetic on the values of the backend: tensors of TensorFlow or JAX inside of a
compiled step, or Python numbers on PyTorch.
"""

from __future__ import annotations

import enum
import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "BOUND",
    "FULL_READ_INTERVAL",
    "MIN_LOSS_SCALE",
    "NUMBERS",
    "PART",
    "SMALL_SLOTS",
    "Operations",
    "SlotReading",
    "bounded_sum",
    "full_read_is_due",
    "learned_scale",
    "may_commit",
    "scale_is_valid",
    "slot_reading",
]

BOUND = 1e24
"""Half the sum of squares of the gradients up to which the proof of `_backends/shared/proof.py`
holds.
"""

FULL_READ_INTERVAL = 16
"""Steps between two full reads of slots if the proof holds for the steps between."""

SMALL_SLOTS = 8 << 20
"""Bytes up to which slots are read after every step: they fit into the processor's cache."""

MIN_LOSS_SCALE = 2.0**-14
"""Smallest loss scale after a refusal: the smallest normal float16 number.

Below it a gradient of 1 is subnormal in float16, so a lower scale does not help.
"""


@dataclass(frozen=True)
class Operations:
    """The operations of a backend that the rules need.

    Attributes:
        isfinite: whether a scalar is finite.
        logical_not: the opposite of a truth value.
        where: `where(condition, one, other)`.
        minimum, maximum: the smaller and the larger one of two scalars.
    """

    isfinite: Callable[[Any], Any]
    logical_not: Callable[[Any], Any]
    where: Callable[[Any, Any, Any], Any]
    minimum: Callable[[Any, Any], Any]
    maximum: Callable[[Any, Any], Any]


class SlotReading(enum.Enum):
    """When the slots of an optimizer are read."""

    WITH_WEIGHTS = "after every step, in one sum with the weights"
    EVERY_STEP = "after every step, in a sum of their own"
    WHEN_DUE = "after a step for which `full_read_is_due`"


NUMBERS = Operations(
    math.isfinite,
    operator.not_,
    lambda condition, one, other: one if condition else other,
    min,
    max,
)
"""The operations for Python numbers."""


PART, MOST = 2.0**-100, 2.0**126
"""Factor for entries before they are summed, and bound of the sum: far below the largest float32,
3.4e38, and far above every weight.
"""


def bounded_sum(ops: Operations, part: Any) -> Any:
    """Return the sum of entries, limited to `MOST`, from the sum of `PART` of each; NaN if it is
    not finite.
    """
    return ops.minimum(ops.maximum(part, -MOST * PART), MOST * PART) / PART + part * 0


def scale_is_valid(ops: Operations, scale: Any) -> Any:
    """Return whether a loss scale is finite and above 0."""
    return ops.isfinite(scale) & (scale > 0)


def may_commit(ops: Operations, sums: Sequence[Any], scale: Any = None) -> Any:
    """Return whether a step may commit.

    Args:
        ops: the operations of the backend.
        sums: the sums over all checked arrays, scalars of one dtype. A sum over an array with NaN
            or Inf is not finite.
        scale: the loss scale, or `None`.
    """
    finite = ops.isfinite(functools.reduce(operator.add, sums))
    return finite if scale is None else finite & scale_is_valid(ops, scale)


def learned_scale(
    ops: Operations, loss: Any, gradients: Any, scale: Any, counter: Any, initial: Any
) -> tuple[Any, Any]:
    """Return the loss scale after a refused step: `(scale, counter)`.

    Like Keras' `LossScaleOptimizer`, it halves the scale if only the gradients were bad
    (keras/src/optimizers/loss_scale_optimizer.py). In addition it has a lower bound, and resets a
    scale of 0, Inf or NaN.

    Args:
        ops: the operations of the backend.
        loss: the loss of the step.
        gradients: half the sum of squares of its gradients.
        scale: the loss scale before the step.
        counter: number of finite steps since it was last doubled.
        initial: the initial scale, in the dtype of `scale`.
    """
    blamed = ops.isfinite(loss) & ops.logical_not(ops.isfinite(gradients))
    valid = scale_is_valid(ops, scale)
    lower = ops.minimum(ops.maximum(scale * 0.5, MIN_LOSS_SCALE), scale)
    kept = ops.where(blamed, lower, scale)
    return ops.where(valid, kept, initial), ops.where(
        blamed | ops.logical_not(valid), counter * 0, counter
    )


def slot_reading(nbytes: int, proven: bool) -> SlotReading:
    """Return when the slots of an optimizer are read.

    Args:
        nbytes: the size of its slots.
        proven: whether they stay finite while the gradients are within `BOUND`, and its number of
            updates is known.
    """
    if nbytes <= SMALL_SLOTS:
        return SlotReading.WITH_WEIGHTS
    return SlotReading.WHEN_DUE if proven else SlotReading.EVERY_STEP


def full_read_is_due(ops: Operations, updates: Any, gradients: Any) -> Any:
    """Return whether slots that are read `WHEN_DUE` are read after this step.

    Args:
        ops: the operations of the backend.
        updates: the number of updates so far.
        gradients: half the sum of squares of the gradients; if it is NaN, the proof does not hold.
    """
    return (updates % FULL_READ_INTERVAL == 0) | ops.logical_not(gradients <= BOUND)
