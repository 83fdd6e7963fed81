"""Attaches the transaction to a train step on TensorFlow: of a Keras trainer, and of a loop without
one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_nanguard._backends.interface import Run
from keras_nanguard._backends.shared import attach
from keras_nanguard._backends.shared.batches import held
from keras_nanguard._backends.tensorflow import step
from keras_nanguard._backends.tensorflow.execution import Retrace
from keras_nanguard._backends.tensorflow.intercept import build
from keras_nanguard._backends.tensorflow.mirrored import MirroredTransaction
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras import (
    fitting as keras_fitting,
    optimizers as keras_optimizers,
    overrides as instance_overrides,
    train_state as keras_state,
)


class _Modes(NamedTuple):
    """What the traced step of a fit depends on, besides the model.

    Attributes:
        takes: whether the host takes each batch from the iterator: an execution is one step of
            Keras' own train function.
        eager: whether the step runs eagerly.
        jit: whether XLA compiles it.
        mirrored: whether the model trains under `MirroredStrategy`.
        spread_out: whether it trains under any strategy.
        several: steps per execution.
        strategy: its strategy.
    """

    takes: bool
    eager: bool
    jit: bool
    mirrored: bool
    spread_out: bool
    several: int
    strategy: Any

    @classmethod
    def of(cls, model: Any, keras_own: bool) -> _Modes:
        """Return the current modes.

        Args:
            model: the model.
            keras_own: whether Keras' train function only calls the step, once for each batch.
        """
        strategy, several = model.distribute_strategy, model.steps_per_execution
        mirrored = isinstance(strategy, tf.distribute.MirroredStrategy)
        default = tf.distribute.get_strategy()
        spread_out = strategy is not default or tf.distribute.has_strategy()
        eager = bool(model.run_eagerly) or tf.config.functions_run_eagerly()
        jit = bool(model.jit_compile) and not eager and not mirrored
        takes = keras_own and not spread_out and several == 1
        return cls(takes, eager, jit, mirrored, spread_out, several, strategy)


class ModelAttachment(attach.Attachment):
    """Replaces the train function of a Keras trainer."""

    END_OF_DATA = (StopIteration, tf.errors.OutOfRangeError)
    LOGS_RESTORED = True

    modes: _Modes | None = None
    """Those of the current step, once it is built."""

    def _build(self) -> None:
        make = getattr(self._make, "__func__", None)
        modes = self.modes = _Modes.of(self.model, make is keras.Model.make_train_function)
        cached = self._cached_step(*modes)
        if cached is not None:
            transaction, self.inner = cached
            transaction.rebind(self.run.read_train_state, self.run.note_created)
            self._place(transaction)
        else:
            self._create(modes)
        self.model.train_function = self.run_execution

    def _create(self, modes: _Modes) -> None:
        """Create a new transaction, and the function that runs it."""
        run = self.run
        old = run.transaction
        transaction = (MirroredTransaction if modes.mirrored else step.Transaction)(
            self._body(modes.eager),
            run.read_train_state,
            model=self.model,
            logs=True,
            jit=modes.jit,
            counted=modes.several > 1 or not (modes.takes or modes.spread_out),
            note_created=run.note_created,
            # Under other strategies than MirroredStrategy steps are only checked.
            refuse=run.refuses and (modes.mirrored or not modes.spread_out),
            host_has_batches=modes.takes,
        )
        if old is not None:
            transaction.inherit(old)
        self._place(transaction)
        if not (modes.eager or modes.spread_out):
            self._build_optimizer()
        self.inner = self._made_by_keras(jit_compile=False)
        if modes.takes:
            self.inner = step.Direct(transaction, modes.eager)

    def _body(self, eager: bool) -> Any:
        """Return the step to trace.

        If Keras has traced it since `compile`, the trainable weights are those of that time.
        """
        model, body = self.model, self.body
        if self._cached[0] is None or eager:
            return body

        def as_traced(data: Any) -> Any:
            with keras_state.as_built(model, keras_optimizers.find_optimizers(model)):
                return body(data)

        return as_traced

    def _build_optimizer(self) -> None:
        """Build the optimizer as Keras' own step would during tracing.

        `tf.function` traces a step twice if it creates variables.
        """
        model, optimizer = self.model, self.model.optimizer
        if self._stock and model.built and not optimizer.built and model.trainable_weights:
            build(optimizer, model.trainable_weights, eagerly=False)

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
            self.run.transaction.given = None

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
        spread_out = self.modes is not None and self.modes.spread_out
        spec = None if spread_out else keras_fitting.running_spec()
        self._trace(spec)
        return spec is not None

    def _trace(self, spec: Any) -> None:
        """Trace the step for data like this without running it, which creates its variables."""
        while spec is not None:
            try:
                self.run.transaction.trace(spec)
                return
            except Retrace as found:
                self.run.transaction.learn(found)
                self._build()

    def _execute(self, data: Any) -> tuple[Any, Verdict]:
        if self.can_run_again:
            batch = self.run.transaction.take(data)
            return self._run(lambda: self.inner(batch, data), (batch,))
        if isinstance(data, (tf.data.Iterator, tf.distribute.DistributedIterator)):
            return self._run(lambda: self.inner(data))
        batches = list(data)  # of `train_on_batch`: a second trace reads it again
        return self._run(lambda: self.inner(iter(batches)))

    @property
    def can_run_again(self) -> bool:  # type: ignore[override]
        """Whether one execution is one step on one batch that the host has."""
        return self.modes is not None and self.modes.takes

    def run_again(self, args: Sequence[Any]) -> Verdict:
        """Run the step on the arguments of an earlier one; return the verdict."""
        return self._run(lambda: self.inner.again(*args), args)[1]

    def _run(self, inner: Callable[[], Any], given: Any = None) -> tuple[Any, Verdict]:
        """Run one execution; `given`: its arguments, if the host has them."""
        logs, verdict = _completed(self.run, inner, given, self._build)
        return self._restored(logs) if verdict.refused else logs, verdict

    def _restored(self, logs: Any) -> Any:
        """Return the logs of a refused step: those of the restored metrics, without it.

        A custom log gets the value of the last committed step.
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

    def _execute(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Verdict]:
        """Run one step; return its outputs and its verdict."""
        given = held((args, kwargs))
        return _completed(self.run, lambda: self.compiled(args, kwargs), given, self.rebuild)


def _completed(
    run: Run, inner: Callable[[], Any], given: Any, rebuild: Callable[[], None]
) -> tuple[Any, Verdict]:
    """Run a step, in another mode if its trace requires it; return its outputs and its verdict.

    Args:
        run: the run that it belongs to.
        inner: runs it.
        given: its arguments, if the host has them.
        rebuild: creates the transaction again, with the findings of its trace.
    """
    while True:
        transaction = run.transaction
        transaction.given = given
        try:
            outputs, verdict = transaction.read(inner())
            return outputs, verdict
        except Retrace as found:
            transaction.learn(found)
            rebuild()
