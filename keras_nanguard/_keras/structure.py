"""The structure of Keras objects, read from the objects alone: this module does not import Keras.

Private Keras names used here, because there is no public API:

- ``Layer._flatten_layers()``: the layers directly within a layer; only models have ``layers``.
- ``KerasTensor._keras_history``, ``Operation._inbound_nodes``: which operation computes a symbolic
  tensor, and from what.
- ``Sequential._functional``: the graph of a `Sequential`.
- ``Model._compile_metrics`` and its ``_user_metrics``: the metrics that were passed to `compile`.
- ``LossFunctionWrapper._fn_kwargs``: the options of a loss that wraps a function.

`tests/keras_internals/test_internals.py` fails when a release of Keras removes one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


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


def graph_operations(layer: Any) -> list[Any]:
    """Return the operations of the graph of a functional or sequential model, layers included; none
    for other layers.
    """
    inner = getattr(layer, "_functional", None)
    return list(getattr(layer, "operations", None) or getattr(inner, "operations", None) or ())


def source_of(tensor: Any) -> tuple[Any, int, int] | None:
    """Return the operation that computes a symbolic tensor, with the indices of its call and of the
    output, or `None`.
    """
    history: Any = getattr(tensor, "_keras_history", None)
    if history is None:
        return None
    return history.operation, history.node_index, history.tensor_index


def arguments_of(operation: Any) -> list[Any]:
    """Return the arguments of the first call of an operation in a graph, positional ones first."""
    arguments = operation._inbound_nodes[0].arguments
    return [*arguments.args, *arguments.kwargs.values()]


def symbolic_arguments(operation: Any, call: int) -> list[Any]:
    """Return the symbolic tensors that a call of an operation was given."""
    return list(operation._inbound_nodes[call].input_tensors)


def loss_options(loss: Any) -> dict[str, Any]:
    """Return the options of a loss that wraps a function, by name."""
    return dict(getattr(loss, "_fn_kwargs", None) or {})


def given_metrics(model: Any) -> Any:
    """Return the metrics that were passed to `compile`, or `None`."""
    return getattr(getattr(model, "_compile_metrics", None), "_user_metrics", None)
