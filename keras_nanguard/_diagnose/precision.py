"""The same model in float32 during one replay: dtype policies and variables are replaced and then
restored.

Private to Keras, because there is no public way: ``Variable._value``, and ``_dtype`` of variables,
losses and symbolic tensors. `tests/keras_internals/test_internals.py` fails when a release of Keras
removes one of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_nanguard._backends import current
from keras_nanguard._diagnose.operations import LOW
from keras_nanguard._keras import (
    layers as keras_layers,
    losses as keras_losses,
    optimizers as keras_optimizers,
)


@contextlib.contextmanager
def in_float32(model: Any, variables: list[Any], optimizers: list[Any]) -> Iterator[None]:
    """Make the model compute in float32, with float32 copies of its variables.

    Args:
        model: the model.
        variables: every variable of the step; those of a low dtype are replaced.
        optimizers: the optimizers of the step.
    """
    undo: list[tuple[Any, str, Any]] = []
    twins: list[tuple[Any, Any]] = []
    try:
        for layer in keras_layers.layers_of(model):
            keras_layers.replace_policy(layer, keras.DTypePolicy("float32"), LOW, undo)
        for tensor in keras_layers.symbolic_inputs(model):
            keras_layers.exchange(tensor, "_dtype", "float32", undo)
        for loss in keras_losses.losses_of(model):
            if str(getattr(loss, "dtype", "")) in LOW:
                keras_layers.exchange(loss, "_dtype", "float32", undo)
        for variable in variables:
            if str(getattr(variable, "dtype", "")) not in LOW:
                continue
            native, twin = getattr(variable, "value", None), current.replay().twin(variable)
            if twin is not None:
                keras_layers.exchange(variable, "_value", twin, undo)
                keras_layers.exchange(variable, "_dtype", "float32", undo)
                twins.append((native, twin))
        for optimizer in optimizers:
            keras_optimizers.register_twins(optimizer, twins, undo)
        yield
    finally:
        for target, name, value in reversed(undo):
            object.__setattr__(target, name, value)
