"""The transaction around a train step on TensorFlow: of a Keras trainer, and of a loop that has none."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from keras_nanguard import _overrides
from keras_nanguard._attach._shared import Attachment
from keras_nanguard._fit._recent import held
from keras_nanguard._fit._session import Session
from keras_nanguard._step import _direct, _faults, _mirrored, _tensorflow
from keras_nanguard._step._intercept import build

__all__ = ["LoopStep", "ModelAttachment"]


class ModelAttachment(Attachment):
    """Stands in for the train function of a Keras trainer."""

    def _build(self) -> None:
        model, session = self.model, self.session
        many = model.steps_per_execution
        mirrored = isinstance(model.distribute_strategy, tf.distribute.MirroredStrategy)
        jit, spread_out = bool(model.jit_compile) and not model.run_eagerly and not mirrored, self._spread_out()
        kept = self._kept(many, mirrored, jit, spread_out, model.run_eagerly, model.distribute_strategy)
        if kept is not None:
            transaction, self.inner = kept
            transaction.serve(session.read_anatomy, session.born)
            self._place(transaction)
            model.train_function = self.run
            return
        old = session.transaction
        transaction = (_mirrored.MirroredTransaction if mirrored else _tensorflow.Transaction)(
            self.body,
            session.read_anatomy,
            model=model,
            logs=True,
            jit=jit,
            counted=many if many > 1 else 0,
            capacity=max(8, many),
            born=session.born,
            refuse=session.policy.refuse and (mirrored or not spread_out),
            stores=not spread_out,
        )
        if old is not None:
            transaction.inherit(old)
        self._place(transaction)
        self._build_optimizer()
        compile_with = model.jit_compile
        model.jit_compile = False
        try:
            self._make(force=True)
        finally:
            model.jit_compile = compile_with
        self.inner = model.train_function
        if self._is_plain():
            self.inner = _direct.Direct(_faults.with_faults(model, model.train_step), self.inner)
        model.train_function = self.run

    def _build_optimizer(self) -> None:
        """Build the optimizer as Keras' own step would while it is traced: `tf.function` traces twice what makes variables."""
        model, optimizer = self.model, self.model.optimizer
        if self._stock and model.built and not (optimizer.built or model.run_eagerly or self._spread_out()):
            weights = model.trainable_weights
            if weights:
                build(optimizer, weights)

    def _is_plain(self) -> bool:
        """Whether what Keras makes of the step is one call of it for each execution, and nothing else."""
        model, make = self.model, self._make
        of_keras = getattr(make, "__func__", None) is keras.Model.make_train_function or hasattr(make, "hooks")
        return of_keras and model.steps_per_execution == 1 and not (model.run_eagerly or self._spread_out())

    def _place(self, transaction: Any) -> None:
        """Put the transaction where the session and Keras look for it; Keras does whenever it traces."""
        transaction.recount(self.session.step)
        self.session.transaction = transaction
        _overrides.set_instance(self.model, "train_step", transaction)

    def _made(self) -> Any:
        """Return what the next fit needs of the step that was made for this one."""
        return self.session.transaction, self.inner

    def detach(self) -> None:
        """Give the model its own methods back; may be called any number of times."""
        super().detach()
        if self.session.transaction is not None and self.session.transaction.stored is not None:
            self.session.transaction.stored.clear()

    def _spread_out(self) -> bool:
        """Whether the model trains under a `tf.distribute` strategy: but for one, steps are watched there, not refused."""
        return self.model.distribute_strategy is not tf.distribute.get_strategy() or tf.distribute.has_strategy()

    def run(self, iterator: Any) -> Any:
        """Stand in for the train function: one execution, then the host's look at its verdict."""
        session = self.session
        try:
            if not session.calm:
                if session.resuming is not None:
                    self._trace(iterator)
                session.before()
                if session.passes_by(iterator, self.model.steps_per_execution):
                    return session.shown or self.model.get_metrics_result()
                if session.stopped:
                    return self._without_effect(iterator)
            logs, row = self._execute(iterator)
            session.after(row)
            logs = session.honest(logs, row[1])
        except (StopIteration, tf.errors.OutOfRangeError):
            raise
        except BaseException as error:
            self._changed = True
            self.session.raised(error)
            self.detach()
            raise
        return logs

    def _trace(self, iterator: Any) -> None:
        """Trace the step without running it, so that every variable that it makes is there to be written."""
        while hasattr(iterator, "element_spec"):
            try:
                self.session.transaction.trace(iterator.element_spec)
                return
            except _tensorflow.Retrace:
                self._build()

    def _execute(self, iterator: Any) -> tuple[Any, Any]:
        while True:
            try:
                return self.session.transaction.read(self.inner(iterator))  # type: ignore[no-any-return]
            except _tensorflow.Retrace:
                self._build()


class LoopStep:
    """One hand-written step, compiled or not, with its transaction."""

    def __init__(self, function: Any, session: Session):
        self.function, self.session = function, session
        session.rebuild = self.build
        self.build()

    def build(self) -> None:
        """Make the step anew."""
        compiled = hasattr(self.function, "python_function")
        body = tf.autograph.to_graph(self.function.python_function) if compiled else self.function
        old = self.session.transaction
        transaction = _tensorflow.Transaction(
            lambda args, kwargs: body(*args, **kwargs),
            self.session.read_anatomy,
            jit=compiled and bool(getattr(self.function, "_jit_compile", None)),
            born=self.session.born,
            refuse=self.session.policy.refuse,
        )
        if old is not None:
            transaction.inherit(old)
        self.session.transaction = transaction
        self.run = tf.function(transaction, autograph=False, reduce_retracing=True) if compiled else transaction

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.session.before()
        given = held((args, kwargs))
        while True:
            try:
                outputs, row = self.session.transaction.read(self.run(args, kwargs))
                break
            except _tensorflow.Retrace:
                self.build()
        self.session.transaction.given = given
        self.session.after(row)
        return outputs
