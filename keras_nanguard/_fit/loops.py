"""`guard.watch(model, *optimizers)` and `guard.step(function)`, for loops without `fit`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from keras_nanguard._backends.current import loop_step
from keras_nanguard._core.errors import GuardError, GuardInUseError, expected, require_keras_3
from keras_nanguard._fit.reporter import Reporter
from keras_nanguard._fit.session import Session
from keras_nanguard._keras import optimizers as keras_optimizers

Arguments = ParamSpec("Arguments")
Returned = TypeVar("Returned")


class LoopMixin:
    """The part of `NanGuard` for hand-written loops."""

    session: Session | None
    _reporter: Reporter
    _session: Callable[..., Session]
    _resume: Callable[[], None]
    _print_policy_warnings: Callable[[], None]
    _watching: bool = False

    @contextlib.contextmanager
    def watch(self, model: Any, *optimizers: Any) -> Iterator[Session]:
        """Return a context in which the steps that `step` returns are guarded.

        Args:
            model: a `keras.Model` or `keras.Layer` with the weights, compiled or not; on PyTorch
                also a `torch.nn.Module`.
            *optimizers: the Keras optimizers of the loop; by default those of the model. On PyTorch
                also those of `torch.optim`. On JAX omit an optimizer of optax, because its state is
                part of the state of the step.

        Raises:
            GuardError: if there is no optimizer, if one of them is not an optimizer (but a list,
                for example), or if the model or an optimizer is one of `tf_keras`.
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
                "Expected a guard that does not watch a loop yet. Received: a guard of a running"
                " loop. Use one NanGuard per loop."
            )
        require_keras_3(model, *optimizers)
        model, optimizers = loop_step().adapted(model, optimizers)
        optimizers = optimizers or tuple(keras_optimizers.find_optimizers(model))
        if not optimizers and not loop_step().STATE_PASSES_THROUGH_STEP:
            raise GuardError(
                "Expected at least one optimizer. Received: none, and the model has none. "
                "Write guard.watch(model, optimizer)."
            )
        for given in optimizers:
            if not hasattr(given, "built"):
                received = f"an object of type {type(given).__name__}"
                raise GuardError(expected("an optimizer of Keras", received, _remedy(given)))
        self.session = self._session(model, optimizers)
        self._reporter.begin()
        self._print_policy_warnings()
        self._resume()
        if self.session.resuming is not None:
            self._reporter.line(self.session.resuming.sentence())
        self._watching = True
        try:
            with loop_step().watching():
                yield self.session
            self.session.restore()  # if the loop had no steps left
            self.session.finished = True
        finally:
            self._watching = False
            try:
                self._reporter.line(self.session.bad_rows.line())
                self._reporter.end(self.session.run.counts, self.session.run.directory)
            finally:
                self.session.end()

    def step(self, function: Callable[Arguments, Returned]) -> Callable[Arguments, Returned]:
        """Return the train step as a transaction.

        Args:
            function: a train step that computes a loss and gradients, and calls `optimizer.apply`.
                A Python function runs eagerly. A `tf.function` is compiled with its own settings,
                including XLA. Every scalar that it returns counts as a loss.

        Returns:
            A callable with the same arguments and results. A refused step returns its computed
            values, including NaN. Check `guard.refused` after each call.

        Raises:
            GuardError: when called outside of `watch`.
        """
        held: dict[str, Any] = {}

        @functools.wraps(getattr(function, "python_function", function))
        def guarded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Returned:
            if not self._watching or self.session is None:
                raise GuardError(
                    "Expected a call inside of `with guard.watch(model, optimizer):`. Received: one"
                    " outside. Move the loop into the with block."
                )
            if held.get("session") is not self.session:
                held["session"], held["run"] = self.session, loop_step()(function, self.session)
            returned: Returned = held["run"](*args, **kwargs)
            return returned

        return guarded

    @property
    def refused(self) -> bool:
        """Whether the last step was refused."""
        return self.session is not None and self.session.run.counts.last_refused

    @property
    def stopped(self) -> bool:
        """Whether the policy has ended training. Your own loop has to check this after each
        step.
        """
        return self.session is not None and self.session.run.stopped


def _remedy(given: Any) -> str:
    """Return what to pass instead of an object that is not a Keras optimizer."""
    if isinstance(given, (list, set)) or type(given) is tuple:
        return "Pass each optimizer as its own argument: guard.watch(model, first, second)."
    if loop_step().STATE_PASSES_THROUGH_STEP:
        return "Write guard.watch(model), and pass the state of the optimizer through guard.step."
    return "Pass an optimizer of keras.optimizers, or on PyTorch one of torch.optim."
