"""Every error of the library, and the one sentence form they share.

A message says what was expected, what was received and what to do, in that order (Keras' own convention).
Level 0: imports no backend.
"""

from __future__ import annotations

__all__ = [
    "BundleError",
    "FileFormatError",
    "GuardError",
    "GuardInUseError",
    "NanGuardError",
    "NonFiniteError",
    "PolicyError",
    "expected",
]


def expected(what: str, received: object, remedy: str) -> str:
    """Return the message ``Expected what. Received: received. remedy``."""
    return f"Expected {what}. Received: {received}. {remedy}"


class NanGuardError(Exception):
    """Base class of all errors raised by keras_nanguard."""


class GuardError(NanGuardError, ValueError):
    """The guard was given something it cannot guard (no compiled model, no optimizer, a wrong argument)."""


class GuardInUseError(GuardError):
    """One guard was handed to two fits that run at the same time."""


class PolicyError(NanGuardError, ValueError):
    """A policy is not valid. `faults` holds every fault found, each with its path."""

    def __init__(self, message: str, faults: tuple[str, ...] = ()):
        super().__init__(message)
        self.faults = faults


class FileFormatError(NanGuardError, ValueError):
    """A file is missing, truncated, of another format, or hostile."""


class BundleError(FileFormatError):
    """An incident bundle cannot be read or is refused as unsafe."""


class NonFiniteError(NanGuardError, FloatingPointError):
    """Raised by the action `raise_error`: the exception carries the incident as `.incident`."""

    def __init__(self, message: str, incident: object = None):
        super().__init__(message)
        self.incident = incident
