"""Limits for remembered batches, and copies of arrays that other code may write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

MAX_BATCHES = 1024
"""Maximum number of remembered batches: a whole window of `Divergence`, at most 1000 steps, after
which a run may have to return to its first state.
"""

MAX_BYTES = 64 << 20
"""Maximum bytes of remembered batches. A larger batch is not remembered."""


def held(args: Any) -> Any:
    """Return arguments that later steps cannot change: writable NumPy arrays are copied."""
    return keras.tree.map_structure(owned, args)


def owned(value: Any) -> Any:
    """Return a value, or a copy of a writable NumPy array."""
    return value.copy() if isinstance(value, np.ndarray) and value.flags.writeable else value


def bytes_of(value: Any) -> int:
    """Return the bytes of the arrays in a structure. Runs in every step."""
    if isinstance(value, (tuple, list)):
        total = 0
        for part in value:
            total += bytes_of(part)
        return total
    shape = getattr(value, "shape", None)
    if shape is None:
        return sum(map(bytes_of, value.values())) if isinstance(value, Mapping) else 0
    count = getattr(shape, "num_elements", None)
    if count is None:
        found = getattr(value, "nbytes", None)  # a sparse one of JAX has parts instead
        return bytes_of((value.data, value.indices)) if found is None else int(found)
    number = count()  # of TensorFlow
    if hasattr(value, "flat_values"):  # ragged
        return bytes_of((value.flat_values, value.nested_row_splits))
    if number is None or not hasattr(value, "device"):  # sparse
        return sum(bytes_of(getattr(value, name, None)) for name in ("values", "indices"))
    return int(number) * (int(value.dtype.size or 0) or 16)
