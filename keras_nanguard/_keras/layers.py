"""The layers of a model: all of them at any depth, the graph of a functional model, names and
states.

Private names of Keras:

- ``Layer._flatten_layers``: the layers directly within a layer, or at any depth; only models have
  ``layers``, of the first level.
- ``KerasTensor._keras_history``, ``Operation._inbound_nodes``: which operation computes a symbolic
  tensor, and from what.
- ``Sequential._functional``: the graph of a `Sequential`.
- ``keras.src.backend.common.masking``: the mask that Keras attaches to a tensor.
- ``keras.src.ops.function.Function``: what has a graph; ``keras.Model`` is also the base of
  subclassed models. ``keras.src.models.functional.Functional``: a model that has one.
- ``keras.src.models.model.functional_init_arguments``: which arguments make a functional model.
- ``Functional._outputs_struct``: the keys of outputs in a dict.
- ``Layer._call_has_training_arg``: whether `call` takes `training`.
- ``Layer._losses``: the losses added by `add_loss`, those of the last call.
- ``Layer._non_trainable_variables``: distinguishes states from frozen weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import masking
from keras.src.models.functional import Functional
from keras.src.models.model import functional_init_arguments
from keras.src.ops.function import Function

from keras_nanguard._core.variable_names import STARTS, initializer_names, with_unit_forget_bias
from keras_nanguard._keras import arrays as keras_arrays, variables as keras_variables

# All layers


def layers_of(model: Any) -> list[Any]:
    """Return the model and its layers at any depth, in the order in which Keras lists them."""
    return list(model._flatten_layers(include_self=True, recursive=True))


def children(layer: Any) -> list[Any]:
    """Return the layers directly within a layer."""
    flatten = getattr(layer, "_flatten_layers", None)
    if flatten is not None:
        return list(flatten(include_self=False, recursive=False))
    return list(getattr(layer, "layers", ()))


def walk(layer: Any, outer: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each layer within a layer, at any depth, with its path: the names of the layers that
    contain it, outermost first, and its own. A layer that is used twice has two paths.
    """
    for child in children(layer):
        path = (*outer, str(child.name))
        yield path, child
        yield from walk(child, path)


def held_by(objects: Iterable[Any]) -> Iterator[Any]:
    """Yield the objects in attributes of objects, and in their lists, tuples and dicts; no losses
    of the last call.
    """
    for item in objects:
        for name, value in vars(item).items():
            if name != "_losses":
                yield from keras_variables.flat(value)


def class_of(thing: Any) -> str:
    """Return the name of the first class of Keras that an object is an instance of, or `""`. A
    custom class may have the name of one of Keras and none of its attributes.
    """
    own = (kind for kind in type(thing).__mro__ if kind.__module__.startswith("keras."))
    return next((kind.__name__ for kind in own), "")


def path_of(layer: Any, parent: str | None, model: Any) -> str:
    """Return the Keras path of a layer; a layer without a path is named after the layer that it
    runs in.

    Args:
        layer: a layer or an operation.
        parent: path of the layer that it runs in, `None` if there is none.
        model: the outermost model, whose name is not part of the paths in a functional model.
    """
    path = getattr(layer, "path", None)
    if path:
        return str(path)
    if parent is None or (parent == path_of(model, None, model) and hasattr(model, "operations")):
        return str(layer.name)
    return f"{parent}/{layer.name}"


def mode(model: Any, training: bool) -> dict[str, bool]:
    """Return the argument that calls a model in training or inference mode, `{}` if it has none."""
    return {"training": training} if getattr(model, "_call_has_training_arg", True) else {}


# What a layer has


def recurrent_states(layer: Any) -> list[Any]:
    """Return the states of a stateful RNN, which no list of variables contains; else none."""
    states = getattr(layer, "states", None) if getattr(layer, "stateful", False) else None
    return [s for s in keras.tree.flatten(states) if hasattr(s, "dtype")]


def saved_places(layer: Any) -> dict[int, str]:
    """Return where a layer saves each of its variables among them in a file, such as `"0"`, by the
    id of the variable; without those of which it saves another value."""
    saved: dict[str, Any] = {}
    try:
        layer.save_own_variables(saved)
    except Exception:  # noqa: BLE001 (a layer of the user raises anything)
        return {}
    return {id(value): place for place, value in saved.items()}


def batchnorms(model: Any) -> list[Any]:
    """Return the built BatchNormalization layers at any depth. A class that inherits from
    BatchNormalization may have no moving statistics: such a layer is not among them.
    """
    parts = ("moving_mean", "moving_variance")
    return [
        layer
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        and all(keras_variables.is_variable(getattr(layer, part, None)) for part in parts)
    ]


def initial_value(model: Any, variable: Any) -> np.ndarray[Any, Any] | None:
    """Return an initial value of a variable of a layer, drawn from its initializer; `None` if that
    is not known, as for most variables of custom layers.
    """
    shape, layers = tuple(variable.shape), layers_of(model)
    if any(state is variable for layer in layers for state in recurrent_states(layer)):
        return np.zeros(shape)
    owners = (layer for layer in layers if any(v is variable for v in layer.weights))
    owner = next((o for o in owners if variable.path == f"{o.path}/{variable.name}"), None)
    given = (getattr(owner, name, None) for name in initializer_names(variable.name))
    initializer = next(filter(None, given), None)
    if initializer is None:
        start = STARTS.get(variable.name)
        return None if start is None else np.full(shape, start)
    value = keras.initializers.get(initializer)(shape, dtype=variable.dtype)
    drawn = keras_arrays.read_tensor(value)
    unit_forget = variable.name == "bias" and getattr(owner, "unit_forget_bias", False)
    return with_unit_forget_bias(drawn) if unit_forget else drawn


def use_written_values(model: Any) -> bool:
    """Let each Normalization compute with the values of its variables, as Keras does after it loads
    them: the layer uses copies. Return whether there is one: compiled functions keep the old ones.
    """
    found = [la for la in layers_of(model) if isinstance(la, keras.layers.Normalization)]
    for layer in found:
        layer.finalize_state()
    return bool(found)


def adds_losses(model: Any) -> bool:
    """Whether a layer of the model adds a loss, by `add_loss` or by an activity regularizer."""
    return any(layer._losses or layer.activity_regularizer for layer in layers_of(model))


def states_of_own_layers(model: Any) -> set[int]:
    """Return the `id` of each state of a custom layer and of each buffer of PyTorch: only these may
    be NaN on purpose, not frozen weights nor the states of Keras' own layers.
    """
    custom = [la for la in layers_of(model) if not type(la).__module__.startswith("keras.")]
    found = {id(v) for layer in custom for v in layer._non_trainable_variables}
    native = [v for v in model.non_trainable_variables if not keras_variables.is_variable(v)]
    return found | {id(v) for v in native if type(v.value).__name__ != "Parameter"}


def with_mask_of(source: Any, tensor: Any) -> Any:
    """Return the tensor with the mask that Keras has attached to another one."""
    mask = masking.get_keras_mask(source)
    if mask is not None:
        masking.set_keras_mask(tensor, mask)
    return tensor


# The graph of a functional model

FUNCTIONAL = Functional
"""The class of functional models."""


def makes_functional(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the arguments of `keras.Model` make it a functional model."""
    return bool(functional_init_arguments(args, kwargs))


def operations_of(model: Any) -> tuple[Any, ...]:
    """Return the operations (`keras.ops.log(x)`) of all functional models within a model."""
    found = [o for layer in layers_of(model) for o in graph_operations(layer)]
    return keras_variables.unique(o for o in found if not isinstance(o, keras.layers.Layer))


def graph_operations(layer: Any) -> list[Any]:
    """Return the operations of the graph of a functional or sequential model, layers included; none
    for other layers, which may have attributes of the same name.
    """
    graph = _graph_of(layer)
    return [] if graph is None else list(graph.operations)


def _graph_of(layer: Any) -> Any:
    """Return what has the graph of a functional or sequential model; `None` for other layers."""
    graph = layer._functional if isinstance(layer, keras.Sequential) else layer
    return graph if isinstance(graph, Function) else None


def source_of(tensor: Any) -> tuple[Any, int, int] | None:
    """Return operation, index of its call, and of the output of a symbolic tensor, or `None`."""
    history: tuple[Any, int, int] | None = getattr(tensor, "_keras_history", None)
    return history


def arguments_of(operation: Any) -> list[Any]:
    """Return the arguments of the first call of an operation in a graph, positional ones first."""
    arguments = operation._inbound_nodes[0].arguments
    return [*arguments.args, *arguments.kwargs.values()]


def symbolic_arguments(operation: Any, call: int) -> list[Any]:
    """Return the symbolic tensors that a call of an operation was given."""
    return list(operation._inbound_nodes[call].input_tensors)


# Inputs and outputs of a model

GENERATED_PREFIXES = ("keras_tensor", "input_layer")
"""Prefixes of the names that Keras generates for inputs without a name."""

TAKES_IDS = frozenset(
    {"Embedding", "CategoryEncoding", "IntegerLookup", "StringLookup", "Hashing", "HashedCrossing"}
)
"""Layers whose inputs may be ids, although a model casts them to its default dtype."""


def takes_floats(model: Any) -> bool:
    """Whether a model takes integers as numbers, not as ids or tokens: it casts all inputs to a
    float dtype, and none of its layers takes ids, as a custom one may.
    """
    inputs = inputs_of(model)
    if not inputs or not all("float" in str(t.dtype) for t in inputs):
        return False
    return all(
        type(layer).__module__.startswith("keras.") and class_of(layer) not in TAKES_IDS
        for layer in layers_of(model)
        if layer is not model
    )


def inputs_of(model: Any) -> list[Any]:
    """Return the inputs of a functional or sequential model; none of others, in which the attribute
    `inputs` may be anything.
    """
    return _symbolic(getattr(model, "inputs", None))


def _symbolic(value: Any) -> list[Any]:
    """Return a list of symbolic tensors; an empty one for anything else."""
    tensors = value if isinstance(value, list) else []
    return tensors if all(isinstance(t, keras.KerasTensor) for t in tensors) else []


def input_names(model: Any) -> tuple[str, ...]:
    """Return the name of each `keras.Input` of a functional model, `""` if it is generated; `()`
    for other models."""
    names = [str(tensor.name) for tensor in inputs_of(model)]
    return tuple("" if name.startswith(GENERATED_PREFIXES) else name for name in names)


def data_paths(model: Any) -> list[str]:
    """Return the paths of the named inputs of a functional model, and of its outputs' targets, as
    in findings: `x/age`, `y/price`."""
    inputs = [f"x/{name}" for name in input_names(model) if name]
    return [*inputs, *(f"y/{name}" for name in output_names(model))]


def output_names(model: Any) -> list[str]:
    """Return the name of each output by which `compile` and `fit` know it: in a functional or
    sequential model its key in a dict, or the name of its layer; in others as far as the model
    names them.
    """
    tensors = _symbolic(getattr(model, "outputs", None))
    known = getattr(model, "output_names", None)
    if not tensors:
        return [str(name) for name in known] if isinstance(known, (list, tuple)) else []
    structure = getattr(model, "_outputs_struct", None)
    named = structure.items() if isinstance(structure, dict) else ()
    keys = {id(tensor): str(key) for key, tensor in named}
    sources = map(source_of, tensors)
    names = [t.name if s is None else s[0].name for t, s in zip(tensors, sources)]
    return [keys.get(id(t), str(name)) for t, name in zip(tensors, names)]


def symbolic_outputs(model: Any) -> Any:
    """Return the symbolic outputs of a functional or sequential model, as its call returns them;
    `None` for another one.
    """
    graph = _graph_of(model)
    return None if graph is None else graph._outputs_struct


def named_outputs(model: Any, outputs: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the flat outputs of a model with their names; `output_2` for one without a name."""
    names = output_names(model)
    names += [f"output_{number}" for number in range(len(names), len(outputs))]
    return list(zip(names, outputs))


def output_shapes(model: Any) -> list[tuple[str, tuple[int | None, ...]]]:
    """Return name and shape of each output of a functional model; none for other models."""
    outputs = _symbolic(getattr(model, "outputs", None))
    return [(name, tuple(t.shape)) for name, t in zip(output_names(model), outputs)]
