"""Which variables a traced TensorFlow step reads and writes, read off its graph.

A graph says exactly what will run. So instead of guessing what a user's `train_step` touches, the transaction traces it
and looks: variables it writes must be given back on a refusal, whether or not Keras lists them, and an update that
nothing reads afterwards can be deferred to the end of the step, when the verdict is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

__all__ = ["Access", "Untracked", "accesses", "capture", "draws", "mark", "untracked"]

_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"})


class Access:
    """One operation's touch of one resource that lives outside of all graphs.

    Attributes:
        handle: the resource as an eager tensor.
        key: identifies the resource.
        writes: False where the operation only reads it.
        after_mark: whether the operation was made after the mark given to `accesses`.
    """

    __slots__ = ("after_mark", "handle", "key", "writes")

    def __init__(self, handle: Any, writes: bool, after_mark: bool):
        self.handle, self.key, self.writes, self.after_mark = handle, id(handle), writes, after_mark


def mark(graph: Any) -> int:
    """Return a mark: operations made from now on are after it. Without a graph it is of no use to anyone."""
    return len(graph.get_operations()) if graph is not None else 0


def capture(graph: Any, variable: Any) -> Any:
    """Return the tensor by which the graph knows this `tf.Variable`."""
    return graph.capture(variable.handle) if hasattr(graph, "capture") else variable.handle


def accesses(graph: Any, start: int = 0, after_mark: int | None = None) -> Iterable[Access]:
    """Yield every touch of an outside resource by the operations made since `start`.

    Calls of functions, loops and conditionals carry the attribute `_read_only_resource_inputs`, which TensorFlow's
    automatic control dependencies set (tensorflow/python/framework/auto_control_deps.py): inputs that it does not name
    count as written.
    """
    outside = _Outside()
    for position, op in enumerate(graph.get_operations()[start:], start):
        resources = [i for i, t in enumerate(op.inputs) if t.dtype == tf.resource]
        if not resources or op.type.startswith("Collective"):  # what orders collectives is no state of the model
            continue
        reads = set(resources) if op.type in _READS else _read_only(op)
        for i in resources:
            handle = outside.of(op.inputs[i])
            if handle is not None:
                yield Access(handle, i not in reads, after_mark is not None and position >= after_mark)


def draws(graph: Any) -> bool:
    """Return whether an operation draws random numbers by a state of its own, which nobody can give back (`tf.random.normal`).

    Such ones have two seeds as attributes. `tf.random.Generator` and Keras' `SeedGenerator` keep their states in variables.
    """
    whole = graph.as_graph_def()
    return any("seed2" in node.attr for nodes in (whole.node, *(f.node_def for f in whole.library.function)) for node in nodes)


def _read_only(op: Any) -> set[int]:
    try:
        return set(op.get_attr("_read_only_resource_inputs"))
    except ValueError:
        return set()


class _Outside:
    """Finds what tensors of nested graphs stand for outside of all of them."""

    def __init__(self) -> None:
        self._captures: dict[int, dict[int, Any]] = {}

    def of(self, tensor: Any) -> Any:
        """Return the eager tensor behind one of a graph, `None` where there is none."""
        while tensor is not None and not hasattr(tensor, "numpy"):
            graph = tensor.graph
            known = self._captures.get(id(graph))
            if known is None or (id(tensor) not in known and len(known) != len(_captures(graph))):
                known = self._captures[id(graph)] = {id(internal): external for external, internal in _captures(graph)}
            tensor = known.get(id(tensor))
        return tensor


def _captures(graph: Any) -> Any:
    return getattr(graph, "captures", ())


class Untracked:
    """A variable that the step writes although Keras lists it nowhere, known by its handle alone."""

    def __init__(self, handle: Any, dtype: Any):
        self.handle, self.dtype, self.name = handle, dtype, "untracked variable"

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the value that it has at this moment."""
        with tf.init_scope():
            return self.read_value().shape

    def read_value(self) -> Any:
        """Return its value at this point of the program."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def assign(self, value: Any) -> None:
        """Give it a value."""
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)


def untracked(handle: Any) -> Untracked | None:
    """Return the variable behind this eager handle, `None` for a resource that is none: a table, a queue, a summary writer.

    `Tensor._handle_data` is private to TensorFlow. It holds the dtype of a variable that is written inside of a function, a
    loop or a conditional only: the operations that pass it on do not know it, and the `tf.Variable` is not known here.
    """
    with tf.init_scope():
        if not tf.raw_ops.VarIsInitializedOp(resource=handle):
            return None
    data: Any = getattr(handle, "_handle_data", None)
    known = data is not None and data.is_set and len(data.shape_and_type) == 1
    return Untracked(handle, tf.as_dtype(data.shape_and_type[0].dtype)) if known else None
