"""Which slots need not be read after every step, on every backend; docs/proof.md has the proof."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from keras_nanguard._keras import optimizers as keras_optimizers

__all__ = ["BOUND", "FULL_READ_INTERVAL", "PROVEN_BYTES", "is_proven"]

PROVEN = frozenset({"SGD", "Adam", "AdamW", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Lion"})
"""Optimizers whose slots stay finite while the gradients stay below `BOUND`."""

BOUND = 1e24
"""Half the sum of squares of the gradients up to which the proof holds."""

FULL_READ_INTERVAL = 16
"""Steps between two full reads of the slots where the proof holds for the steps between."""

PROVEN_BYTES = 8 << 20
"""Slots smaller than this are read after every step: they stand in the processor's cache and cost nothing."""


def is_proven(optimizer: Any, itemsizes: Iterable[int]) -> bool:
    """Whether the proof holds for an optimizer whose slots have entries of these sizes in bytes."""
    kind = type(keras_optimizers.inner(optimizer))
    known = kind.__name__ in PROVEN and kind.__module__.startswith(("keras.", "torch.optim."))
    return known and all(size >= 4 for size in itemsizes)
