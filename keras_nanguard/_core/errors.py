"""The errors of the library, and the form of their messages.

A message says what was expected, what was received and what to do, in this order (the convention of
Keras).
"""

from __future__ import annotations

import contextlib
import numbers
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

BACKENDS = ("tensorflow", "jax", "torch")
"""Names of the supported backends of Keras, each with its package in `_backends`."""


def expected(what: str, received: object, remedy: str) -> str:
    """Return the message ``Expected what. Received: received. remedy``."""
    return f"Expected {what}. Received: {received}. {remedy}"


def no_backend(error: ImportError) -> str:
    """Return the remedy if Keras does not find its backend, `""` for any other module."""
    name = (error.name or "").partition(".")[0]
    if name not in BACKENDS:
        return ""
    received = f"the backend {name}, which is not installed"
    install = f'Run pip install "keras-nanguard[{name}]"'
    remedy = f"{install}, or set KERAS_BACKEND to the backend that is installed."
    return expected("a backend for Keras", received, remedy)


def no_model(received: object, command: str) -> GuardError:
    """Return the error for an argument that is not a model.

    Args:
        command: the command of `keras-nanguard` that accepts the path of a model, with the
            placeholder `{path}`.
    """
    if isinstance(received, (str, os.PathLike)):
        path = os.fspath(received)
        run = f"keras-nanguard {command.format(path=path)}"
        remedy = f"Load it with keras.saving.load_model, or run: {run}"
        return GuardError(expected("a Keras model", f"the path {path!r}", remedy))
    name = received.__name__ if isinstance(received, type) else type(received).__name__
    what = f"the class {name}" if isinstance(received, type) else f"an object of class {name}"
    return GuardError(expected("a Keras model", what, "Pass the model itself."))


def require_one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise a `GuardError` for an argument that is none of these words."""
    if value not in allowed:
        what = f"{name} to be one of {', '.join(allowed)}"
        raise GuardError(expected(what, f"{name}={value!r}", "Choose one of them."))


def require_count(name: str, value: Any) -> None:
    """Raise a `GuardError` for an argument that is not a whole number above 0."""
    if not (isinstance(value, numbers.Integral) and int(value) > 0):
        what, remedy = f"{name} to be a whole number above 0", "Leave it out for the default."
        raise GuardError(expected(what, f"{name}={value!r}", remedy))


def require_path(received: object, remedy: str) -> None:
    """Raise a `GuardError` for an argument that is not a path."""
    if not isinstance(received, (str, os.PathLike)):
        what = f"an object of class {type(received).__name__}"
        raise GuardError(expected("a path", what, remedy))


def as_words(given: object, name: str) -> tuple[str, ...]:
    """Return one word, or several, as a tuple.

    Raises:
        GuardError: if the argument `name` is something else.
    """
    words = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if not all(isinstance(word, str) for word in words):
        received, remedy = f"{name}={given!r}", f"Write {name}=[...] with text."
        raise GuardError(expected(f"{name} to be text or a list of texts", received, remedy))
    return words


def require_keras_3(*things: object) -> None:
    """Refuse models and optimizers of Keras 2, which is `tf_keras` today, and `tf.keras` with
    `TF_USE_LEGACY_KERAS=1`.

    Raises:
        GuardError: if one of them belongs to Keras 2.
    """
    for thing in things:
        if any(kind.__module__.partition(".")[0] == "tf_keras" for kind in type(thing).__mro__):
            name = getattr(thing, "name", type(thing).__name__)
            received = f"{name!r}, an object of tf_keras, which is Keras 2"
            remedy = "Write `import keras` in place of tf_keras, and unset TF_USE_LEGACY_KERAS."
            raise GuardError(expected("a model and optimizers of Keras 3", received, remedy))


@contextlib.contextmanager
def waiting_for(
    what: str, processes: int, missing: Callable[[], str] = lambda: "one of them"
) -> Iterator[None]:
    """Name the exchange, the time and the process in the error if another process has ended or does
    not respond.

    The backend sets the time limit: the process group on PyTorch, the coordination service on JAX.
    After that time it raises a `RuntimeError` that names neither the exchange nor the time.

    Args:
        what: a description of the exchange.
        missing: returns in words which process does not respond; called after the error.

    Raises:
        GuardError: instead of the `RuntimeError`.
    """
    started = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        seconds = time.monotonic() - started
        reason = str(error).strip().partition("\n")[0]
        received = f"none from {missing()} after {seconds:.1f} s of waiting for {what}: {reason}"
        remedy = (
            "Check the output of the other processes: one has ended, or runs a different number of"
            " steps. Then restart all of them."
        )
        wanted = f"an answer from all {processes} processes"
        raise GuardError(expected(wanted, received, remedy)) from error


class NanGuardError(Exception):
    """Base class of all errors raised by keras_nanguard."""


class GuardError(NanGuardError, ValueError):
    """An argument, a model or an optimizer cannot be used.

    Examples are an uncompiled model, a missing optimizer, or an argument of the wrong type.
    """


class GuardInUseError(GuardError):
    """One guard was passed to two fits that run at the same time."""


class PolicyError(NanGuardError, ValueError):
    """A policy is not valid.

    Attributes:
        problems: every problem found, each with its path. Empty if no policy could be read.
    """

    def __init__(self, message: str, problems: tuple[str, ...] = ()):
        super().__init__(message)
        self.problems = problems


class FileFormatError(NanGuardError, ValueError):
    """A file is missing, truncated, malicious or of another format."""


class StateLostError(NanGuardError, RuntimeError):
    """A state could not be written completely, and the previous one could not be restored.

    The model has values of two different steps. Load a checkpoint.
    """


class BundleError(FileFormatError):
    """A bundle of an incident cannot be read, or is not safe to read."""


for _error in (
    *(NanGuardError, GuardError, GuardInUseError, PolicyError, StateLostError),
    *(FileFormatError, BundleError),
):
    _error.__module__ = "keras_nanguard.errors"  # the public module, which pickle stores
