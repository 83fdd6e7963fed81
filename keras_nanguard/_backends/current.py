"""Selects the running backend. All other modules call the functions of this one."""

from __future__ import annotations

import functools
import importlib
import platform
import sys
from typing import Any

import keras
import numpy as np

from keras_nanguard._backends import interface
from keras_nanguard._core.errors import BACKENDS, GuardError, expected
from keras_nanguard._version import __version__


def name() -> str:
    """Return the name of the running backend."""
    return str(keras.backend.backend())


def versions() -> dict[str, str]:
    """Return the versions of this library, Keras, its backend, NumPy and Python."""
    return {
        "keras_nanguard": __version__,
        "keras": keras.__version__,
        name(): str(getattr(sys.modules.get(name()), "__version__", "")),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _module(part: str) -> Any:
    """Return one module of the running backend.

    Raises:
        GuardError: if the running backend is not supported.
    """
    backend = name()
    if backend not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise GuardError(
            expected(
                f"a backend among {known}",
                f"backend={backend!r}",
                "Set KERAS_BACKEND to one of them.",
            )
        )
    return importlib.import_module(f"keras_nanguard._backends.{backend}.{part}")


def attachment(model: Any, session: interface.Session) -> Any:
    """Return a `shared.attach.Attachment` of the transaction to this model's train step."""
    return _module("attach").ModelAttachment(model, session)


def loop_step() -> Any:
    """Return the `shared.attach.LoopStep` that makes a hand-written step a transaction."""
    return _module("attach").LoopStep


def fault_hook(model: Any, fault: Any) -> Any:
    """Return a `shared.faults.FaultHook` that injects a fault into the steps of a model."""
    return _module("faults").Hook(model, fault)


@functools.cache
def replay() -> interface.Replay:
    """Return what replays a step for a diagnosis."""
    made: interface.Replay = _module("replay").Replay()
    return made


@functools.cache
def host() -> interface.Host:
    """Return the functions for the process as a whole."""
    made: interface.Host = _module("host").Host()
    return made
