"""Loops without `fit`: their steps are guarded one by one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from keras_nanguard._backends.current import loop_step
from keras_nanguard._core.errors import GuardError, expected, require_keras_3
from keras_nanguard._fit.session import Session
from keras_nanguard._keras import optimizers as keras_optimizers

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


def guardable(model: Any, optimizers: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return model and optimizers of a hand-written loop in Keras' form, by default the optimizers
    of the model.

    Raises:
        GuardError: if there is no optimizer, if one of them is not an optimizer, or if one of them
            is of `tf_keras`.
    """
    require_keras_3(model, *optimizers)
    model, optimizers = loop_step().adapted(model, optimizers)
    optimizers = optimizers or tuple(keras_optimizers.find_optimizers(model))
    if not optimizers and not loop_step().STATE_PASSES_THROUGH_STEP:
        raise GuardError(
            "Expected at least one optimizer. Received: none, and the model has none. "
            "Write guard.watch(model, optimizer)."
        )
    for optimizer in optimizers:
        if not hasattr(optimizer, "built"):
            received = f"an object of type {type(optimizer).__name__}"
            raise GuardError(expected("an optimizer of Keras", received, _remedy(optimizer)))
    return model, optimizers


def _remedy(received: Any) -> str:
    """Return what to pass instead of an object that is not a Keras optimizer."""
    if isinstance(received, (list, set)) or type(received) is tuple:
        return "Pass each optimizer as its own argument: guard.watch(model, first, second)."
    if loop_step().STATE_PASSES_THROUGH_STEP:
        return "Write guard.watch(model), and pass the state of the optimizer through guard.step."
    return "Pass an optimizer of keras.optimizers, or on PyTorch one of torch.optim."


@contextlib.contextmanager
def watching(session: Session) -> Iterator[None]:
    """Return a context for a loop that has begun. It ends with the table of its incidents."""
    log = session.run.log
    try:
        with loop_step().watching():
            yield
        session.start.restore()  # if the loop had no steps left
        session.run.access.resolve_pending()
        session.check_end()
        session.finish()
    finally:
        try:
            log.line(log.bad_rows.line())
            log.end(session.run.counts, session.run.recovery.rate_factor)
        finally:
            session.end()


def guarded(
    function: Callable[Arguments, Returned], running: Callable[[], Session]
) -> Callable[Arguments, Returned]:
    """Return a train step as a transaction.

    Args:
        function: the train step.
        running: returns the session of the running loop.
    """
    of_loop = functools.lru_cache(1)(lambda session: loop_step()(function, session))

    @functools.wraps(getattr(function, "python_function", function))
    def step(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
        session = running()
        run, called = session.run, of_loop(session)
        previous = run.access
        if previous is not called:
            run.attach(called)
            called.follow(previous)
        returned: Returned = called(*args, **kwargs)
        return returned

    return step
