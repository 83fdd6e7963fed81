"""`NanGuardModel`: a base class for models that are always guarded."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import keras

from keras_nanguard._backends.shared.attach import attached_to
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._keras import overrides
from keras_nanguard._keras.layers import FUNCTIONAL, makes_functional
from keras_nanguard._policy.records import safe_repr
from keras_nanguard.guard import NanGuard, guard_every_step

__all__ = ["NanGuardModel"]


def _given_by_place(fit: Any, args: tuple[Any, ...]) -> int | None:
    """Return the place of `callbacks` among these arguments of a `fit`, which may be that of
    another base class; `None` if they do not have it.
    """
    parameters = inspect.signature(fit).parameters.values()
    names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    return names.index("callbacks") if "callbacks" in names[: len(args)] else None


class _OfTensors:
    """Descriptor that returns, for a class, the class of the same name for functional models.
    Unpickling finds it here. A model has none, because saving reads every attribute of a model.

    When one model of a class is created from inputs and outputs, `Model.__init__` makes the class
    and its bases functional permanently (`inject_functional_model_class` in keras/src/models). No
    other class that inherits from `NanGuardModel` could be created in another way after that. In
    the class returned here `Functional.__init__` precedes it.
    """

    def __get__(self, model: Any, cls: Any) -> Any:
        if model is not None:
            return None
        return cls if issubclass(cls, FUNCTIONAL) else _functional_class(cls)


@functools.cache
def _functional_class(cls: type) -> type:
    named = {
        "__module__": cls.__module__,
        "__qualname__": f"{cls.__qualname__}._of_tensors",
        "__doc__": cls.__doc__,
    }
    registered, known = keras.saving.get_registered_name(cls), keras.saving.get_custom_objects()
    package, _, name = registered.rpartition(">")
    before = known.get(registered, cls)
    made = type(cls.__name__, (cls, FUNCTIONAL), named)
    if package:  # the name stays that of the class, which can also create other models
        keras.saving.register_keras_serializable(package, name)(made)
        known[registered] = before
    return made


@keras.saving.register_keras_serializable("keras_nanguard")
class NanGuardModel(keras.Model):
    """A `keras.Model` that is guarded without a callback: its train step is a transaction.

    Subclass it like `keras.Model`. `fit`, `train_on_batch` and your own `train_step` are guarded,
    with any number of optimizers. `model.nanguard` is the guard, with its incidents and reports.

    Example:

    ```python
    class Autoencoder(NanGuardModel):
        nanguard_policy = "recover"

        def train_step(self, data):
            ...
    ```

    Args:
        guard: the `NanGuard` of this model; by default one with the policy `nanguard_policy`. It is
            not saved with the model. All other arguments are those of `keras.Model`.

    Raises:
        GuardError: if `guard` is not a `NanGuard`.

    Attributes:
        nanguard_policy: the policy, as for `NanGuard`. Set it on the class, or on the model before
            training.
        nanguard: the `NanGuard` of the model, created on first use. A copied or loaded model has a
            new one, without incidents.
    """

    nanguard_policy: Any = "recover"
    nanguard_verbose: int = 1
    _of_tensors = _OfTensors()
    _nanguard: NanGuard | None = None
    _made_with: tuple[Any, int] | None = None
    """Policy and verbosity of a guard that was not passed to the model."""

    def __new__(cls, *args: Any, guard: NanGuard | None = None, **kwargs: Any) -> Any:
        """Make the model, with the guard kept out of its configuration."""
        return super().__new__(cls, *args, **kwargs)

    def __init__(self, *args: Any, guard: NanGuard | None = None, **kwargs: Any):
        if guard is not None and not isinstance(guard, NanGuard):
            remedy = "Write guard=NanGuard(...), or set nanguard_policy."
            raise GuardError(
                expected("guard to be a NanGuard", f"guard={safe_repr(guard)}", remedy)
            )
        if makes_functional(args, kwargs) and not isinstance(self, FUNCTIONAL):
            cls = type(self)
            self.__class__ = cls._of_tensors
        super().__init__(*args, **kwargs)
        if guard is not None:
            overrides.set_instance(self, "_nanguard", guard)

    @property
    def nanguard(self) -> NanGuard:
        """The guard of this model."""
        guard, settings = self._nanguard, (self.nanguard_policy, self.nanguard_verbose)
        # loading a model reads this property before the policy can be set
        if guard is None or (guard.session is None and self._made_with not in (None, settings)):
            guard = NanGuard(self.nanguard_policy, verbose=self.nanguard_verbose)
            overrides.set_instance(self, "_nanguard", guard)
            overrides.set_instance(self, "_made_with", settings)
        return guard

    def fit(self, *args: Any, **kwargs: Any) -> Any:
        """Train like `keras.Model.fit`. Steps and epochs of incidents count from its start."""
        self.train_function = None
        place = _given_by_place(super().fit, args)
        if place is None:
            kwargs["callbacks"] = self._with_guard(kwargs.get("callbacks"))
        else:
            args = (*args[:place], self._with_guard(args[place]), *args[place + 1 :])
        return super().fit(*args, **kwargs)

    def _with_guard(self, callbacks: Any) -> Any:
        """Return the callbacks of a fit with the guard of this model, unless they contain one."""
        is_list = isinstance(callbacks, keras.callbacks.CallbackList)
        others = callbacks.callbacks if is_list else keras.tree.flatten(callbacks or [])
        if any(isinstance(callback, NanGuard) for callback in others):
            return callbacks
        guard = self.nanguard
        if guard.session is not None:  # of steps without a fit
            guard.session.end()
        if not is_list:
            return [guard, *others]
        others.append(guard)
        callbacks.set_model(self)
        callbacks.set_params(callbacks.params)
        return callbacks

    def make_train_function(self, force: bool = False) -> Any:
        """Make the train function of `keras.Model`, with the transaction around the train step."""
        if self.train_function is not None and not force:
            return self.train_function
        if attached_to(self) is not None:  # a NanGuard among the callbacks guards this fit
            return super().make_train_function(force=force)
        guard_every_step(self.nanguard, self, super().make_train_function)
        return self.train_function
