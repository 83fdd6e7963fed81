"""Which optimizer slots need not be read after every step, on every backend.

After every step the guard reads all gradients, all updated weights and all written statistics.
Slots are as large as the weights or twice as large, so the guard may read large slots every 16
steps, if all of this holds:

1. The optimizer is one of `PROVEN`, as Keras or `torch.optim` ships it.
2. All of its slots are float32 or wider, and together take more than 8 MB.
3. In this step half the sum of the squares of all gradients is at most 1e24.

If 1 and 2 hold and 3 does not, the slots are read in this step.

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

Not covered: a slot that other code writes between two steps. A bad entry there reaches the weights
in the next step, and the weights are read. The exception is +Inf in a second moment, which stops
its weight from moving: the full read finds it at most 16 steps later. A snapshot reads every entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_nanguard._backends.shared import rules
from keras_nanguard._keras import optimizers as keras_optimizers

__all__ = ["reading_of"]

PROVEN = frozenset({"SGD", "Adam", "AdamW", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Lion"})
"""Optimizers whose slots stay finite while the gradients stay within `rules.BOUND`."""


def reading_of(
    optimizer: Any, slots: Sequence[tuple[int, int]], counted: bool = True
) -> rules.SlotReading:
    """Return when the slots of an optimizer are read.

    Args:
        optimizer: the outermost optimizer.
        slots: of each slot that can be bad how many entries it has, and how many bytes one of them
            takes.
        counted: whether it is known how many updates the optimizer has made.
    """
    kind = type(keras_optimizers.inner(optimizer))
    known = kind.__name__ in PROVEN and kind.__module__.startswith(("keras.", "torch.optim."))
    proven = counted and known and all(itemsize >= 4 for _, itemsize in slots)
    return rules.slot_reading(sum(size * itemsize for size, itemsize in slots), proven)
