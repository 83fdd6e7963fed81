"""The train function of a model: who makes it, and what it was made for.

Private names of Keras:

- ``Model._compile_config``: `compile` creates a new one, and nothing public reports that it was
  called.
- ``Model._make_function``: creates the train, test and predict functions; Keras before 3.8 or so
  has a method for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from keras_nanguard._keras import (
    layers as keras_layers,
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.overrides import Overrides
from keras_nanguard._keras.train_state import TrainState


def compiled_as(model: Any) -> Any:
    """Return an object that identifies the last call of `compile`, `None` if there was none."""
    return getattr(model, "_compile_config", None)


def makes_as_keras(model: Any, make: Any) -> bool:
    """Whether a method that makes the train function of a model, such as its own
    `make_train_function`, is that of Keras, or that of a class of this library which calls it.
    """
    name, real = "make_train_function", getattr(make, "__func__", None)
    methods = [vars(base)[name] for base in type(model).__mro__ if name in vars(base)]
    if real not in methods:  # a function on the instance
        return False
    following = methods[methods.index(real) :]
    called = (one for one in following if one.__module__.partition(".")[0] != "keras_nanguard")
    return next(called, None) is keras.Model.make_train_function


def make_again(model: Any) -> None:
    """Let Keras make the functions again that it has made for a model and models within it."""
    for made in (la for la in keras_layers.layers_of(model) if isinstance(la, keras.Model)):
        for kind in ("train", "test", "predict"):
            if getattr(made, f"{kind}_function") is not None:
                getattr(made, f"make_{kind}_function")(force=True)


def takes_fewer_batches(model: Any) -> bool:
    """Whether an execution of several steps, made by Keras, can run on a list of fewer batches."""
    return hasattr(model, "_make_function")


def built_in(model: Any, train_state: TrainState) -> tuple[Any, ...]:
    """Return what a trace of a train step captures: the call of `compile`, optimizers, rates,
    variables; no `trainable`, since Keras keeps its train function until `compile` is called.
    """
    optimizers = train_state.optimizers
    rates = [keras_optimizers.given_rate(keras_optimizers.inner(o)) for o in optimizers]
    variables = sorted(train_state.everything, key=id)
    return (compiled_as(model) or object(), *optimizers, *rates, *variables)


@contextmanager
def as_built(model: Any, optimizers: Iterable[Any], freezes: bool) -> Iterator[None]:
    """Set `trainable` of the variables to the values for which the optimizers were built.

    Keras keeps its train function if `trainable` is changed without a call of `compile`.

    Args:
        freezes: whether variables that no optimizer trains are frozen. A custom step may train
            them by hand, such as a moving average of other weights.
    """
    built = [v for o in optimizers if o.built for v in keras_optimizers.trained_by(o)]
    trained = {id(keras_variables.unwrapped(v)) for v in built}
    changed = [v for v in model.variables if trained and v.trainable != (id(v) in trained)]
    changed = [v for v in changed if freezes or not v.trainable]
    with Overrides() as overrides:
        for variable in changed:
            overrides.set(variable, "trainable", not variable.trainable)
        yield


def on_making(
    model: Any,
    change: Callable[[Callable[..., Any]], Callable[..., Any]],
    overrides: Overrides,
    default: Callable[..., Any] | None = None,
) -> bool:
    """Override the method that creates the train, test and predict functions of a model, or a
    default; return whether there is one.
    """
    real = getattr(model, "_make_function", default)
    if real is not None:
        overrides.set(model, "_make_function", change(real))
    return real is not None
