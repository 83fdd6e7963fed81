"""Every error that this library raises. Loads no backend.

    from keras_nanguard.errors import NonFiniteError

All of them are a `NanGuardError`, and each also is the built-in error that fits: a `ValueError` for what was passed or read, a
`FloatingPointError` for numbers.
"""

from __future__ import annotations

from keras_nanguard._core.errors import (
    BundleError,
    FileFormatError,
    GuardError,
    GuardInUseError,
    NanGuardError,
    NonFiniteError,
    PolicyError,
)

__all__ = ["BundleError", "FileFormatError", "GuardError", "GuardInUseError", "NanGuardError", "NonFiniteError", "PolicyError"]
