"""Whose slots need not be read after every step, on every backend; docs/proof.md has the proof."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_nanguard._backends.shared import rules
from keras_nanguard._keras import optimizers as keras_optimizers

__all__ = ["reading_of"]

PROVEN = frozenset({"SGD", "Adam", "AdamW", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Lion"})
"""Optimizers whose slots stay finite while the gradients stay within `rules.BOUND`."""


def reading_of(optimizer: Any, slots: Sequence[tuple[int, int]], counted: bool = True) -> rules.SlotReading:
    """Return when the slots of an optimizer are read.

    Args:
        optimizer: the outermost optimizer.
        slots: of each slot that can be bad how many entries it has, and how many bytes one of them takes.
        counted: whether it is known how many updates the optimizer has made.
    """
    kind = type(keras_optimizers.inner(optimizer))
    known = kind.__name__ in PROVEN and kind.__module__.startswith(("keras.", "torch.optim."))
    proven = counted and known and all(itemsize >= 4 for _, itemsize in slots)
    return rules.slot_reading(sum(size * itemsize for size, itemsize in slots), proven)
