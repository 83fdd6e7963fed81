"""The rules of the transaction for all backends: when a step may commit, and how a refusal changes
the loss scale.

The rules are arithmetic on the values of the backend: tensors of TensorFlow or JAX inside of a
compiled step, or Python numbers on PyTorch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

MIN_LOSS_SCALE = 2.0**-14
"""Smallest loss scale after a refusal: the smallest normal float16 number.

Below it a gradient of 1 is subnormal in float16, so a lower scale does not help.
"""


@dataclass(frozen=True)
class Operations:
    """The operations of a backend that the rules need.

    Attributes:
        where: `where(condition, one, other)`.
        minimum, maximum: the smaller and the larger one of two scalars.
    """

    isfinite: Callable[[Any], Any]
    logical_not: Callable[[Any], Any]
    where: Callable[[Any, Any, Any], Any]
    minimum: Callable[[Any, Any], Any]
    maximum: Callable[[Any, Any], Any]


NUMBERS = Operations(
    math.isfinite,
    operator.not_,
    lambda condition, one, other: one if condition else other,
    min,
    max,
)
"""The operations for Python numbers."""


def scale_is_valid(ops: Operations, scale: Any) -> Any:
    """Return whether a loss scale is finite and above 0."""
    return ops.isfinite(scale) & (scale > 0)


def common_scale(ops: Operations, scales: Sequence[Any], without: Any) -> Any:
    """Return the smallest loss scale, one that is not finite if there is any, `without` if there is
    none.
    """

    def worse(one: Any, other: Any) -> Any:
        both = ops.isfinite(one) & ops.isfinite(other)
        return ops.where(both, ops.minimum(one, other), one + other)

    return reduce(worse, scales) if scales else without


def may_commit(ops: Operations, finite: Any, scales: Iterable[Any], halted: Any = False) -> Any:
    """Return whether a step may commit.

    Args:
        finite: whether every checked array is finite.
        halted: whether the step is refused regardless of its numbers.
    """
    for scale in scales:
        finite = finite & scale_is_valid(ops, scale)
    return finite & ops.logical_not(halted)


def scale_after_refusal(
    ops: Operations,
    loss: Any,
    gradients: Any,
    scale: Any,
    counter: Any,
    initial: Any,
    halted: Any = False,
) -> tuple[Any, Any]:
    """Return the loss scale after a refused step: `(scale, counter)`. A halted step, which has no
    verdict on its own batch, keeps it.

    Like Keras' `LossScaleOptimizer`, it halves the scale if only the gradients were bad
    (keras/src/optimizers/loss_scale_optimizer.py). In addition it has a lower bound, and resets a
    scale of 0, Inf or NaN.

    Args:
        gradients: half the sum of squares of its gradients.
        scale: the loss scale before the step.
        counter: number of finite steps since it was last doubled.
        initial: the initial scale, in the dtype of `scale`.
        halted: whether the step was refused regardless of its numbers.
    """
    judged = ops.logical_not(halted)
    blamed = judged & ops.isfinite(loss) & ops.logical_not(ops.isfinite(gradients))
    valid = ops.logical_not(judged) | scale_is_valid(ops, scale)
    lower = ops.minimum(ops.maximum(scale * 0.5, MIN_LOSS_SCALE), scale)
    kept = ops.where(blamed, lower, scale)
    return ops.where(valid, kept, initial), ops.where(
        blamed | ops.logical_not(valid), counter * 0, counter
    )
