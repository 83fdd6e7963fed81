"""The variables of a live model, without importing Keras.

The caller has imported the backend of the model; this module only uses the objects that it is
given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._files.names import Identity, role_of
from keras_nanguard._keras.structure import children

__all__ = ["LiveVariable", "is_model", "live_variables", "optimizers"]


@dataclass(frozen=True, slots=True)
class LiveVariable:
    """One variable of a live model.

    Attributes:
        identity: its names and role; `identity.layer` is the path of its layer, as for a file.
        keras_path: the `path` of the variable.
        layer: the layer or optimizer that owns it.
        variable: the variable itself.
    """

    identity: Identity
    keras_path: str
    layer: Any
    variable: Any

    @property
    def dtype(self) -> str:
        """Name of the variable's dtype."""
        return str(getattr(self.variable.dtype, "name", self.variable.dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the variable."""
        return tuple(int(length) for length in self.variable.shape)

    def read(self) -> NDArray[Any]:
        """Return a copy of its values."""
        value = self.variable
        if hasattr(value, "detach"):  # a torch tensor, such as the states of a stateful layer
            value = value.detach().cpu()
        return np.array(value.numpy() if hasattr(value, "numpy") else value)


def is_model(thing: Any) -> bool:
    """Return whether an object is a model or a layer, by its attributes; a class is not."""
    return (
        not isinstance(thing, type)
        and hasattr(thing, "variables")
        and hasattr(thing, "trainable_variables")
        and hasattr(thing, "name")
    )


def live_variables(model: Any) -> list[LiveVariable]:
    """Return every variable of a model once: layers in the order of the model, then optimizers,
    then metrics.

    Args:
        model: a built Keras model or layer.

    Returns:
        The variables, nested models included, and the states of stateful recurrent layers.

    Raises:
        GuardError: if it is not a model, or has never been built.
    """
    if not is_model(model):
        raise GuardError(
            expected(
                "a Keras model", f"{type(model).__name__}", "Pass a model or the path of a file."
            )
        )
    if not getattr(model, "built", True):
        raise GuardError(
            expected(
                "a built model",
                f"model={model.name}",
                "Call it on data once, or call build() with input shapes.",
            )
        )
    metrics = list(
        {id(variable): variable for variable in getattr(model, "metrics_variables", ())}.values()
    )
    seen = {id(variable) for variable in metrics}
    found = list(_walk(model, (), seen))
    for name, optimizer in optimizers(model):
        for variable in _unseen(optimizer.variables, seen):
            path = _path(variable)
            found.append(
                LiveVariable(Identity(name, path, "slot", "Optimizer"), path, optimizer, variable)
            )
    for variable in metrics:
        path = _path(variable)
        found.append(
            LiveVariable(Identity("metrics", path, "other", "Metric"), path, model, variable)
        )
    return found


def optimizers(model: Any) -> list[tuple[str, Any]]:
    """Return the optimizers of a model with the attribute of each; a GAN has more than one."""
    found = (
        [("optimizer", model.optimizer)] if getattr(model, "optimizer", None) is not None else []
    )
    for name, value in sorted(vars(model).items()):
        is_optimizer = hasattr(value, "stateless_apply") and hasattr(value, "learning_rate")
        if is_optimizer and all(value is not known for _, known in found):
            found.append((name.lstrip("_"), value))
    return found


def _walk(layer: Any, outer: tuple[str, ...], seen: set[int]) -> Iterator[LiveVariable]:
    below = children(layer)
    inner = {id(variable) for child in below for variable in child.variables}
    names = outer or (str(layer.name),)
    kind = type(layer).__name__
    for variable in _unseen([v for v in layer.variables if id(v) not in inner], seen):
        name = str(variable.name)
        identity = Identity("/".join(names), name, role_of(name, kind), kind)
        yield LiveVariable(identity, _path(variable), layer, variable)
    for place, state in enumerate(_states(layer)):
        identity = Identity("/".join(names), f"states/{place}", "other", kind)
        if id(state) not in seen:
            seen.add(id(state))
            yield LiveVariable(identity, identity.path, layer, state)
    for child in below:
        yield from _walk(child, (*outer, str(child.name)), seen)


def _states(layer: Any) -> list[Any]:
    """Return the states of a stateful recurrent layer, which no list of variables and no file
    contains."""
    if not getattr(layer, "stateful", False):
        return []
    states = getattr(layer, "states", None)
    flat = states if isinstance(states, (list, tuple)) else [states]
    return [state for state in flat if state is not None and hasattr(state, "dtype")]


def _unseen(variables: Any, seen: set[int]) -> Iterator[Any]:
    for variable in variables:
        if id(variable) not in seen:
            seen.add(id(variable))
            yield variable


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)
