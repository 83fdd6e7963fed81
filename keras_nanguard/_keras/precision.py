"""A model that computes in float32 for a while.

Private names of Keras, because there is no public way:

- ``Layer._dtype_policy``: the public setter would quantize, or write into a shared
  `DTypePolicyMap`.
- ``Variable._value``, and ``_dtype`` of variables, losses and symbolic tensors.
- ``Functional._inputs``: a functional model casts its inputs to the dtypes of these.
- ``Optimizer._trainable_variables_indices``, ``Optimizer._var_key``: how an optimizer finds its
  slots of a variable; `apply` rejects any other variable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from keras_nanguard._core.literals import LOW
from keras_nanguard._keras import losses, optimizers as keras_optimizers
from keras_nanguard._keras.layers import layers_of
from keras_nanguard._keras.overrides import Overrides
from keras_nanguard._keras.variables import unique


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
    layers, twins = layers_of(model), list[tuple[Any, Any]]()
    given = keras.tree.flatten([getattr(layer, "_inputs", None) for layer in layers])
    inputs = [tensor for tensor in given if isinstance(tensor, keras.KerasTensor)]
    with Overrides() as overrides:
        for layer in layers:
            if layer.compute_dtype in LOW or layer.variable_dtype in LOW:
                overrides.set(layer, "_dtype_policy", keras.DTypePolicy("float32"))
        for thing in (*inputs, *losses.losses_of(model)):
            if _is_low(thing):
                overrides.set(thing, "_dtype", "float32")
        for variable in filter(_is_low, variables):
            native, copied = getattr(variable, "value", None), twin(variable)
            if copied is not None:
                overrides.set(variable, "_value", copied)
                overrides.set(variable, "_dtype", "float32")
                twins.append((native, copied))
        for optimizer in optimizers:
            _register(twins, optimizer, overrides)
        yield


def _is_low(thing: Any) -> bool:
    return str(getattr(thing, "dtype", "")) in LOW


def _register(twins: list[tuple[Any, Any]], optimizer: Any, overrides: Overrides) -> None:
    """Make an optimizer treat the float32 twin of a variable as the variable itself."""
    for part in unique((optimizer, keras_optimizers.inner(optimizer))):
        known = getattr(part, "_trainable_variables_indices", None)  # not of an optimizer of torch
        if known:
            keys = [(part._var_key(old), part._var_key(new)) for old, new in twins]
            more = {new: known[old] for old, new in keys if old in known}
            overrides.set(part, "_trainable_variables_indices", {**known, **more})
