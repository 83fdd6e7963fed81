"""What the rules examine: the layers of a model, its outputs with their last activation and loss,
its optimizer, and the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core import finiteness
from keras_nanguard._keras import arrays as keras_arrays
from keras_nanguard._keras.layers import (
    class_of,
    graph_operations,
    output_names,
    source_of,
    symbolic_arguments,
    walk,
)
from keras_nanguard._keras.losses import given_metrics
from keras_nanguard._keras.optimizers import inner

_SHAPE_ONLY = (
    *("Reshape", "Flatten", "Dropout", "Permute", "RepeatVector", "Identity", "Squeeze"),
    "ExpandDims",
)
"""Layers and operations that do not change values."""

_NAMED = ("Softmax", "ReLU", "ELU", "PReLU", "Sigmoid", "Relu", "Tanh", "Softplus", "Exp")

_ACTIVATIONS = {"LeakyReLU": "leaky_relu", **{name: name.lower() for name in _NAMED}}
"""Layers and operations of `keras.ops` that are an activation, with its name."""

POSITIVE = ("softmax", "sigmoid", "softplus", "exponential", "exp")
"""Activations above 0, unless they underflow."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A layer or operation, and its path: the names of its outer layers and its own, joined by
    `/`."""

    path: str
    layer: Any

    @property
    def kind(self) -> str:
        """Name of its class of Keras: of a subclass its base, of any other layer `"Layer"`."""
        return class_of(self.layer)


@dataclass(frozen=True, slots=True)
class Output:
    """One output of the model.

    Attributes:
        name: name of the output.
        path: name of the layer that computes it.
        activation: name of the last activation (`"linear"` if the layer has none), or `None` if it
            is not known.
        of_one: whether the activation is a softmax over single entries.
        dtype: dtype of the output, as text.
        shape: shape of the output, with the rows.
        loss: the loss for this output as an object of `keras.losses`, or `None`.
        metrics: the metrics for this output that are objects or functions, or have the name of a
            loss.
    """

    name: str
    path: str
    activation: str | None
    of_one: bool
    dtype: str
    shape: tuple[int | None, ...]
    loss: Any
    metrics: tuple[Any, ...]


class Subject:
    """A built model, optionally compiled, optionally with data.

    Args:
        model: the model.
        x: inputs as for `fit`, or `None`.
        y: targets as for `fit`, or `None`.
    """

    def __init__(self, model: Any, x: Any = None, y: Any = None):
        self.model, self.x, self.y = model, x, y

    @cached_property
    def layers(self) -> tuple[Placed, ...]:
        """Every layer of the model, at any depth, once."""
        found: dict[int, Placed] = {}
        for path, layer in walk(self.model):
            found.setdefault(id(layer), Placed("/".join(path), layer))
        return tuple(found.values())

    @cached_property
    def outermost(self) -> Any:
        """The optimizer that the model was compiled with, or `None`."""
        compiled = getattr(self.model, "compiled", False)
        return getattr(self.model, "optimizer", None) if compiled else None

    @cached_property
    def optimizer(self) -> Any:
        """The optimizer that updates the weights (the inner one of a `LossScaleOptimizer`), or
        `None`."""
        return inner(self.outermost)

    @cached_property
    def operations(self) -> tuple[Placed, ...]:
        """Every operation of the functional graphs in the model, layers included."""
        graphs = [("", self.model), *((f"{one.path}/", one.layer) for one in self.layers)]
        return tuple(
            Placed(f"{path}{operation.name}", operation)
            for path, graph in graphs
            for operation in graph_operations(graph)
        )

    @cached_property
    def outputs(self) -> tuple[Output, ...]:
        """The outputs of a functional or sequential model; none if the graph is not known."""
        if not graph_operations(self.model):
            return ()
        tensors, names = self.model.outputs, output_names(self.model)
        compiled = self.outermost is not None
        losses = _per_output(getattr(self.model, "loss", None) if compiled else None, names)
        metrics = _per_output(given_metrics(self.model), names)
        found = []
        for name, tensor, loss, given in zip(names, tensors, losses, metrics, strict=False):
            operation, shape = origin_of(tensor)
            listed = given if isinstance(given, (list, tuple)) else [given]
            own = tuple(filter(None, map(_as_loss, listed)))
            path, activation = str(getattr(operation, "name", name)), last_activation(operation)
            of_one = activation == "softmax" and _is_of_one(operation, shape)
            about = (path, activation, of_one, str(tensor.dtype), tuple(tensor.shape))
            found.append(Output(name, *about, _as_loss(loss), own))
        return tuple(found)

    def targets(self) -> list[tuple[Output, NDArray[Any]]]:
        """Return the targets of each output that are arrays."""
        given = _per_output(self.y, [output.name for output in self.outputs])
        pairs = zip(self.outputs, map(_array, given), strict=False)
        return [(output, array) for output, array in pairs if array is not None]

    def inputs(self) -> list[tuple[str, NDArray[Any]]]:
        """Return the inputs that are arrays of numbers, with their names."""
        return _named("x", "input", self.x)

    def data(self) -> list[tuple[str, NDArray[Any]]]:
        """Return the inputs and targets that are arrays of numbers, with their names."""
        targets = [(f"targets of {output.name}", array) for output, array in self.targets()]
        return [*self.inputs(), *(targets or _named("y", "target", self.y))]

    def takes_input(self, placed: Placed) -> bool:
        """Whether an operation takes an input of a model as it is, or in another shape."""
        return any(
            class_of(origin_of(tensor)[0]) == "InputLayer"
            for tensor in symbolic_arguments(placed.layer, 0)
        )


def _named(whole: str, part: str, given: Any) -> list[tuple[str, NDArray[Any]]]:
    """Return the arrays in an argument of `fit` with their names: `whole`, or `part` and a
    number."""
    named: Iterable[tuple[Any, Any]] = [(whole, given)]
    if isinstance(given, Mapping):
        named = given.items()
    elif isinstance(given, (list, tuple)):
        named = [(f"{part} {place}", value) for place, value in enumerate(given)]
    arrays = [(str(name), _array(value)) for name, value in named]
    return [(name, array) for name, array in arrays if array is not None]


def activation_name(activation: Any) -> str | None:
    """Return the name of an activation function, or `None` if it has none."""
    if activation is None:
        return "linear"
    name = getattr(activation, "__name__", None) or getattr(activation, "name", None)
    return str(name) if name else None


def origin_of(tensor: Any) -> tuple[Any, tuple[int | None, ...]]:
    """Return the operation that computes a symbolic tensor, through nested models and changes of
    shape, and the shape of its result; `None` if it is not known."""
    for _ in range(100):
        source = source_of(tensor)
        if source is None:
            break
        operation, call, output = source
        if graph_operations(operation):
            tensor = operation.outputs[output]
        elif class_of(operation) in _SHAPE_ONLY:
            tensor = symbolic_arguments(operation, call)[0]
        else:
            return operation, tuple(tensor.shape)
    return None, ()


def last_activation(operation: Any) -> str | None:
    """Return the name of the activation with which a layer or operation ends, `"linear"` if it has
    none; `None` if it is not known, as for a class with its own `call`.
    """
    kind = class_of(operation)
    call = getattr(type(operation), "call", None)
    if not getattr(call, "__module__", "").startswith("keras."):
        return None
    if kind in _ACTIVATIONS:
        return _ACTIVATIONS[kind]
    return activation_name(operation.activation) if hasattr(operation, "activation") else None


def _is_of_one(operation: Any, shape: Sequence[int | None]) -> bool:
    """Whether a softmax adds up single entries of a result of this shape."""
    axes = operation.axis if class_of(operation) == "Softmax" else -1
    return all(axis is not None and shape[axis] == 1 for axis in keras.tree.flatten(axes))


def _per_output(given: Any, names: list[str]) -> list[Any]:
    """Return one item per output from an argument of `compile` or `fit`: one for all, a list, or a
    dict by name."""
    if isinstance(given, Mapping):
        return [given.get(name) for name in names]
    listed = isinstance(given, (list, tuple))
    if len(names) == 1:
        return [given[0] if listed and len(given) == 1 else given]
    return [*given, *[None] * len(names)] if listed else [given] * len(names)


def _as_loss(given: Any) -> Any:
    """Return the loss of Keras that an argument of `compile` names or is, or `None`."""
    try:
        return keras.losses.get(given)
    except (ValueError, TypeError):
        return None


def _array(value: Any) -> NDArray[Any] | None:
    if value is None or not hasattr(value, "shape"):
        return None
    array = finiteness.widen(keras_arrays.dense(value))
    array = np.abs(array) if array.dtype.kind == "c" else array
    return array if array.dtype.kind in "fiub" and array.size else None
