"""The transaction around a train step on TensorFlow: of a Keras trainer, and of a loop that has none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_nanguard._backends.shared import attach
from keras_nanguard._backends.shared.attach import STATE_PASSES_THROUGH_STEP, adapted
from keras_nanguard._backends.shared.batch_memory import held
from keras_nanguard._backends.tensorflow import faults, from_iterator, mirrored as mirrored_step, step
from keras_nanguard._backends.tensorflow.execution import Retrace
from keras_nanguard._backends.tensorflow.intercept import build
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras import fitting as keras_fitting, optimizers as keras_optimizers, overrides as instance_overrides
from keras_nanguard._keras.overrides import Overrides

__all__ = ["STATE_PASSES_THROUGH_STEP", "LoopStep", "ModelAttachment", "adapted"]


UNKNOWN = 8
"""Steps of one execution that are looked at, at most, of a train function that is not Keras' own."""


class ModelAttachment(attach.Attachment):
    """Stands in for the train function of a Keras trainer."""

    END_OF_DATA = (StopIteration, tf.errors.OutOfRangeError)
    LOGS_RESTORED = True

    _takes = False
    """Whether the host takes the batches off the data."""

    _exhausted: Any = None
    """The train function of the model without a guard, made when data end before anyone knows their size."""

    def _build(self) -> None:
        model, session, many = self.model, self.session, self.model.steps_per_execution
        mirrored = isinstance(model.distribute_strategy, tf.distribute.MirroredStrategy)
        jit, spread_out = bool(model.jit_compile) and not model.run_eagerly and not mirrored, self._spread_out()
        self._takes = self._is_keras_own() and not spread_out and (many == 1 or model.run_eagerly)
        kept = self._cached_step(self._takes, many, mirrored, jit, spread_out, model.run_eagerly, model.distribute_strategy)
        if kept is not None:
            transaction, self.inner, self._exhausted = kept
            transaction.rebind(session.read_train_state, session.note_created)
            self._place(transaction)
            model.train_function = self.run_execution
            return
        old = session.transaction
        transaction = (mirrored_step.MirroredTransaction if mirrored else step.Transaction)(
            self._body(),
            session.read_train_state,
            model=model,
            logs=True,
            jit=jit,
            counted=many if many > 1 else 0 if self._takes or spread_out else UNKNOWN,
            capacity=max(8, many),
            note_created=session.note_created,
            refuse=session.policy.refuse and (mirrored or not spread_out),
            batches="host" if self._takes else "reports" if spread_out else "graph",
            say=session.say,
        )
        if old is not None:
            transaction.inherit(old)
        self._place(transaction)
        self._build_optimizer()
        self.inner = self._made_by_keras(jit_compile=False)
        self._exhausted = None
        if self._takes and not model.run_eagerly:
            self.inner = from_iterator.Direct(faults.with_faults(model, model.train_step))
        model.train_function = self.run_execution

    def _body(self) -> Any:
        """Return the step to trace: where Keras has traced it since `compile`, with the weights trainable that were so then."""
        model, body = self.model, self.body
        if self._cached[0] is None or model.run_eagerly:
            return body

        def as_traced(data: Any) -> Any:
            with keras_fitting.as_built(model, keras_optimizers.find_optimizers(model)):
                return body(data)

        return as_traced

    def _build_optimizer(self) -> None:
        """Build the optimizer as Keras' own step would while it is traced: `tf.function` traces twice what makes variables."""
        model, optimizer = self.model, self.model.optimizer
        if self._stock and model.built and not (optimizer.built or model.run_eagerly or self._spread_out()):
            weights = model.trainable_weights
            if weights:
                build(optimizer, weights, eagerly=False)

    def _is_keras_own(self) -> bool:
        """Whether what Keras makes of the step is nothing but calls of it, one for each batch."""
        make = self._make
        return getattr(make, "__func__", None) is keras.Model.make_train_function or hasattr(make, "hooks")

    def _place(self, transaction: Any) -> None:
        """Put the transaction where the session and Keras look for it; Keras does whenever it traces."""
        transaction.recount(self.session.step)
        self.session.attach(self, transaction)
        instance_overrides.set_instance(self.model, "train_step", transaction)

    def _made(self) -> tuple[Any, Any, Any]:
        return self.session.transaction, self.inner, self._exhausted

    def detach(self) -> None:
        super().detach()
        if self.session.transaction is not None:
            self.session.transaction.release()

    def _spread_out(self) -> bool:
        """Whether the model trains under a `tf.distribute` strategy: but for one, steps are watched there, not refused."""
        return self.model.distribute_strategy is not tf.distribute.get_strategy() or tf.distribute.has_strategy()

    def _before_step(self, data: Any) -> None:
        """Let the host do what is due; if it is about to put a saved state in place, every variable that the step makes is there."""
        if self.session.resuming is not None:
            self._trace(getattr(data, "element_spec", None))
        super()._before_step(data)

    def prepare(self) -> None:
        """Have every variable that the first step would make."""
        if not self._spread_out():
            self._trace(keras_fitting.running_spec())

    def _trace(self, spec: Any) -> None:
        """Trace the step for data like this without running it, so that every variable that it makes is there to be written."""
        while spec is not None:
            try:
                self.session.transaction.trace(spec)
                return
            except Retrace:
                self._build()

    def _execute(self, data: Any) -> tuple[Any, Verdict]:
        if not self._takes:
            if isinstance(data, (tf.data.Iterator, tf.distribute.DistributedIterator)):
                return self._run(lambda: self.inner(data))
            batches = list(data)  # that of `train_on_batch`: a step that is traced anew takes it again
            return self._run(lambda: self.inner(iter(batches)))
        with faults.in_batches(self.model, self._taken(data)) as batches:
            given = [(batch,) for batch in batches]
            if self.model.run_eagerly:
                return self._run(lambda: self.inner(iter(batches)), given)
            return self._run(lambda: self.inner(batches[0], data), given)

    @property
    def can_run_again(self) -> bool:  # type: ignore[override]
        """Whether one execution is one step on one batch that the host has taken."""
        return self._takes and self.model.steps_per_execution == 1

    def run_again(self, args: Sequence[Any]) -> Verdict:
        """Run the step on the arguments of an earlier one; return the verdict."""
        (batch,) = args
        eager = self.model.run_eagerly
        return self._run(lambda: self.inner(iter([batch])) if eager else self.inner.again(batch), [(batch,)])[1]

    def _run(self, inner: Callable[[], Any], given: Sequence[Any] = ()) -> tuple[Any, Verdict]:
        """Run one execution, and trace its step in another mode where that is asked for."""
        while True:
            transaction = self.session.transaction
            if given:
                transaction.give(given)
            try:
                logs, verdict = transaction.read(inner())
                return logs, verdict
            except Retrace:
                self._build()

    def _taken(self, iterator: Any) -> list[Any]:
        """Take the batches of one execution off the data.

        Raises:
            StopIteration: where there is none.
        """
        batches: list[Any] = []
        try:
            while len(batches) < self.model.steps_per_execution:
                batches.append(from_iterator.next_batch(iterator))
        except StopIteration:
            if not batches:
                self._end(iterator)
                raise
        return batches

    def _end(self, iterator: Any) -> None:
        """Leave behind what a step of stock Keras does that finds no batch, where data end before anyone knows their size.

        Whatever needs nothing of the batch has run by the time that the rest fails: seeds go on, iterations are counted.
        A guarded run goes on from the same numbers.
        """
        if self.model.run_eagerly or not isinstance(iterator, tf.data.Iterator):
            return
        if self._exhausted is None:
            guarded = self.model.train_function
            with Overrides() as overrides:
                overrides.set(self.model, "train_step", self.body)
                self._exhausted = self._made_by_keras(self.model.jit_compile)
            self.model.train_function = guarded
        with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
            self._exhausted(iterator)


class LoopStep(attach.LoopStep):
    """One hand-written step, compiled or not, with its transaction."""

    def _transaction(self) -> step.Transaction:
        compiled = hasattr(self.function, "python_function")
        body = tf.autograph.to_graph(self.function.python_function) if compiled else self.function
        transaction = step.Transaction(
            lambda args, kwargs: body(*args, **kwargs),
            self.session.read_train_state,
            jit=compiled and bool(getattr(self.function, "_jit_compile", None)),
            note_created=self.session.note_created,
            refuse=self.session.policy.refuse,
            say=self.session.say,
        )
        self.run = tf.function(transaction, autograph=False, reduce_retracing=True) if compiled else transaction
        return transaction

    can_run_again = True

    def run_again(self, args: Sequence[Any]) -> Verdict:
        """Run the step on the arguments of an earlier one; return the verdict."""
        return self._execute(*args)[1]

    def _execute(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Verdict]:
        given = held((args, kwargs))
        while True:
            try:
                self.session.transaction.give([given])
                outputs, verdict = self.session.transaction.read(self.run(args, kwargs))
                return outputs, verdict
            except Retrace:
                self.rebuild()
