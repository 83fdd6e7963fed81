"""Attaches the transaction to a train step on TensorFlow: of a Keras trainer, and of a loop without
one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_nanguard._backends.shared import attach
from keras_nanguard._backends.shared.batch_memory import held
from keras_nanguard._backends.tensorflow import step
from keras_nanguard._backends.tensorflow.execution import Retrace
from keras_nanguard._backends.tensorflow.intercept import build
from keras_nanguard._backends.tensorflow.mirrored import MirroredTransaction
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras import (
    fitting as keras_fitting,
    optimizers as keras_optimizers,
    overrides as instance_overrides,
)


class ModelAttachment(attach.Attachment):
    """Replaces the train function of a Keras trainer."""

    END_OF_DATA = (StopIteration, tf.errors.OutOfRangeError)
    LOGS_RESTORED = True

    _takes = False
    """Whether the host takes each batch off the data: an execution is one step of Keras' own."""

    _eager = False
    """Whether the step runs eagerly."""

    def _build(self) -> None:
        model, run, many = self.model, self.run, self.model.steps_per_execution
        strategy, spread_out = model.distribute_strategy, self._spread_out()
        mirrored = isinstance(strategy, tf.distribute.MirroredStrategy)
        self._eager = bool(model.run_eagerly) or tf.config.functions_run_eagerly()
        jit = bool(model.jit_compile) and not self._eager and not mirrored
        self._takes = self._is_keras_own() and not spread_out and many == 1
        modes = (self._takes, many, mirrored, jit, spread_out, self._eager, strategy)
        cached = self._cached_step(*modes)
        if cached is not None:
            transaction, self.inner = cached
            transaction.rebind(run.read_train_state, run.note_created)
            self._place(transaction)
            model.train_function = self.run_execution
            return
        old = run.transaction
        transaction = (MirroredTransaction if mirrored else step.Transaction)(
            self._body(),
            run.read_train_state,
            model=model,
            logs=True,
            jit=jit,
            counted=many > 1 or not (self._takes or spread_out),
            note_created=run.note_created,
            refuse=run.refuses and (mirrored or not spread_out),
            host_has_batches=self._takes,
        )
        if old is not None:
            transaction.inherit(old)
        self._place(transaction)
        self._build_optimizer()
        self.inner = self._made_by_keras(jit_compile=False)
        if self._takes and not self._eager:
            self.inner = step.Direct(transaction)
        model.train_function = self.run_execution

    def _body(self) -> Any:
        """Return the step to trace.

        If Keras has traced it since `compile`, the trainable weights are those of that time.
        """
        model, body = self.model, self.body
        if self._cached[0] is None or self._eager:
            return body

        def as_traced(data: Any) -> Any:
            with keras_fitting.as_built(model, keras_optimizers.find_optimizers(model)):
                return body(data)

        return as_traced

    def _build_optimizer(self) -> None:
        """Build the optimizer as Keras' own step would during tracing.

        `tf.function` traces a step twice if it creates variables.
        """
        model, optimizer = self.model, self.model.optimizer
        in_graph = self._stock and model.built and not (self._eager or self._spread_out())
        if in_graph and not optimizer.built and model.trainable_weights:
            build(optimizer, model.trainable_weights, eagerly=False)

    def _is_keras_own(self) -> bool:
        """Whether Keras' train function only calls the step, once for each batch."""
        make = self._make
        return getattr(make, "__func__", None) is keras.Model.make_train_function

    def _place(self, transaction: Any) -> None:
        """Set the transaction on the session, and on the model for Keras to trace."""
        transaction.recount(self.run.step)
        self.run.attach(self, transaction)
        instance_overrides.set_instance(self.model, "train_step", transaction)

    def _made(self) -> tuple[Any, Any]:
        return self.run.transaction, self.inner

    def detach(self) -> None:
        super().detach()
        if self.run.transaction is not None:
            self.run.transaction.release()

    def _spread_out(self) -> bool:
        """Whether the model trains under a `tf.distribute` strategy.

        Under all of them but `MirroredStrategy` steps are checked, but not refused.
        """
        default = tf.distribute.get_strategy()
        return self.model.distribute_strategy is not default or tf.distribute.has_strategy()

    def _before_step(self, data: Any) -> None:
        """Run the tasks of the host that are due.

        If it is about to restore a saved state, all variables of the step are created first.
        """
        if self.session.resuming is not None:
            self._trace(getattr(data, "element_spec", None))
        super()._before_step(data)

    def prepare(self) -> bool:
        """Create every variable that the first step would create; return whether all of them
        exist.
        """
        spec = None if self._spread_out() else keras_fitting.running_spec()
        self._trace(spec)
        return spec is not None

    def _trace(self, spec: Any) -> None:
        """Trace the step for data like this without running it, which creates its variables."""
        while spec is not None:
            try:
                self.run.transaction.trace(spec)
                return
            except Retrace as found:
                self._retrace(found)

    def _retrace(self, found: Retrace) -> None:
        """Create the step again, with the findings of its trace."""
        self.run.transaction.learn(found)
        self._build()

    def _execute(self, data: Any) -> tuple[Any, Verdict]:
        if tf.config.functions_run_eagerly() and not self._eager:
            self._build()
        if not self._takes:
            if isinstance(data, (tf.data.Iterator, tf.distribute.DistributedIterator)):
                return self._run(lambda: self.inner(data))
            batches = list(data)  # of `train_on_batch`: a second trace reads it again
            return self._run(lambda: self.inner(iter(batches)))
        batch = self.run.transaction.take(data)
        if self._eager:
            return self._run(lambda: self.inner(iter([batch])), (batch,))
        return self._run(lambda: self.inner(batch, data), (batch,))

    @property
    def can_run_again(self) -> bool:  # type: ignore[override]
        """Whether one execution is one step on one batch that the host has."""
        return self._takes

    def run_again(self, args: Sequence[Any]) -> Verdict:
        """Run the step on the arguments of an earlier one; return the verdict."""
        (batch,) = args
        return self._run(
            lambda: self.inner(iter([batch])) if self._eager else self.inner.again(batch), (batch,)
        )[1]

    def _run(self, inner: Callable[[], Any], args: Any = None) -> tuple[Any, Verdict]:
        """Run one execution, and trace its step in another mode if its trace requires it."""
        while True:
            transaction = self.run.transaction
            transaction.give(args)
            try:
                logs, verdict = transaction.read(inner())
                return self._restored(logs) if verdict.refused else logs, verdict
            except Retrace as found:
                self._retrace(found)

    def _restored(self, logs: Any) -> Any:
        """Return the logs of a refused step: those of the restored metrics, without it.

        A log of the user's own gets the value of the last committed step.
        """
        if not isinstance(logs, dict):
            return logs
        now = self.model.get_metrics_result() if self._stock else {}
        known = {**(self.session.logs.known or {}), **now}
        return {name: known.get(name, value) for name, value in logs.items()}


class LoopStep(attach.LoopStep):
    """One hand-written step, compiled or not, with its transaction."""

    def _transaction(self) -> step.Transaction:
        written = getattr(self.function, "python_function", None)
        compiled = written is not None and not tf.config.functions_run_eagerly()
        body = tf.autograph.to_graph(written) if compiled else written or self.function
        transaction = step.Transaction(
            lambda args, kwargs: body(*args, **kwargs),
            self.run.read_train_state,
            jit=compiled and bool(getattr(self.function, "_jit_compile", None)),
            note_created=self.run.note_created,
            refuse=self.run.refuses,
        )
        how = {"autograph": False, "reduce_retracing": True}
        self.compiled = tf.function(transaction, **how) if compiled else transaction
        return transaction

    can_run_again = True

    def run_again(self, args: Sequence[Any]) -> Verdict:
        """Run the step on the arguments of an earlier one; return the verdict."""
        return self._execute(*args)[1]

    def _execute(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Verdict]:
        """Run one step; return its outputs and its verdict."""
        given = held((args, kwargs))
        while True:
            transaction = self.run.transaction
            transaction.give(given)
            try:
                outputs, verdict = transaction.read(self.compiled(args, kwargs))
                return outputs, verdict
            except Retrace as found:
                transaction.learn(found)
                self.rebuild()
