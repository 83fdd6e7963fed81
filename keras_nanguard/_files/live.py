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
from keras_nanguard._keras.structure import children, walk


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
    attributes = ("variables", "trainable_variables", "name")
    return not isinstance(thing, type) and all(hasattr(thing, name) for name in attributes)


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
        remedy = "Pass a model or the path of a file."
        raise GuardError(expected("a Keras model", type(model).__name__, remedy))
    if not getattr(model, "built", True):
        remedy = "Call it on data once, or call build() with input shapes."
        raise GuardError(expected("a built model", f"model={model.name}", remedy))
    metrics = getattr(model, "metrics_variables", ())
    of_metrics = {id(variable) for variable in metrics}
    found = [live for live in _of_layers(model) if id(live.variable) not in of_metrics]
    for name, optimizer in optimizers(model):
        for variable in optimizer.variables:
            path = _path(variable)
            identity = Identity(name, path, "slot", "Optimizer")
            found.append(LiveVariable(identity, path, optimizer, variable))
    for variable in metrics:
        path = _path(variable)
        identity = Identity("metrics", path, "other", "Metric")
        found.append(LiveVariable(identity, path, model, variable))
    unique: dict[int, LiveVariable] = {}
    for live in found:
        unique.setdefault(id(live.variable), live)
    return list(unique.values())


def optimizers(model: Any) -> list[tuple[str, Any]]:
    """Return the optimizers of a model with the attribute of each; a GAN has more than one."""
    optimizer = getattr(model, "optimizer", None)
    found = [("optimizer", optimizer)] if optimizer is not None else []
    for name, value in sorted(vars(model).items()):
        is_optimizer = hasattr(value, "stateless_apply") and hasattr(value, "learning_rate")
        if is_optimizer and all(value is not known for _, known in found):
            found.append((name.lstrip("_"), value))
    return found


def _of_layers(model: Any) -> Iterator[LiveVariable]:
    for outer, layer in [((), model), *walk(model)]:
        inner = {id(variable) for child in children(layer) for variable in child.variables}
        path, kind = "/".join(outer) or str(layer.name), type(layer).__name__
        for variable in layer.variables:
            if id(variable) not in inner:
                name = str(variable.name)
                identity = Identity(path, name, role_of(name, kind), kind)
                yield LiveVariable(identity, _path(variable), layer, variable)
        for place, state in enumerate(_states(layer)):
            identity = Identity(path, f"states/{place}", "other", kind)
            yield LiveVariable(identity, identity.path, layer, state)


def _states(layer: Any) -> list[Any]:
    """Return the states of a stateful recurrent layer, which no list of variables and no file
    contains."""
    states = getattr(layer, "states", None) if getattr(layer, "stateful", False) else None
    flat = states if isinstance(states, (list, tuple)) else [states]
    return [state for state in flat if state is not None and hasattr(state, "dtype")]


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)
