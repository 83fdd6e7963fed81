"""Attaches the transaction to a train step on JAX: of a Keras trainer, and of a loop without
one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_nanguard._backends.interface import Executed, Run, Session
from keras_nanguard._backends.jax.step import StartedStep, Transaction
from keras_nanguard._backends.shared import attach
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._keras import jax_trainer as _trainer, optimizers as keras_optimizers


class ModelAttachment(attach.Attachment):
    """Replaces the train function of a Keras trainer.

    Keras passes the state to each step and receives it back. Meanwhile the variables are empty, and
    a healthy step does not change that. Each step of an execution is guarded separately.

    A step may start before the verdict of the previous one is read. What follows for it:

    | previous step | the host | this step |
    |---|---|---|
    | none is pending | | is pending |
    | healthy | only counted it | is pending |
    | healthy | has a task now | is finished at once |
    | healthy, but ran a second time | | was halted, and runs again |
    | bad | handled it | was halted, and runs again |
    | any | replaced the state | runs again on the new state |

    Attributes:
        pending: the step whose verdict has not been read yet, or `None`.
    """

    transaction: Transaction

    can_run_again = True

    pending: StartedStep | None = None

    _gathered = True
    """Whether Keras has gathered the state again for the running step."""

    def __init__(self, model: Any, session: Session):
        if _trainer.uses_nnx():
            remedy = "Turn NNX off (keras.config.disable_nnx()), or train without NanGuard."
            raise GuardError(expected("Keras on JAX without NNX", "NNX enabled", remedy))
        super().__init__(model, session)
        self.trainer_state = _trainer.TrainerState(model)

    def sync_variables(self) -> None:
        self.trainer_state.sync_variables()

    def variables_readable(self) -> contextlib.AbstractContextManager[None]:
        return self.trainer_state.variables_readable()

    def _build(self) -> None:
        model, run = self.model, self.run
        jit = bool(model.jit_compile) and not model.run_eagerly
        self.trace_key = jit, keras.distribution.distribution()
        transaction: Transaction | None = self._take_kept()
        if transaction is not None:
            transaction.rebind(run)
        else:
            transaction = Transaction(
                self.body,
                run,
                lambda: _trainer.variables(model),
                lambda: _trainer.stored(model),
                of_trainer=True,
                jit=jit,
                shardings=_trainer.shardings(model),
            )
            transaction.inherit(self.transaction)
        self.transaction = transaction
        self.inner = _trainer.in_executions(model, self.step)
        model.train_function = self.run_execution

    def _call(self, *args: Any) -> Any:
        """Run Keras' own loop over the batches of one execution; it calls `step` for each batch."""
        *state, data = args
        if _trainer.shares_memory(data) and keras.distribution.distribution() is None:
            data = iter(jax.tree_util.tree_map(jnp.copy, list(data)))
        return self.inner(*state, data)

    def step(self, state: Any, data: Any) -> Any:
        """Run one guarded step; return its logs and the state."""
        self._gathered = self.trainer_state.receive(state)
        transaction = self.transaction
        ahead = self.session.may_run_ahead or self.pending is not None
        if ahead and transaction.may_run_ahead and not self._gathered:
            return self._run_ahead(data), self.trainer_state.take()
        self.resolve_pending()
        return self.run_guarded(data), self.trainer_state.take()

    def _run_ahead(self, data: Any) -> Any:
        """Start a step, then read the verdict of the one before; return the logs of the step.

        Its own verdict is read after the next step has started, unless the host has to act first.
        """
        session, started = self.session, self._start(data, after=self.pending)
        replacements = self.run.replacements
        if self.pending is None or (self._read_pending(last=False) and session.may_run_ahead):
            self.pending = started
            return session.logs_for_callbacks(started.computed.outputs)
        if self.run.replacements == replacements:
            executed = self._finished(started)
            if not executed.verdict.halted:
                session.after(executed)
                return session.logs_for_callbacks(executed.outputs)
        # The step was halted, or the host has replaced its state: it runs again.
        return self.run_guarded(data)

    def _before_step(self, data: Any) -> None:
        self.session.before(written=self._gathered)

    def _without_skipped(self, data: Any) -> Any:
        return None if self.session.skip_batches(iter((data,)), 1) else data  # it is one batch

    def _execute(self, data: Any) -> Executed:
        self._running = (data,)
        return self._finished(self._start(data))

    def _start(self, data: Any, after: StartedStep | None = None) -> StartedStep:
        """Start a step, and publish its new state before waiting for it."""
        transaction, trainer_state = self.transaction, self.trainer_state
        started = transaction.start(trainer_state.take(), data, after=after)
        trainer_state.hold(started.computed.state)
        transaction.published()
        return started

    def _finished(self, started: StartedStep) -> Executed:
        """Wait for the verdict of a step, which may have to run again."""
        executed = self.transaction.finish(started)
        return self.run_again(started.args) if executed is None else executed

    def run_again(self, args: Sequence[Any]) -> Executed:
        with self.trainer_state.gathered():
            return self._finished(self._start(*args))

    def _without_effect(self, data: Any) -> Any:
        """Return logs without a step, because Keras has already taken the batch."""
        return self._shown()

    def resolve_pending(self) -> None:
        if self.pending is not None:
            self._read_pending(last=True)

    def _read_pending(self, last: bool) -> bool:
        """Read the verdict of the pending step; `last` if no other step was started since.

        Returns:
            Whether the step is healthy and has not run a second time. If it has, the next step was
            halted.
        """
        pending = self.pending
        assert pending is not None
        first = self.transaction.finish(pending)
        executed = self.run_again(pending.args) if first is None else first
        self.pending = None
        return self.session.after(executed, state_is_current=last) and first is not None

    def _rescue(self) -> None:
        for computed in getattr(self.transaction, "unpublished", ()):
            self.trainer_state.hold(computed.state)
        self.trainer_state.rescue()
        self._resolve_at_last()

    def _resolve_at_last(self) -> None:
        """Read the last verdict of a fit that ended by an error. The user receives that error."""
        with contextlib.suppress(Exception):
            self.resolve_pending()
        self.pending = None

    def detach(self) -> None:
        self._resolve_at_last()
        super().detach()


class LoopStep(attach.LoopStep):
    """One hand-written step, `step(state, *batch) -> (outputs, new_state)`, with its transaction.

    The state is a pytree with the values of the variables, as for Keras' stateless calls. Other
    leaves (a random key) are restored on a refusal, too, but are not part of a snapshot.
    """

    transaction: Transaction

    STATE_PASSES_THROUGH_STEP = True

    def __init__(self, function: Callable[..., Any], session: Session):
        self.variables: list[Any] | None = None
        self.state: Any = None
        self.synced = False
        super().__init__(function, session)

    def _transaction(self) -> Transaction:
        compiled = hasattr(self.function, "lower")
        body = getattr(self.function, "__wrapped__", self.function) if compiled else self.function
        return Transaction(
            lambda state, args, kwargs: body(state, *args, **kwargs),
            self.run,
            lambda: self.variables or [],
            self._stored,
            of_trainer=False,
            jit=compiled,
        )

    def __call__(self, state: Any, *batch: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Run one step; return its outputs and the state to continue with."""
        previous = self.state
        if self.variables is None:
            self.variables = _owners(state, self.run)
        self.state, self.synced = state, False
        self.session.before(written=state is not previous)
        return self._run(batch, kwargs), self._taken()

    def _execute(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Executed:
        self.state, executed = self.transaction(self._taken(), args, kwargs)
        self.synced = False
        return executed

    def loop_state_restorer(self) -> Callable[[], None]:
        """Return a function that restores the loop's own keys, averages and counters, which exist
        only in the state.
        """
        self.sync_variables()
        state = self.state

        def restore() -> None:
            self.state, self.synced = state, state is not None

        return restore

    def sync_variables(self) -> None:
        if self.synced or self.state is None:
            return
        self.synced = True
        for variable, value in zip(self.variables or (), jax.tree_util.tree_leaves(self.state)):
            if variable is not None:
                variable.assign(value)

    def _taken(self) -> Any:
        if self.synced:
            self.state, self.synced = self._stored(), False
        return self.state

    def _stored(self) -> Any:
        """Return the current state with the values of the variables."""
        leaves, tree = jax.tree_util.tree_flatten(self.state)
        pairs = zip(self.variables or (), leaves)
        return tree.unflatten([a if v is None else v.value for v, a in pairs])


def _owners(state: Any, run: Run) -> list[Any]:
    """Return the variable of each array of the state, or `None`.

    An array that a variable has is its value. A state of other arrays must have one for each
    variable, in the order of Keras: trainable, non-trainable, of the optimizers, and of the metrics
    if there are more.

    Raises:
        GuardError: if the state has neither.
    """
    model, leaves = run.model, jax.tree_util.tree_leaves(state)
    given = set(map(id, leaves))
    for optimizer in run.read_train_state().unused:
        if any(id(v.value) in given for v in optimizer.variables):
            keras_optimizers.note_use(model, optimizer)
    optimizers = run.read_train_state().optimizers
    main = [
        *model.trainable_variables,
        *model.non_trainable_variables,
        *(v for o in optimizers for v in o.variables),
    ]
    metrics = list(getattr(model, "metrics_variables", ()))
    variable_of = {id(v.value): v for v in [*main, *metrics]}
    owners = [variable_of.get(id(leaf)) for leaf in leaves]
    shapes = [tuple(np.shape(leaf)) for leaf in leaves]
    if not all(any(v is owner for owner in owners) for v in model.trainable_variables):
        for order in (main, [*main, *metrics]):
            if [tuple(v.shape) for v in order] == shapes:
                return order
        layout = "(trainable_variables, non_trainable_variables, optimizer_variables)"
        remedy = (
            "Begin with the values of the variables, "
            "[v.value for v in model.trainable_variables] and so on."
        )
        raise GuardError(expected(f"a state of {layout}", f"arrays of shapes {shapes}", remedy))
    return owners
