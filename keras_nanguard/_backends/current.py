"""Selects the running backend. All other modules call the functions of this one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

import keras

from keras_nanguard._backends import interface
from keras_nanguard._core.errors import GuardError, expected

__all__ = [
    *(
        "BACKENDS",
        "adapted",
        "attachment",
        "compiled_replay",
        "fault_hook",
        "host",
        "loop_step",
        "name",
    ),
    *("replay", "state_passes_through_step"),
]

BACKENDS = ("tensorflow", "jax", "torch")
"""Names of packages next to this module, with the modules that `interface` declares."""


def name() -> str:
    """Return the name of the running backend."""
    return str(keras.backend.backend())


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


def attachment(model: Any, session: interface.GuardedSession) -> interface.Attachment:
    """Return the attachment of the transaction to this model's train step."""
    made: interface.Attachment = _module("attach").ModelAttachment(model, session)
    return made


def loop_step(
    function: Callable[..., Any], session: interface.GuardedSession
) -> Callable[..., Any]:
    """Return a hand-written step as a transaction."""
    made: Callable[..., Any] = _module("attach").LoopStep(function, session)
    return made


def adapted(model: Any, optimizers: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return the model and the optimizers of a loop in Keras' form, if the backend has its own."""
    found: tuple[Any, tuple[Any, ...]] = _module("attach").adapted(model, optimizers)
    return found


def state_passes_through_step() -> bool:
    """Return whether a hand-written step takes and returns the state of its optimizers."""
    found: bool = _module("attach").STATE_PASSES_THROUGH_STEP
    return found


def replay() -> interface.Replay:
    """Return the module that replays a step eagerly for a diagnosis."""
    return cast(interface.Replay, _module("replay"))


def compiled_replay() -> interface.CompiledReplay:
    """Return the module that replays a step in its compiled mode."""
    return cast(interface.CompiledReplay, _module("compiled_replay"))


def fault_hook(model: Any, fault: Any) -> Any:
    """Return the hook that injects a fault into the steps of a model, a `FaultHook`."""
    return _module("faults").Hook(model, fault)


def host() -> interface.Host:
    """Return the module for the process as a whole."""
    return cast(interface.Host, _module("host"))
