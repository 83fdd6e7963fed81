"""Lint rules: a hazard that is visible before training, and the remedy; and their subject: layers,
outputs with their last activation and loss, optimizer, data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._keras.layers import graph_operations, source_of, symbolic_arguments, walk
from keras_nanguard._keras.losses import given_metrics

Site = tuple[str, str]
"""Path of the layer, variable, loss or metric (`""` for the model as a whole), and the
observation."""


@dataclass(frozen=True, slots=True)
class Hazard:
    """One hazard in one model.

    Attributes:
        code: code of the rule.
        severity: `"error"` (it causes a failure), `"warning"` (it may cause one) or `"note"` (for
            information).
        path: path of the layer or variable, name of the loss or metric, or `""`.
        detail: the observation, one sentence.
        fix: the remedy, one sentence.
    """

    code: str
    severity: str
    path: str
    detail: str
    fix: str


_SHAPE_ONLY = (
    *("Reshape", "Flatten", "Dropout", "Permute", "RepeatVector", "Identity", "Squeeze"),
    "ExpandDims",
)
"""Layers and operations that do not change values."""

_ACTIVATIONS = {
    **{name: name.lower() for name in ("Softmax", "ReLU", "ELU", "PReLU", "Sigmoid", "Relu")},
    **{name: name.lower() for name in ("Tanh", "Softplus", "Exp")},
    "LeakyReLU": "leaky_relu",
}
"""Layers and operations of `keras.ops` that are an activation, with its name."""


def keras_class(thing: Any) -> str:
    """Return the name of the first class of Keras that an object is an instance of, or `""`. A
    custom class may have the name of one of Keras and none of its attributes."""
    own = (kind for kind in type(thing).__mro__ if kind.__module__.startswith("keras."))
    return next((kind.__name__ for kind in own), "")


@dataclass(frozen=True, slots=True)
class Placed:
    """A layer or operation, and its path: the names of its outer layers and its own, joined by
    `/`."""

    path: str
    layer: Any

    @property
    def kind(self) -> str:
        """Name of its class of Keras: of a subclass its base, of any other layer `"Layer"`."""
        return keras_class(self.layer)


@dataclass(frozen=True, slots=True)
class Output:
    """One output of the model.

    Attributes:
        name: name of the output.
        path: name of the layer that computes it.
        activation: name of the last activation (`"linear"` if the layer has none), or `None` if it
            is not known.
        dtype: dtype of the output, as text.
        units: length of the last axis, or `None`.
        loss: the loss for this output as an object of `keras.losses`, or `None`.
        metrics: names or objects of the metrics for this output.
    """

    name: str
    path: str
    activation: str | None
    dtype: str
    units: int | None
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
    def scaler(self) -> Any:
        """The optimizer that the model was compiled with, or `None`."""
        compiled = getattr(self.model, "compiled", False)
        return getattr(self.model, "optimizer", None) if compiled else None

    @cached_property
    def optimizer(self) -> Any:
        """The optimizer that updates the weights (the inner one of a `LossScaleOptimizer`), or
        `None`."""
        return getattr(self.scaler, "inner_optimizer", self.scaler)

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
        tensors = self.model.outputs
        names = [str(name) for name in getattr(self.model, "output_names", range(len(tensors)))]
        compiled = self.scaler is not None
        losses = _per_output(getattr(self.model, "loss", None) if compiled else None, names)
        metrics = _per_output(given_metrics(self.model), names)
        found = []
        for name, tensor, loss, given in zip(names, tensors, losses, metrics, strict=False):
            operation = _origin(tensor)
            units = tensor.shape[-1] if len(tensor.shape) > 1 else None
            listed = given if isinstance(given, (list, tuple)) else [given]
            own = tuple(metric for metric in listed if metric is not None)
            path, activation = str(getattr(operation, "name", name)), _activation(operation)
            about = (path, activation, str(tensor.dtype), units, as_loss(loss), own)
            found.append(Output(name, *about))
        return tuple(found)

    def targets(self) -> list[tuple[Output, NDArray[Any]]]:
        """Return the targets of each output that are arrays."""
        given = _per_output(self.y, [output.name for output in self.outputs])
        pairs = zip(self.outputs, map(_array, given), strict=False)
        return [(output, array) for output, array in pairs if array is not None]

    def inputs(self) -> list[tuple[str, NDArray[Any]]]:
        """Return the inputs that are arrays of numbers, with their names."""
        named: Iterable[tuple[Any, Any]] = [("x", self.x)]
        if isinstance(self.x, Mapping):
            named = self.x.items()
        elif isinstance(self.x, (list, tuple)):
            named = [(f"input {place}", value) for place, value in enumerate(self.x)]
        arrays = [(str(name), _array(value)) for name, value in named]
        return [(name, array) for name, array in arrays if array is not None]


def activation_name(activation: Any) -> str | None:
    """Return the name of an activation function, or `None` if it has none."""
    if activation is None:
        return "linear"
    name = getattr(activation, "__name__", None) or getattr(activation, "name", None)
    return str(name) if name else None


def _origin(tensor: Any) -> Any:
    """Return the operation that computes a symbolic tensor, through nested models and changes of
    shape."""
    for _ in range(100):
        source = source_of(tensor)
        if source is None:
            return None
        operation, call, output = source
        if graph_operations(operation):
            tensor = operation.outputs[output]
        elif keras_class(operation) in _SHAPE_ONLY:
            tensor = symbolic_arguments(operation, call)[0]
        else:
            return operation
    return None


def _activation(operation: Any) -> str | None:
    kind = keras_class(operation)
    if kind in _ACTIVATIONS:
        return _ACTIVATIONS[kind]
    return activation_name(operation.activation) if hasattr(operation, "activation") else None


def _per_output(given: Any, names: list[str]) -> list[Any]:
    """Return one item per output from an argument of `compile` or `fit`: one for all, a list, or a
    dict by name."""
    if isinstance(given, Mapping):
        return [given.get(name) for name in names]
    listed = isinstance(given, (list, tuple))
    if len(names) == 1:
        return [given[0] if listed and len(given) == 1 else given]
    return [*given, *[None] * len(names)] if listed else [given] * len(names)


def as_loss(given: Any) -> Any:
    """Return the loss that Keras finds under a name, the name if it finds none, or `None` if
    nothing is given."""
    if given is None:
        return None
    import keras

    try:
        return keras.losses.get(given)
    except (ValueError, TypeError):
        return given if isinstance(given, str) else None


def _array(value: Any) -> NDArray[Any] | None:
    if value is None or not hasattr(value, "shape"):
        return None
    array = np.asarray(value)
    return array if array.dtype.kind in "fiub" and array.size else None


RULES: dict[str, Callable[[Subject], Iterator[Hazard]]] = {}
"""What yields the hazards of each rule, by its code. `docs/lint.md` has the consequences of each, a
program with the hazard and the corrected program; the tests run both."""


def rule(
    severity: Literal["error", "warning", "note"],
    *,
    fix: str,
    each: Literal["", "layers", "operations", "outputs"] = "",
    of: Collection[str] = (),
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Add a rule: the function below, whose name is its code, and whose docstring says the hazard.

    Args:
        severity, fix: see `Hazard`.
        each: `"layers"`, `"operations"` or `"outputs"` of the subject, for each of which the
            function returns the observation, or `""`. Without it the function takes the subject
            and yields the sites of the hazard.
        of: their classes; all by default.
    """

    def add(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def find(subject: Subject) -> Iterator[Hazard]:
            sites: Iterable[Site]
            if each:
                chosen = (one for one in getattr(subject, each) if not of or one.kind in of)
                sites = ((one.path, function(one)) for one in chosen)
            else:
                sites = function(subject)
            for path, detail in sites:
                if detail:
                    yield Hazard(function.__name__, severity, path, detail, fix)

        RULES[function.__name__] = find
        return function

    return add
