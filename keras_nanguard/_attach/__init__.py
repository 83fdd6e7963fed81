"""Putting the transaction in its place, and taking it off again: around a model's train step, or around a loop's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import keras

from keras_nanguard._attach._shared import Attachment, require_compiled
from keras_nanguard._errors import GuardError, expected
from keras_nanguard._fit._session import Session

__all__ = ["Attachment", "adapted", "attachment", "loop_step", "require_compiled", "waits_for_steps"]

_BACKENDS = {"tensorflow": "_tensorflow", "jax": "_jax", "torch": "_torch"}
"""The module of each backend; it holds `ModelAttachment` and `LoopStep`."""


def attachment(model: Any, session: Session) -> Attachment:
    """Return what puts the transaction around this model's train step.

    Raises:
        GuardError: where the running backend is not supported.
    """
    made: Attachment = _of_backend().ModelAttachment(model, session)
    return made


def loop_step(function: Callable[..., Any], session: Session) -> Callable[..., Any]:
    """Return a hand-written step as a transaction.

    Raises:
        GuardError: where the running backend is not supported.
    """
    made: Callable[..., Any] = _of_backend().LoopStep(function, session)
    return made


def adapted(model: Any, optimizers: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return a model and the optimizers of a loop as the library takes them, where the backend has others than Keras'.

    Raises:
        GuardError: where the running backend is not supported.
    """
    translate = getattr(_of_backend(), "adapted", None)
    return translate(model, optimizers) if translate is not None else (model, optimizers)


def waits_for_steps() -> bool:
    """Whether the host waits for each guarded step anyway.

    Raises:
        GuardError: where the running backend is not supported.
    """
    waits: bool = _of_backend().ModelAttachment.waits()
    return waits


def _of_backend() -> Any:
    backend = keras.backend.backend()
    if backend not in _BACKENDS:
        known = ", ".join(_BACKENDS)
        raise GuardError(expected(f"a backend among {known}", f"backend={backend!r}", "Set KERAS_BACKEND to one of them."))
    return importlib.import_module(f"keras_nanguard._attach.{_BACKENDS[backend]}")
