"""A live model as `Contents`: every variable is an array, with its names and its role."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from numpy.typing import NDArray

from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.finiteness import dtype_name, is_float
from keras_nanguard._files.formats.contents import Contents, Identity, ModelArray
from keras_nanguard._files.formats.names import role_of
from keras_nanguard._keras import (
    arrays as keras_arrays,
    layers as keras_layers,
    optimizers as keras_optimizers,
    variables as keras_variables,
)


@dataclass(frozen=True, slots=True)
class LiveArray(ModelArray):
    """The value of one variable of a live model.

    Attributes:
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
    for name, optimizer in _named_optimizers(model):
        of_keras = keras_optimizers.class_of_keras(optimizer)
        for variable in optimizer.variables:
            who = Identity(name, _path(variable), "slot", of_keras)
            found.append(_live(who, who.name, variable, optimizer))
    for variable in metrics:
        who = Identity("metrics", _path(variable), "other", "Metric")
        found.append(_live(who, who.name, variable, model))
    unique: dict[int, LiveArray] = {}
    for live in found:
        unique.setdefault(id(live.variable), live)
    return list(unique.values())


def numbered_paths(model: Any) -> dict[int, list[str]]:
    """Return the paths with which a file may contain a variable, by the id of the variable, if it
    has its number in a layer instead of its name; a layer may save variables of an inner one."""
    found: dict[int, list[str]] = {}
    for outer, layer in [((), model), *keras_layers.walk(model)]:
        path = "/".join(outer) or str(layer.name)
        for variable, place in keras_layers.saved_places(layer).items():
            found.setdefault(variable, []).append(f"{path}/{place}")
    return found


def _live(who: Identity, location: str, variable: Any, owner: Any) -> LiveArray:
    dtype = dtype_name(variable.dtype)
    return LiveArray(
        location,
        dtype,
        tuple(int(length) for length in variable.shape),
        is_float=is_float(dtype),
        pieces=lambda: (_value(variable),),
        whole=partial(_value, variable),
        who=who,
        variable=variable,
        owner=owner,
    )


def _value(variable: Any) -> NDArray[Any]:
    """Return a copy of the value of a variable of Keras or of the backend."""
    return keras_arrays.read_tensor(keras_variables.native(variable))


def _named_optimizers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the optimizers of a model, each with its attribute; after a dot the number of one in a
    list, a tuple or a dict. A GAN has more than one."""
    places: dict[int, str] = {}
    for name, value in [*vars(model).items(), ("optimizer", getattr(model, "optimizer", None))]:
        items = list(keras_variables.flat(value))
        for number, item in enumerate(items):
            own = name.lstrip("_") if item is value else f"{name.lstrip('_')}.{number}"
            places[id(item)] = own
    for optimizer in keras_optimizers.find_optimizers(model):
        yield places[id(optimizer)], optimizer


def _of_layers(model: Any) -> Iterator[LiveArray]:
    for outer, layer in [((), model), *keras_layers.walk(model)]:
        within = keras_layers.children(layer)
        inner = {id(variable) for child in within for variable in child.variables}
        path, kind = "/".join(outer) or str(layer.name), type(layer).__name__
        settings = {"dtype": getattr(layer, "compute_dtype", "")}
        for variable in layer.variables:
            if id(variable) not in inner:
                name = str(variable.name)
                role = "weight" if variable.trainable else role_of(name, kind)
                who = Identity(path, name, role, kind, settings)
                yield _live(who, _path(variable), variable, layer)
        for place, state in enumerate(keras_layers.recurrent_states(layer)):
            who = Identity(path, f"states/{place}", "other", kind, settings)
            yield _live(who, who.path, state, layer)


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", None) or variable.name)
