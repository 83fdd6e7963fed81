"""The errors of this library. Imports no backend.

    from keras_nanguard.errors import NonFiniteError

All of them are a `NanGuardError`, and each is also the matching built-in error: a `ValueError` for
arguments and files, a `FloatingPointError` for numbers.
"""

from __future__ import annotations

from keras_nanguard._core.errors import (
    BundleError,
    FileFormatError,
    GuardError,
    GuardInUseError,
    NanGuardError,
    PolicyError,
    StateLostError,
)
from keras_nanguard._core.incident import NonFiniteError

__all__ = [
    "BundleError",
    "FileFormatError",
    "GuardError",
    "GuardInUseError",
    "NanGuardError",
    "NonFiniteError",
    "PolicyError",
    "StateLostError",
]
