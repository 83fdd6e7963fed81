"""Every error of the library, and the one sentence form they share.

A message says what was expected, what was received and what to do, in that order (Keras' own convention).
Level 0: imports no backend.
"""

from __future__ import annotations

import os

__all__ = [
    "BundleError",
    "FileFormatError",
    "GuardError",
    "GuardInUseError",
    "NanGuardError",
    "NonFiniteError",
    "PolicyError",
    "expected",
    "no_model",
]


def expected(what: str, received: object, remedy: str) -> str:
    """Return the message ``Expected what. Received: received. remedy``."""
    return f"Expected {what}. Received: {received}. {remedy}"


def no_model(received: object, command: str) -> GuardError:
    """Return the error for something that is no model.

    Args:
        received: what it is.
        command: the command of the command line that takes the path of a model, with `{path}` in its place.
    """
    if isinstance(received, (str, os.PathLike)):
        path = os.fspath(received)
        remedy = f"Load it with keras.saving.load_model, or run: keras-nanguard {command.format(path=path)}"
        return GuardError(expected("a Keras model", f"the path {path!r}", remedy))
    name = received.__name__ if isinstance(received, type) else type(received).__name__
    what = f"the class {name}" if isinstance(received, type) else f"an object of class {name}"
    return GuardError(expected("a Keras model", what, "Pass the model itself."))


class NanGuardError(Exception):
    """Base class of all errors raised by keras_nanguard."""


class GuardError(NanGuardError, ValueError):
    """The guard was given something it cannot guard (no compiled model, no optimizer, a wrong argument)."""


class GuardInUseError(GuardError):
    """One guard was handed to two fits that run at the same time."""


class PolicyError(NanGuardError, ValueError):
    """A policy is not valid.

    Attributes:
        problems: every problem found, each with its path. Empty where there is no document to find any in.
    """

    def __init__(self, message: str, problems: tuple[str, ...] = ()):
        super().__init__(message)
        self.problems = problems

    @property
    def faults(self) -> tuple[str, ...]:
        """The same as `problems`."""
        return self.problems


class FileFormatError(NanGuardError, ValueError):
    """A file is missing, truncated, of another format, or hostile."""


class BundleError(FileFormatError):
    """An incident bundle cannot be read or is refused as unsafe."""


class NonFiniteError(NanGuardError, FloatingPointError):
    """Raised by the action `raise_error`. The message is the line of the incident: what, where, why, and what to do.

    Attributes:
        incident: the `Incident`, complete.
    """

    def __init__(self, message: str, incident: object = None):
        super().__init__(message)
        self.incident = incident


for _error in (NanGuardError, GuardError, GuardInUseError, PolicyError, FileFormatError, BundleError, NonFiniteError):
    _error.__module__ = "keras_nanguard.errors"  # where users catch them, and where a pickle of one looks for its class
