"""Putting the transaction around a model's train step, and taking it off again.

Keras reads `train_step` off the instance when it makes its train function, and calls the train function once for each
execution, on the main thread. Both are replaced on the instance only, so a saved, cloned or pickled model knows nothing
of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_nanguard import _state
from keras_nanguard._errors import GuardError
from keras_nanguard._session import Session
from keras_nanguard._sightings import require_compiled
from keras_nanguard._step import _tensorflow

__all__ = ["Attachment"]

_NAMES = ("make_train_function", "train_step")


class Attachment:
    """The transaction of one session around one model's `fit` and `train_on_batch`.

    Args:
        model: a compiled model.
        session: the host's half.
    """

    def __init__(self, model: Any, session: Session):
        self.model, self.session = model, session
        self.attached = self.lasting = False
        self.in_use: Callable[[], bool] = lambda: False
        self._before: dict[str, Any] = {}
        self.logs: Any = None
        session.rebuild = self.rebuild

    def attach(self) -> None:
        """Stand in for the model's own train function until `detach`."""
        require_supported_backend()
        self.attached = True
        self._before = {name: vars(self.model)[name] for name in _NAMES if name in vars(self.model)}
        self.body = self.model.train_step
        self._make = self.model.make_train_function
        _state.set_instance(self.model, "make_train_function", self.make)
        self.model.train_function = None

    def detach(self) -> None:
        """Give the model its own methods back; may be called any number of times."""
        if not self.attached:
            return
        self.attached = False
        for name in _NAMES:
            _state.unset_instance(self.model, name)
        for name, value in self._before.items():
            _state.set_instance(self.model, name, value)
        self.model.train_function = None
        self.session.end()

    def make_with(self, make: Callable[..., Any]) -> None:
        """Make the train function once with `make`, for a model that is guarded for good."""
        require_supported_backend()
        require_compiled(self.model)
        self.body, self._make, self.lasting = self.model.train_step, make, True
        self._build()

    def make(self, force: bool = False) -> Any:
        """Stand in for `Model.make_train_function`; left over from a fit that never began, it stands aside."""
        if not self.in_use():
            self.detach()
            self.model.make_train_function(force=force)
            return self.model.train_function
        require_compiled(self.model)
        if self.model.train_function is None or force:
            self._build()
        return self.model.train_function

    def rebuild(self) -> None:
        """Compile the step anew, after something was changed that it has built in."""
        if (self.attached or self.lasting) and self.model.train_function is not None:
            self._build()

    def _build(self) -> None:
        model, session = self.model, self.session
        many = model.steps_per_execution
        jit = bool(model.jit_compile) and not model.run_eagerly
        old = session.transaction
        transaction = _tensorflow.Transaction(
            self.body,
            session.anatomy,
            model=model,
            logs=True,
            jit=jit,
            counted=many > 1,
            capacity=max(8, many),
            born=session.born,
            refuse=session.policy.refuse and not self._spread_out(),
        )
        if old is not None:
            transaction.inherit(old)
        transaction.recount(session.step)
        session.transaction = transaction
        compile_with = model.jit_compile
        _state.set_instance(model, "train_step", transaction)
        model.jit_compile = False
        try:
            self._make(force=True)
        finally:
            model.jit_compile = compile_with
            if self.lasting:
                _state.unset_instance(model, "train_step")
        self.inner = model.train_function
        model.train_function = self.run

    def _spread_out(self) -> bool:
        """Whether the model trains under a `tf.distribute` strategy, where a step is watched and healed, not refused."""
        return self.model.distribute_strategy is not tf.distribute.get_strategy() or tf.distribute.has_strategy()

    def run(self, iterator: Any) -> Any:
        """Stand in for the train function: one execution, then the host's look at its verdict."""
        try:
            if self.session.resuming is not None:
                self._trace(iterator)
            self.session.before()
            if self.session.passes_by(iterator, self.model.steps_per_execution):
                return self.logs or self.model.get_metrics_result()
            if self.session.stopped:
                return self._without_effect(iterator)
            logs, row = self._execute(iterator)
            self.session.after(row)
            self.logs = logs
        except (StopIteration, tf.errors.OutOfRangeError):
            raise
        except BaseException as error:
            self.session.raised(error)
            self.detach()
            raise
        return logs

    def _without_effect(self, iterator: Any) -> Any:
        """Run one execution and undo it: training has ended before it, and Keras wants logs before it stops."""
        before = [(variable, _state.read(variable)) for variable in self.session.anatomy().everything]
        logs, _ = self._execute(iterator)
        for variable, value in [*before, *self.session.first_values()]:
            _state.write(variable, value)
        return logs

    def _trace(self, iterator: Any) -> None:
        """Trace the step without running it, so that every variable that it makes is there to be written."""
        while hasattr(iterator, "element_spec"):
            try:
                tf.function(self.session.transaction, autograph=False).get_concrete_function(iterator.element_spec)
                return
            except _tensorflow.Retrace:
                self._build()

    def _execute(self, iterator: Any) -> tuple[Any, Any]:
        while True:
            try:
                return self.session.transaction.read(self.inner(iterator))  # type: ignore[no-any-return]
            except _tensorflow.Retrace:
                self._build()


def require_supported_backend() -> None:
    """Raise where the running backend is not supported.

    Raises:
        GuardError: for every backend but TensorFlow.
    """
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise GuardError(
            f"Expected the TensorFlow backend. Received: backend={backend!r}. The guarded step is written for "
            "TensorFlow so far; set KERAS_BACKEND=tensorflow."
        )
