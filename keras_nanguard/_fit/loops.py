"""Guarding a loop that has no Keras trainer: `guard.watch(model, *optimizers)` and `guard.step(fn)`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from keras_nanguard._backends.current import adapted, loop_step, state_passes_through_step
from keras_nanguard._core.errors import GuardError, GuardInUseError, expected, require_keras_3
from keras_nanguard._fit.bad_rows import BadRows
from keras_nanguard._fit.reporter import Reporter
from keras_nanguard._fit.session import Session
from keras_nanguard._keras import optimizers as keras_optimizers

__all__ = ["LoopMixin"]

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


class LoopMixin:
    """The part of `NanGuard` for hand-written loops."""

    session: Session | None
    _reporter: Reporter
    _bad_rows: BadRows
    _watching: bool = False

    def _session(self, model: Any, optimizers: Any = None) -> Session:
        raise NotImplementedError

    def _resume(self, steps: int | None = None) -> None:
        raise NotImplementedError

    def _print_policy_warnings(self) -> None:
        raise NotImplementedError

    @contextlib.contextmanager
    def watch(self, model: Any, *optimizers: Any) -> Iterator[Session]:
        """Guard the steps made with `step` for this model and these optimizers.

        Args:
            model: any `keras.Model` or `keras.Layer` that holds the weights, compiled or not; on PyTorch any
                `torch.nn.Module`, too.
            *optimizers: the optimizers of Keras that the loop uses; by default those of the model. On PyTorch also those of
                `torch.optim`. On JAX none is needed for an optimizer of optax: its state passes through the step.

        Raises:
            GuardError: if there is no optimizer, if one of them is something else (a list of them), or if the model or an optimizer
                is one of `tf_keras`.
            GuardInUseError: if this guard already watches a loop.

        Example:

        ```python
        with guard.watch(model, optimizer):
            step = guard.step(train_step)
            for x, y in batches:
                loss = step(x, y)
                if guard.stopped:
                    break
        ```
        """
        if self._watching:
            raise GuardInUseError(
                "Expected a guard that watches no loop. Received: one that does. Use one NanGuard for each loop."
            )
        require_keras_3(model, *optimizers)
        model, optimizers = adapted(model, optimizers)
        optimizers = optimizers or tuple(keras_optimizers.find_optimizers(model))
        if not optimizers and not state_passes_through_step():
            raise GuardError(
                "Expected at least one optimizer. Received: none, and the model has none. "
                "Write guard.watch(model, optimizer)."
            )
        for given in optimizers:
            if not hasattr(given, "built"):
                received = f"an object of type {type(given).__name__}"
                raise GuardError(expected("an optimizer of Keras", received, _remedy(given)))
        self.session = self._session(model, optimizers)
        self._reporter.begin(self.session.directory)
        self._print_policy_warnings()
        self._resume()
        if self.session.resuming is not None:
            self._reporter.line(self.session.resuming.sentence())
        self._watching = True
        try:
            yield self.session
            self.session.restore()  # where the loop had no step left to make
            self.session.finished = True
        finally:
            self._watching = False
            try:
                self._reporter.bad_rows(self._bad_rows.line())
                self._reporter.end(self.session.counts, self.session.directory)
            finally:
                self.session.end()

    def step(self, function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
        """Return the step as a transaction.

        Args:
            function: one train step: it computes a loss, takes gradients and calls `optimizer.apply`. Plain Python runs
                eagerly; a `tf.function` is compiled as it was, XLA included. Every scalar that it returns counts as its
                loss.

        Returns:
            A callable of the same arguments and results. What a refused step returns is what it computed, NaN included;
            `guard.refused` says whether the last step was refused.

        Raises:
            GuardError: when called outside of `watch`.
        """
        held: dict[str, Any] = {}

        @functools.wraps(getattr(function, "python_function", function))
        def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
            if not self._watching or self.session is None:
                raise GuardError(
                    "Expected a call inside of `with guard.watch(model, optimizer):`. Received: one outside. "
                    "Move the loop into the with block."
                )
            if held.get("session") is not self.session:
                held["session"], held["run"] = self.session, loop_step(function, self.session)
            returned: Returned = held["run"](*args, **kwargs)
            return returned

        return guarded

    @property
    def refused(self) -> bool:
        """Whether the last step of a watched loop was refused."""
        return self.session is not None and self.session.counts.last_refused

    @property
    def stopped(self) -> bool:
        """Whether the policy has ended training; a loop of your own has to look."""
        return self.session is not None and self.session.stopped


def _remedy(given: Any) -> str:
    """Return what to write in place of something that is not an optimizer of Keras."""
    if isinstance(given, (list, set)) or type(given) is tuple:
        return "Pass each optimizer as its own argument: guard.watch(model, first, second)."
    if state_passes_through_step():
        return "Write guard.watch(model), and pass the state of the optimizer through guard.step."
    return "Pass an optimizer of keras.optimizers, or on PyTorch one of torch.optim."
