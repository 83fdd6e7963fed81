"""The transaction on PyTorch, and what it knows between two steps. `execution` runs one.

In outline::

    keep      torch's generators and buffers; other small state is copied when the step writes it
    run       the user's step, up to its optimizer update
    verdict   are loss, gradients and written statistics finite, is the loss scale valid? one read
    commit    the update runs; weights and slots are read once
    refuse    the update does not run; all writes are undone, the loss scale is updated, batch and
              counts are reported

Nothing large is copied, unless the squares of the gradients overflow: then the update may, too, and
the updated state decides. In Keras' own train step everything else that can make it bad is known
when it calls its update. Another step may continue after its update in a way that can make it bad:
with a second update, or with statistics. The first steps show whether it does. Such a step is
updated at once, with the old values of what the update writes kept, and the verdict is computed at
its end.

The losses of a step are the results of `compute_loss`; of one that does not call it, the scalars
whose backward pass it runs; of one without a backward pass, the scalars that it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from keras_nanguard._backends import interface
from keras_nanguard._backends.shared.batches import losses_in_logs, owned, scalars, with_arrays
from keras_nanguard._backends.torch.attempt import GuardedStep, Learned
from keras_nanguard._backends.torch.execution import GuardedAttempt, complete
from keras_nanguard._backends.torch.intercept import Intercept
from keras_nanguard._backends.torch.judging import are_finite
from keras_nanguard._backends.torch.state import StateTensors
from keras_nanguard._core.verdict import Report
from keras_nanguard._keras import variables as keras_variables


class Given(tuple[Any, ...]):
    """The arguments of one step, kept until later steps need them.

    A tensor that shares its memory with a NumPy array, or with another process, is copied, because
    its owner may overwrite it unnoticed. So is a tensor of `torch.inference_mode`, which counts no
    writes. Any other tensor counts the writes to it, so changes are detected.

    Attributes:
        versions: each of these other tensors, with its version when it was given.
    """

    versions: list[tuple[Any, int]]

    @classmethod
    def of(cls, args: tuple[Any, ...]) -> Given:
        """Return these arguments, kept."""
        versions: list[tuple[Any, int]] = []

        def held(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
                return owned(value)
            if value.is_inference() or not value.untyped_storage().resizable():
                return value.detach().clone()
            versions.append((value, value._version))
            return value

        given = cls(with_arrays(held, args))
        given.versions = versions
        return given

    @property
    def is_unchanged(self) -> bool:
        """Whether none of them was written since."""
        return all(value._version == version for value, version in self.versions)


def _known(state: StateTensors, outputs: Any) -> Iterator[Any]:
    """Yield the tensors of a train state, their gradients, and those of the outputs of a step."""
    yield from (*state.all, *state.unlisted, *state.gradient_holders)
    yield from (p.grad for p in state.gradient_holders if p.grad is not None)
    yield from _tensors_of(outputs)


def _tensors_of(outputs: Any) -> Iterator[Any]:
    """Yield the tensors in what a step returns."""
    for item in keras_variables.flat(outputs):
        if isinstance(item, torch.Tensor):
            yield item
        elif item is not outputs:
            yield from _tensors_of(item)


class Transaction(GuardedStep):
    """Wraps the body of one train step; `run_step` runs the body as a transaction.

    Keras calls the transaction in place of the body, see `run_through`.

    Args:
        body: the step, `body(*args) -> outputs`.
        of_trainer: whether a Keras trainer runs the step: it returns logs, and the model's
            `compute_loss` returns the loss.
        stock, jit: as in `GuardedStep`.
        compiled: the compiled body of an earlier run, if there is one.

    Attributes:
        learned: what the steps so far have shown.
        state: the train state, as it was read last.
    """

    def __init__(
        self,
        body: Callable[..., Any],
        run: interface.Run,
        *,
        of_trainer: bool = False,
        stock: bool = False,
        jit: bool = False,
        compiled: Intercept | None = None,
    ):
        self.run, self.replayed, self.model = run, body, run.model if of_trainer else None
        self.stock, self.jit, self.compiled = stock, jit, compiled
        self.losses = losses_in_logs if of_trainer else scalars
        self.learned = Learned()
        self.reports = []
        self.state: StateTensors | None = None
        self._called: interface.Executed | None = None
        # The model's own at the last reading. Keras trains with another one as soon as it is set.
        self._optimizer = self._current_optimizer

    @property
    def _current_optimizer(self) -> Any:
        return getattr(self.model, "optimizer", None)

    def __call__(self, *args: Any) -> Any:
        self._called = self.run_step(*args)
        return self._called.outputs

    def run_through(self, function: Callable[[], Any]) -> interface.Executed | None:
        """Call a function of Keras that calls the transaction in place of the body. Return its
        result as the outputs of the step; `None` if it has called another step.
        """
        self._called = None
        result = function()
        executed, self._called = self._called, None
        return None if executed is None else executed._replace(outputs=result)

    def run_step(self, *args: Any) -> interface.Executed:
        """Run one step. Its outputs are `None` if it has raised an exception about a bad number."""
        state = self._current_state()
        intercept = self._intercept(state)
        given = Given.of(args)
        attempt = GuardedAttempt(self, state, is_compiled=intercept.compiled is not None)
        outside = attempt.log.outside
        try:
            verdict, self.learned = complete(attempt, intercept, args)
            outputs = attempt.outputs
        except BaseException:
            self.learned = self.learned.after_error()
            raise
        finally:
            attempt.release()
        # The step may have created slots: then the train state is read again.
        if not self.learned.changes_outside and outside.remain(_known(state, outputs)):
            lasts = outside.remain(_known(self.read_state(), outputs))
            self.learned = replace(self.learned, changes_outside=lasts)
        return interface.Executed(outputs, verdict, given)

    def _current_state(self) -> StateTensors:
        """Return the train state, which is read again if it may have changed."""
        learned, state = self.learned, self.state
        is_replaced = self._current_optimizer is not self._optimizer
        if is_replaced:
            self.compiled, self._optimizer = None, self._current_optimizer
        if state is None or is_replaced or learned.is_reading_due:
            state = self.state = self.read_state()
        return state

    def _intercept(self, state: StateTensors) -> Intercept:
        """Return what records the calls of a step: a new one, or that of the compiled body."""
        optimizers = state.train_state.found
        if not self.jit or self.learned.is_fresh:
            return Intercept(self.model, optimizers)
        self.compiled = self.compiled or Intercept(self.model, optimizers, self.replayed)
        return self.compiled

    def inherit(self, other: interface.Transaction) -> None:
        if isinstance(other.learned, Learned):
            self.learned = other.learned.of_another_body()

    def follow(self, previous: interface.Transaction) -> None:
        if isinstance(previous.learned, Learned):  # else no step has run
            self.learned = replace(self.learned, unread=previous.learned.unread)

    def has_left_bad(self) -> bool:
        unread, self.learned = self.learned.unread, replace(self.learned, unread={})
        return bool(unread) and not are_finite(unread, self.read_state())

    def batch(self, arguments: Given) -> Any:
        return tuple(arguments) if arguments.is_unchanged else None

    def take_reports(self, arguments: Any = None) -> list[Report]:
        reports, self.reports = self.reports, []
        return reports

    def keys_of(self, variable: Any) -> Iterable[int]:
        return (id(variable.value),)

    def release_run(self) -> None:
        self.learned = replace(self.learned, unread={})
