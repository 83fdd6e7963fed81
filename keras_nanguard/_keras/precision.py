"""A model that computes in float32 for a while.

Private to Keras, because there is no public way: ``Variable._value``, and ``_dtype`` of variables,
losses and symbolic tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from keras_nanguard._core.literals import LOW
from keras_nanguard._keras import layers as keras_layers, losses, optimizers as keras_optimizers
from keras_nanguard._keras.overrides import Overrides


@contextlib.contextmanager
def computing_in_float32(
    model: Any, optimizers: Iterable[Any], variables: Iterable[Any], twin: Callable[[Any], Any]
) -> Iterator[None]:
    """Make a model compute in float32, with float32 copies of the variables that have a low dtype.

    Args:
        optimizers: the optimizers, which find the slots of a copy as those of the variable.
        variables: the variables that a step may read.
        twin: returns the float32 copy of a variable, `None` if it needs none.
    """
    twins: list[tuple[Any, Any]] = []
    with Overrides() as overrides:
        for layer in keras_layers.layers_of(model):
            keras_layers.replace_policy(layer, keras.DTypePolicy("float32"), LOW, overrides)
        for tensor in keras_layers.symbolic_inputs(model):
            overrides.set(tensor, "_dtype", "float32")
        for loss in losses.losses_of(model):
            if str(getattr(loss, "dtype", "")) in LOW:
                overrides.set(loss, "_dtype", "float32")
        for variable in variables:
            if str(getattr(variable, "dtype", "")) not in LOW:
                continue
            native, copied = getattr(variable, "value", None), twin(variable)
            if copied is not None:
                overrides.set(variable, "_value", copied)
                overrides.set(variable, "_dtype", "float32")
                twins.append((native, copied))
        for optimizer in optimizers:
            keras_optimizers.register_twins(optimizer, twins, overrides)
        yield
