"""Whether the step of a loop takes its batch from an iterator: it cannot be called again then."""

from __future__ import annotations

from typing import Any

from keras_nanguard._core.data import is_iterator
from keras_nanguard._keras.attributes import referred


def reads_iterator(function: Any) -> bool:
    """Whether a function refers to an iterator; see `referred`.

    Each call of such a function takes the next item, so it cannot be called again with the same
    data.
    """
    return any(is_iterator(value) for *_, value in referred(function))
