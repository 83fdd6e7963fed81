"""`NanGuardModel`: the transaction for those who subclass."""

from __future__ import annotations

from typing import Any

import keras

from keras_nanguard import _overrides
from keras_nanguard._attach import Attachment, attachment
from keras_nanguard._guard import NanGuard

__all__ = ["NanGuardModel"]


def _has_callback(model: Any) -> bool:
    """Whether a `NanGuard` among the callbacks of a fit stands in for this model's train function."""
    return isinstance(getattr(vars(model).get("make_train_function"), "__self__", None), Attachment)


class _Epochs(keras.callbacks.Callback):
    """Tells the guard of a model where epochs start, and the epoch logs how many steps were left out."""

    def __init__(self, model: Any):
        super().__init__()
        self.guard: NanGuard = model.nanguard

    @property
    def async_safe(self) -> bool:
        return self.guard.async_safe

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        pass

    def _is_in_charge(self) -> bool:
        return self.guard.session is not None and not _has_callback(self.model)

    def on_train_begin(self, logs: Any = None) -> None:
        if self._is_in_charge():
            self.guard.start_counting(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._is_in_charge():
            self.guard.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._is_in_charge():
            self.guard.before_epoch_end(logs)
            self.guard.on_epoch_end(epoch, logs)


class NanGuardModel(keras.Model):
    """A `keras.Model` whose train step is a transaction without any callback.

    Subclass it as you would `keras.Model`; `fit`, `train_on_batch` and a `train_step` of your own are guarded, with as
    many optimizers as the model holds. Everything that `NanGuard` tells is told by `model.nanguard`.

    Example:

    ```python
    class Autoencoder(NanGuardModel):
        nanguard_policy = "recover"

        def train_step(self, data):
            ...
    ```

    Attributes:
        nanguard_policy: the policy, as `NanGuard` takes it; set it on the class or on the model before training.
        nanguard: the `NanGuard` that holds incidents and summary, made on first use. A model that is copied or loaded has one of
            its own, with no incidents.
    """

    nanguard_policy: Any = "recover"
    nanguard_verbose: int = 1

    @property
    def nanguard(self) -> NanGuard:
        """The guard of this model."""
        guard, wanted = self.__dict__.get("_nanguard"), (self.nanguard_policy, self.nanguard_verbose)
        made_of = self.__dict__.get("_nanguard_made_of")
        if guard is None or (guard.session is None and made_of != wanted):  # loading a model asks for it, before anyone can set them
            guard = NanGuard(self.nanguard_policy, verbose=self.nanguard_verbose)
            _overrides.set_instance(self, "_nanguard", guard)
            _overrides.set_instance(self, "_nanguard_made_of", wanted)
        return guard

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Train as `keras.Model.fit` does; steps and epochs of incidents count from the start of this fit."""
        self.train_function = None
        given = args[5] if len(args) > 5 else kwargs.get("callbacks")
        if len(args) <= 5 and not isinstance(given, keras.callbacks.CallbackList):
            kwargs["callbacks"] = [_Epochs(self), *keras.tree.flatten(given or [])]
        return super().fit(*args, **kwargs)

    def make_train_function(self, force: bool = False) -> Any:
        """Make the train function of `keras.Model`, with the transaction around the train step."""
        if self.train_function is not None and not force:
            return self.train_function
        if _has_callback(self):  # a NanGuard among the callbacks does it for this fit
            return super().make_train_function(force=force)
        guard = self.nanguard
        guard.session = guard._session(self)
        placed = attachment(self, guard.session)
        placed.in_use = lambda: True
        placed.make_with(super().make_train_function)
        return self.train_function
