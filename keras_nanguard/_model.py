"""`NanGuardModel`: the transaction for those who subclass."""

from __future__ import annotations

from typing import Any

import keras

from keras_nanguard._attach import Attachment
from keras_nanguard._guard import NanGuard

__all__ = ["NanGuardModel"]


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
        nanguard: the `NanGuard` that holds incidents and summary, made on first use.
    """

    nanguard_policy: Any = "recover"
    nanguard_verbose: int = 1

    @property
    def nanguard(self) -> NanGuard:
        """The guard of this model."""
        guard = self.__dict__.get("_nanguard")
        if guard is None:
            guard = NanGuard(self.nanguard_policy, verbose=self.nanguard_verbose)
            object.__setattr__(self, "_nanguard", guard)
        return guard

    def make_train_function(self, force: bool = False) -> Any:
        """Make the train function of `keras.Model`, with the transaction around the train step."""
        if self.train_function is not None and not force:
            return self.train_function
        if "make_train_function" in vars(self):  # a NanGuard among the callbacks does it for this fit
            return super().make_train_function(force=force)
        guard = self.nanguard
        guard.session = guard._session(self)
        attachment = Attachment(self, guard.session)
        attachment.in_use = lambda: True
        attachment.make_with(super().make_train_function)
        return self.train_function
