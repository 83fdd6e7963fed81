"""What standing in for a model's train function has in common on all backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_nanguard import _overrides, _state
from keras_nanguard._fit._session import Session
from keras_nanguard._fit._sightings import require_compiled
from keras_nanguard._step import _kept

__all__ = ["Attachment", "require_compiled"]

_NAMES = ("make_train_function", "train_step")


def _plain_step(model: Any) -> Any:
    """Return the model's own train step; a transaction that was left around it for good is taken off."""
    if getattr(vars(model).get("train_step"), "is_transaction", False):
        _overrides.unset_instance(model, "train_step")
    return model.train_step


class Attachment:
    """The transaction of one session around one model's `fit` and `train_on_batch`.

    Keras reads `train_step` off the instance when it makes its train function, and calls the train function once for
    each execution, on the main thread. Both are replaced on the instance only, so a saved, cloned or pickled model
    knows nothing of it.

    Args:
        model: a compiled model.
        session: the host's half.
    """

    def __init__(self, model: Any, session: Session):
        self.model, self.session = model, session
        self.attached = self.lasting = False
        self._changed = False
        self._modes: tuple[Any, ...] = ()
        self.in_use: Callable[[], bool] = lambda: False
        self._before: dict[str, Any] = {}
        self._cached: tuple[Any, Any] = None, None
        session.rebuild = self.rebuild

    @staticmethod
    def waits() -> bool:
        """Whether the host waits for each guarded step anyway, so that nothing computes while callbacks run."""
        return False

    def attach(self) -> None:
        """Stand in for the model's own train function until `detach`."""
        self.attached = True
        self.body = _plain_step(self.model)
        self._before = {name: vars(self.model)[name] for name in _NAMES if name in vars(self.model)}
        self._make = self.model.make_train_function
        self._cached = self.model.train_function, _state.compiled_as(self.model)
        _overrides.set_instance(self.model, "make_train_function", self.make)
        self.model.train_function = None

    def detach(self) -> None:
        """Give the model its own methods back; may be called any number of times."""
        if not self.attached:
            return
        self.attached = False
        self._keep()
        for name in _NAMES:
            _overrides.unset_instance(self.model, name)
        for name, value in self._before.items():
            _overrides.set_instance(self.model, name, value)
        function, compiled = self._cached
        self.model.train_function = function if compiled is _state.compiled_as(self.model) else None
        self.session.end()

    def prepare(self) -> None:
        """Have every variable that the first step would make, for a state that is put in place without a step.

        Keras makes them before training on all backends but TensorFlow.
        """

    def make_with(self, make: Callable[..., Any]) -> None:
        """Make the train function once with `make`, for a model that is guarded for good."""
        require_compiled(self.model)
        self.body, self._make, self.lasting = _plain_step(self.model), make, True
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

    @property
    def _stock(self) -> bool:
        """Whether the train step is Keras' own."""
        return getattr(self.body, "__func__", None) is keras.Model.train_step

    def _key(self) -> tuple[Any, ...]:
        """Return everything that a trace of the step has built in."""
        return (self.body, self.session.policy.refuse, *self._modes, *_state.built_in(self.model, self.session.read_anatomy()))

    def _kept(self, *modes: Any) -> Any:
        """Return the step of an earlier fit, traced in these modes, where it can serve this one, too; else `None`."""
        self._modes = modes
        if self._before or self._changed or self.session.transaction is not None:
            return None
        return _kept.take(self.model, self._key())

    def _keep(self) -> None:
        """Keep the step for the next fit, unless it was changed for this one, or has met what another may not meet."""
        transaction = self.session.transaction
        if self._modes and transaction is not None and not (self._before or self._changed or transaction.tolerated):
            transaction.rest()
            _kept.keep(self.model, self._key(), self._made())

    def _made(self) -> Any:
        """Return what the next fit needs of the step that was made for this one."""
        return self.session.transaction

    def rebuild(self) -> None:
        """Compile the step anew, after something was changed that it has built in."""
        self._changed = True
        if (self.attached or self.lasting) and self.model.train_function is not None:
            self._build()

    def _build(self) -> None:
        """Make the train function around the transaction, and put it in its place on the model."""
        raise NotImplementedError

    def _execute(self, data: Any) -> tuple[Any, Any]:
        """Run one execution; returns its logs and the row of its last step."""
        raise NotImplementedError

    def _without_effect(self, data: Any) -> Any:
        """Run one execution and undo it: training has ended before it, and Keras wants logs before it stops."""
        before = [(variable, _state.read(variable)) for variable in self.session.anatomy().everything]
        logs, _ = self._execute(data)
        for variable, value in [*before, *self.session.first_values()]:
            _state.write(variable, value)
        return logs
