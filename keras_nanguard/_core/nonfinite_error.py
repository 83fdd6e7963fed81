"""The error that carries an incident. Imports no backend."""

from __future__ import annotations

from keras_nanguard._core.errors import NanGuardError
from keras_nanguard._core.incident import Incident

__all__ = ["NonFiniteError"]


class NonFiniteError(NanGuardError, FloatingPointError):
    """Raised by the action `raise_error`.

    The message describes the incident: what, where, why, and what to do.

    Attributes:
        incident: the complete `Incident`.
    """

    def __init__(self, message: str, incident: Incident | None = None):
        super().__init__(message)
        self.incident = incident


NonFiniteError.__module__ = "keras_nanguard.errors"  # the public module, which pickle stores
