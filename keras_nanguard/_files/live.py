"""The variables of a live model as arrays, and their repair. Keras is imported with the first
model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._files.names import role_of
from keras_nanguard._files.problems import RepairOptions
from keras_nanguard._files.repairs import Repair, Values
from keras_nanguard._files.stored import (
    Contents,
    Identity,
    ModelArray,
    float_name,
    named_dtype,
)


@dataclass(slots=True)
class LiveArray(ModelArray):
    """The value of one variable of a live model.

    Attributes:
        variable: the variable.
        owner: the layer or optimizer that owns it.
    """

    variable: Any = None
    owner: Any = None


def is_model(thing: Any) -> bool:
    """Return whether an object is a model or a layer, by its attributes; a class is not."""
    attributes = ("variables", "trainable_variables", "name")
    return not isinstance(thing, type) and all(hasattr(thing, name) for name in attributes)


def live_contents(model: Any) -> Contents:
    """Return a model with the arrays of `live_arrays`."""
    return Contents("model", list(live_arrays(model)), source=str(model.name))


def live_arrays(model: Any) -> list[LiveArray]:
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
            who = Identity(name, _path(variable), "slot", "Optimizer")
            found.append(_live(who, who.name, variable, optimizer))
    for variable in metrics:
        who = Identity("metrics", _path(variable), "other", "Metric")
        found.append(_live(who, who.name, variable, model))
    unique: dict[int, LiveArray] = {}
    for live in found:
        unique.setdefault(id(live.variable), live)
    return list(unique.values())


def _live(who: Identity, location: str, variable: Any, owner: Any) -> LiveArray:
    dtype = str(getattr(variable.dtype, "name", variable.dtype))
    kind = named_dtype(dtype)
    return LiveArray(
        location,
        dtype,
        tuple(int(length) for length in variable.shape),
        is_float=kind is not None and float_name(kind) is not None,
        pieces=lambda: (_value(variable),),
        whole=partial(_value, variable),
        who=who,
        variable=variable,
        owner=owner,
    )


def _value(variable: Any) -> NDArray[Any]:
    """Return a copy of the value of a variable."""
    if hasattr(variable, "detach"):  # a torch tensor, such as the states of a stateful layer
        variable = variable.detach().cpu()
    return np.array(variable.numpy() if hasattr(variable, "numpy") else variable)


def optimizers(model: Any) -> list[tuple[str, Any]]:
    """Return the optimizers of a model with the attribute of each; a GAN has more than one."""
    optimizer = getattr(model, "optimizer", None)
    found = [("optimizer", optimizer)] if optimizer is not None else []
    for name, value in sorted(vars(model).items()):
        is_optimizer = hasattr(value, "stateless_apply") and hasattr(value, "learning_rate")
        if is_optimizer and all(value is not known for _, known in found):
            found.append((name.lstrip("_"), value))
    return found


def _of_layers(model: Any) -> Iterator[LiveArray]:
    from keras_nanguard._keras import layers as keras_layers

    for outer, layer in [((), model), *keras_layers.walk(model)]:
        within = keras_layers.children(layer)
        inner = {id(variable) for child in within for variable in child.variables}
        path, kind = "/".join(outer) or str(layer.name), type(layer).__name__
        settings = {"dtype": getattr(layer, "compute_dtype", "")}
        for variable in layer.variables:
            if id(variable) not in inner:
                name = str(variable.name)
                who = Identity(path, name, role_of(name, kind), kind, settings)
                yield _live(who, _path(variable), variable, layer)
        for place, state in enumerate(keras_layers.recurrent_states(layer)):
            who = Identity(path, f"states/{place}", "other", kind, settings)
            yield _live(who, who.path, state, layer)


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)


class LiveRepair(Repair):
    """The repair of a live model: each array is replaced at once.

    Args:
        model: the model.
        contents, options, good: see `Repair`.
    """

    def __init__(
        self,
        model: Any,
        contents: Contents,
        options: RepairOptions,
        good: Mapping[str, ModelArray],
    ):
        super().__init__(contents, options, good)
        self._model = model
        self._starts: dict[int, dict[int, Any]] = {}

    def replace(self, array: Any, values: NDArray[Any]) -> None:
        """Assign the values to the variable."""
        array.variable.assign(np.array(values))

    def initial(self, array: Any) -> Values:
        """Return a value of the layer's initializer; for a slot the one in a new optimizer with the
        same configuration, and for a moving average of a weight that weight."""
        from keras_nanguard._keras import (  # imports Keras
            layers as keras_layers,
            optimizers as keras_optimizers,
            variables as keras_variables,
        )

        if array.who.role != "slot":
            return keras_layers.initial_value(self._model, array.variable)
        optimizer = array.owner
        if id(optimizer) not in self._starts:
            fresh = keras_optimizers.fresh_like(optimizer).variables
            starts = {id(v): start for v, start in zip(optimizer.variables, fresh, strict=True)}
            averaged = {id(mean): w for mean, w in keras_optimizers.averages_of(optimizer)}
            self._starts[id(optimizer)] = starts | averaged
        return keras_variables.read(self._starts[id(optimizer)][id(array.variable)])
