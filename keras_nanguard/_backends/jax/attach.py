"""The transaction around a train step on JAX: of a Keras trainer, and of a loop that has none."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_nanguard._backends.interface import GuardedSession
from keras_nanguard._backends.jax.outputs import LogOutputs, PlainOutputs
from keras_nanguard._backends.jax.packed import values
from keras_nanguard._backends.jax.step import Transaction, defers, on_accelerator
from keras_nanguard._backends.jax.strategies import Started
from keras_nanguard._backends.shared import attach
from keras_nanguard._backends.shared.attach import adapted
from keras_nanguard._backends.shared.batch_memory import owned
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.nonfinite_error import NonFiniteError
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras import fitting as keras_fitting, jax_trainer as _trainer

__all__ = ["LoopStep", "ModelAttachment", "adapted"]


class ModelAttachment(attach.Attachment):
    """Stands in for the train function of a Keras trainer.

    Keras hands the state to each step and takes it from it; the variables are empty meanwhile. A healthy step leaves
    them so. So each step of an execution is guarded by itself.

    Attributes:
        pending: the step whose verdict is still to be read; `None` where all were.
    """

    END_OF_DATA = (StopIteration,)

    pending: Started | None = None

    batches: Batches | None = None
    """The batches of the execution that runs."""

    _seen: Sequence[Batches] = ()

    _gathered = True
    """Whether Keras has gathered the state anew for the step that runs."""

    def __init__(self, model: Any, session: GuardedSession):
        if _trainer.uses_nnx():
            remedy = "Turn NNX off (keras.config.disable_nnx()), or train without NanGuard."
            raise GuardError(expected("Keras on JAX without NNX", "NNX enabled", remedy))
        super().__init__(model, session)
        self.trainer_state = _trainer.TrainerState(model, values)

    def sync_variables(self) -> None:
        self.trainer_state.sync_variables()

    def variables_readable(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the variables read as the state of this moment."""
        return self.trainer_state.variables_readable()

    @staticmethod
    def waits() -> bool:
        """Whether the host waits for the verdict of each step."""
        return not defers()

    def _build(self) -> None:
        model, session, old = self.model, self.session, self.session.transaction
        jit = bool(model.jit_compile) and not model.run_eagerly
        transaction = self._cached_step(jit, on_accelerator(), defers(), keras.distribution.distribution())
        if transaction is not None:
            transaction.rebind(session.read_train_state, session.with_adjustments)
        else:
            transaction = Transaction(
                self.body,
                session.read_train_state,
                lambda: _trainer.variables(model),
                outputs=LogOutputs(model),
                model=model,
                refuse=session.policy.refuse,
                jit=jit,
                owns_state=True,
                shardings=_trainer.shardings(model),
                scaling=session.with_adjustments,
                say=session.say,
            )
        if old is not None:
            transaction.inherit(old)
        session.attach(self, transaction)
        transaction.following = self._following
        self.outputs = transaction.outputs
        self.inner = _trainer.in_executions(model, self.step)
        model.train_function = self.run_execution

    def _call(self, *args: Any) -> Any:
        """Run Keras' own loop over the batches of one execution, which calls `step` for each."""
        state, iterator = args
        self.batches = batches = self._batches_of(iterator)
        return self.inner(state, batches if batches.early else iterator)

    def _batches_of(self, iterator: Any) -> Batches:
        """Return the batches of an iterator; of others those are kept that hold one, as of a `fit` that a callback's step interrupts."""
        found = next((batches for batches in self._seen if batches.iterator is iterator), None)
        if found is None:
            found = Batches(iterator, early=keras_fitting.may_look_ahead(iterator))
            self._seen = [*(batches for batches in self._seen if batches.next), found]
        return found

    def step(self, state: Any, data: Any) -> Any:
        """Run one guarded step, or start one whose verdict is read later; returns the logs and the state."""
        session, trainer_state = self.session, self.trainer_state
        self._gathered = state is not trainer_state.state
        trainer_state.receive(state)
        if self._gathered:  # a callback has had it in between, or this is `train_on_batch`
            self.resolve_pending()
        elif session.transaction.deferred and (session.may_run_ahead or self.pending is not None) and self._goes_on(data):
            return session.logs.shown, trainer_state.take()
        return self.run_guarded(data), trainer_state.take()

    def _following(self) -> tuple[Any, ...] | None:
        """Return the arguments of the next step where nothing is due before it, and a batch may be taken early.

        Not where Keras has gathered the state anew for this one: a callback that reads `self.model` has it do so after each step.
        """
        if self.batches is None or self._gathered or not self.session.nothing_pending:
            return None
        batch = self.batches.following()
        return None if batch is None else (batch,)

    def _before_step(self, data: Any) -> None:
        """Let the host do what is due; the variables hold the state for it, which a step has no need of otherwise."""
        session = self.session
        if session.needs_variables(self._gathered):
            session.sync_variables()
            session.before()

    def _skips(self, data: Any) -> bool:
        return self.session.skips_batches(iter((data,)), 1)

    def _execute(self, data: Any) -> tuple[Any, Verdict]:
        state, logs, verdict = self.session.transaction(self.trainer_state.take(), self.session.adjustments(), data)
        self.trainer_state.hold(state)
        return logs, verdict

    can_run_again = True

    def run_again(self, args: Sequence[Any]) -> Verdict:
        """Run the step on the arguments of an earlier one; return the verdict."""
        (data,) = args
        self._gathered = True  # for this step, after which none of `fit` comes: nothing is to be looked ahead at
        with self.trainer_state.gathered():
            return self._execute(data)[1]

    def _without_effect(self, data: Any) -> Any:
        """Return logs without a step: Keras has taken the batch already."""
        return self._shown()

    def _rescue(self) -> None:
        self.trainer_state.rescue()
        self._resolve_at_last()

    def _goes_on(self, data: Any) -> bool:
        """Run one train step whose verdict is read when the next one has been started; returns `False` where it has to wait.

        The verdict of the step before is read here. If there is more to do about that than to count it, this step is run
        again afterwards, from the state that the host then leaves; if it was not refused on its own, it stands.
        """
        session, transaction = self.session, self.session.transaction
        if not self.outputs.lasting:
            self.resolve_pending()
            return False
        before, self.pending = self.pending, None
        state, started = transaction.start(self.trainer_state.take(), session.adjustments(), data, after=before)
        self.trainer_state.hold(state)
        session.healed = False
        if before is None or (session.after(transaction.finish(before), last=False) and session.may_run_ahead):
            self.pending = started
        elif session.healed or (verdict := transaction.finish(started)).halted:
            return False
        else:
            session.after(verdict)
        session.logs_for_callbacks(started.outputs)
        return True

    def resolve_pending(self) -> None:
        """Read the verdict of the last step, if that was not done yet, and act on it."""
        pending, self.pending = self.pending, None
        if pending is not None:
            self.session.after(self.session.transaction.finish(pending))

    def _resolve_at_last(self) -> None:
        """The same where a fit is cut short by something else, which goes on to the user."""
        with contextlib.suppress(NonFiniteError):
            self.resolve_pending()

    def detach(self) -> None:
        """Give the model its own methods back."""
        self._resolve_at_last()
        self.batches, self._seen = None, ()
        super().detach()


class Batches:
    """The batches of an iterator, of which the next one can be seen before it is taken.

    Args:
        iterator: what gives them.
        early: whether it can; taking one from the iterator early may have effects.

    Attributes:
        next: a list that holds the next batch where it was seen.
    """

    def __init__(self, iterator: Iterator[Any], early: bool):
        self.iterator, self.early = iterator, early
        self.next: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.next.pop() if self.next else next(self.iterator)

    def following(self) -> Any:
        """Return the next batch, which nobody can write to any more; `None` where there is none, or it cannot be seen."""
        if self.early and not self.next:
            self.next = [jax.tree_util.tree_map(_frozen, batch) for batch in itertools.islice(self.iterator, 1)]
        return self.next[0] if self.next else None


def _frozen(value: Any) -> Any:
    """Return a value as it is, and of a NumPy array a copy that cannot be written to."""
    copy = owned(value)
    if copy is not value:
        copy.flags.writeable = False
    return copy


class LoopStep(attach.LoopStep):
    """One hand-written step, `step(state, *batch) -> (outputs, new_state)`, with its transaction.

    The state is a pytree that holds the values of the variables, as Keras' stateless calls take them. What else it
    holds (a random key) is given back on a refusal like the rest, and is no part of a snapshot.
    """

    def __init__(self, function: Callable[..., Any], session: GuardedSession):
        self.variables: list[Any] | None = None
        self.state: Any = None
        self.synced = False
        super().__init__(function, session)

    def _transaction(self) -> Transaction:
        session, compiled = self.session, hasattr(self.function, "lower")
        return Transaction(
            getattr(self.function, "__wrapped__", self.function) if compiled else self.function,
            session.read_train_state,
            lambda: self.variables or [],
            outputs=PlainOutputs(),
            model=session.model,
            refuse=session.policy.refuse,
            jit=compiled,
            scaling=session.with_adjustments,
            say=session.say,
        )

    def __call__(self, state: Any, *batch: Any, **more: Any) -> tuple[Any, Any]:
        """Run one step; returns its outputs and the state to go on with."""
        session, given = self.session, self.state
        if self.variables is None:
            self.variables = _owners(state, session)
        self.state, self.synced = state, False
        if session.needs_variables(state is not given):
            session.sync_variables()
            session.before()
        function = session.transaction
        state, outputs, verdict = function(self._taken(), session.adjustments(), *batch, **more)
        self.state, self.synced = state, False
        session.after(verdict)
        return outputs, self._taken()

    can_run_again = True

    def run_again(self, args: Sequence[Any]) -> Verdict:
        """Run the step on the arguments of an earlier one; return the verdict."""
        verdict: Verdict
        self.state, _, verdict = self.session.transaction(self._taken(), self.session.adjustments(), *args)
        self.synced = False
        return verdict

    def held(self) -> Callable[[], None]:
        """Return what puts keys, averages and counters of the loop's own back; they are in the state alone."""
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

    @contextlib.contextmanager
    def variables_readable(self) -> Iterator[None]:
        """Let the variables read as the state of this moment; here they can as well hold it."""
        self.sync_variables()
        yield

    def _taken(self) -> Any:
        """Return the state of this moment."""
        if self.synced:
            leaves, tree = jax.tree_util.tree_flatten(self.state)
            owned = zip(self.variables or (), leaves)
            self.state = tree.unflatten([leaf if variable is None else variable.value for variable, leaf in owned])
            self.synced = False
        return self.state


def _owners(state: Any, session: GuardedSession) -> list[Any]:
    """Return the variable whose value each array of the state is, `None` for one that is no variable's.

    An array that a variable holds is its value. A state of other arrays has to hold one for each variable, in the order
    of Keras: trainable, non-trainable, of the optimizers, and of the metrics if there are any more.
    """
    model, leaves = session.model, jax.tree_util.tree_leaves(state)
    optimizers = session.read_train_state().optimizers
    main = [*model.trainable_variables, *model.non_trainable_variables, *(v for o in optimizers for v in o.variables)]
    metrics = list(getattr(model, "metrics_variables", ()))
    known = {id(v.value): v for v in [*main, *metrics]}
    found = [known.get(id(leaf)) for leaf in leaves]
    shapes = [tuple(np.shape(leaf)) for leaf in leaves]
    if not all(any(v is f for f in found) for v in model.trainable_variables):
        for order in (main, [*main, *metrics]):
            if [tuple(v.shape) for v in order] == shapes:
                return order
        layout = "(trainable_variables, non_trainable_variables, optimizer_variables)"
        remedy = "Begin with the values of the variables, [v.value for v in model.trainable_variables] and so on."
        raise GuardError(expected(f"a state of {layout}", f"arrays of shapes {shapes}", remedy))
    return found
