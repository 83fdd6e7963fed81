"""Limits for remembered batches, and copies of arrays that other code may write."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

MAX_BYTES = 64 << 20
"""Maximum bytes of remembered batches. A larger batch is not remembered."""


def held(args: Any) -> Any:
    """Return arguments that later steps cannot change: writable NumPy arrays are copied."""
    return keras.tree.map_structure(owned, args)


def owned(value: Any) -> Any:
    """Return a value, or a copy of a writable NumPy array."""
    return value.copy() if isinstance(value, np.ndarray) and value.flags.writeable else value
