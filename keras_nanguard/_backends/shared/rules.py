"""The rules of the transaction for all backends: when a step may commit, how a refusal changes the
loss scale, and when slots are read.

The rules are arithmetic on the values of the backend: tensors of TensorFlow or JAX inside of a
compiled step, or Python numbers on PyTorch.

When slots are read: after every step the guard reads all gradients, all updated weights and all
written statistics. On TensorFlow it reads the slots as well. They are as large as the weights or
twice as large, so on JAX and PyTorch it may read large slots every 16 steps, if all of this holds:

1. The optimizer is one of `PROVEN`, as Keras or `torch.optim` ships it.
2. All of its slots are float32 or wider, and together take more than 8 MB.
3. In this step half the sum of the squares of all gradients is at most 1e24.

If 1 and 2 hold and 3 does not, the slots are read in this step. On PyTorch their size does not
matter, because it counts writes: slots that other code has written are read in the next step.

Claim: if all slots are finite before a step and 3 holds, they are finite after it.

Proof: each entry g of a gradient satisfies |g| <= sqrt(2e24) < 1.5e12, so g*g < 2.1e24 is finite in
float32, whose largest number is 3.4e38.

- First moments (Adam, AdamW, Adamax, Lion, centred RMSprop): m + (1-b)(g-m) is between m and g.
- Second moments (Adam, AdamW, RMSprop, Adadelta): v + (1-b)(g*g-v) is between v and g*g.
- Infinity norm (Adamax) and AMSGrad maximum: the larger of two finite numbers.
- Accumulator (Adagrad): a + g*g grows by less than 2.1e24 a step. Near the top of float32, where
  neighbouring numbers are 2e31 apart, such a sum rounds back to a.
- Velocity (SGD): b*m - lr*g is at most max(|m|, lr*|g|/(1-b)), finite for every rate below 1e25.
- Velocity (RMSprop): b*m + lr*g/sqrt(v+e); with g*g <= v/(1-b) the quotient is at most 1/sqrt(1-b).
- Squared updates (Adadelta): a convex combination of squared updates, each of which is at most
  sqrt((a+e)/((1-b)e)) in units of g.
- Accumulated gradients: a + g grows by less than 1.5e12 a step.
- EMA of the weights: between a and w, and w is read after every step.

- Weight decay of `torch.optim` adds a multiple of w to g. There 3 has to hold with the sum of the
  squares of all weights added.

Not covered: a slot that other code writes between two steps. A bad entry there reaches the weights
in the next step, and the weights are read. The exception is +Inf in a second moment, which stops
its weight from moving: the full read finds it at most 16 steps later. A snapshot reads every entry.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from keras_nanguard._keras import optimizers as keras_optimizers

BOUND = 1e24
"""Half the sum of squares of the gradients up to which the proof above holds."""

FULL_READ_INTERVAL = 16
"""Steps between two full reads of slots if the proof holds for the steps between."""

PROVEN = frozenset({"SGD", "Adam", "AdamW", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Lion"})
"""Optimizers whose slots stay finite while the gradients stay within `BOUND`."""

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


def may_commit(ops: Operations, finite: Any, scales: Iterable[Any], halted: Any = False) -> Any:
    """Return whether a step may commit.

    Args:
        ops: the operations of the backend.
        finite: whether every checked array is finite.
        scales: the loss scales.
        halted: whether the step is refused regardless of its numbers.
    """
    for scale in scales:
        finite = finite & scale_is_valid(ops, scale)
    return finite & ops.logical_not(halted)


def learned_scale(
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
        ops: the operations of the backend.
        loss: the loss of the step.
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


def slots_may_wait(
    optimizer: Any,
    slots: Sequence[tuple[int, int]],
    counted: bool = True,
    small: int = SMALL_SLOTS,
) -> bool:
    """Return whether the slots of an optimizer need to be read only if `full_read_is_due`.

    Args:
        optimizer: the outermost optimizer.
        slots: of each slot that can be bad how many entries it has, and how many bytes one of them
            takes.
        counted: whether it is known how many updates the optimizer has made.
        small: bytes up to which slots do not wait.
    """
    inner = keras_optimizers.inner(optimizer)
    kind = type(getattr(inner, "of", inner))  # of an adapter, the optimizer of torch
    known = kind.__name__ in PROVEN and kind.__module__.startswith(("keras.", "torch.optim."))
    large = sum(size * itemsize for size, itemsize in slots) > small
    return counted and known and large and all(itemsize >= 4 for _, itemsize in slots)


def full_read_is_due(ops: Operations, updates: Any, gradients: Any) -> Any:
    """Return whether slots that may wait are read after this step.

    Args:
        ops: the operations of the backend.
        updates: the number of updates so far.
        gradients: half the sum of squares of the gradients; if it is NaN, the proof does not hold.
    """
    return (updates % FULL_READ_INTERVAL == 0) | ops.logical_not(gradients <= BOUND)
