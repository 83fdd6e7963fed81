"""Which variables a traced TensorFlow step reads and writes, read off its graph.

A graph says exactly what will run. So instead of guessing what a user's `train_step` touches, the transaction traces it
and looks: variables it writes must be given back on a refusal, whether or not Keras lists them, and an update that
nothing reads afterwards can be put off to the end of the step, when the verdict is known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

__all__ = ["Access", "accesses", "capture", "eager_handle", "mark"]

_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"})
_RANDOM = ("RngReadAndSkip", "RngSkip", "StatefulUniform", "StatefulStandardNormal", "StatefulTruncatedNormal")


class Access:
    """One operation's touch of one resource.

    Attributes:
        handle: the resource tensor as it stands in the graph.
        writes: False where the operation only reads it.
        dtype: dtype of the variable where the operation tells, else `None`.
        late: whether the operation was made after the mark given to `accesses`.
    """

    __slots__ = ("dtype", "handle", "late", "writes")

    def __init__(self, handle: Any, writes: bool, dtype: Any, late: bool):
        self.handle, self.writes, self.dtype, self.late = handle, writes, dtype, late


def mark(graph: Any) -> int:
    """Return a number that tells operations made from now on from those made before."""
    return len(graph.get_operations())


def capture(graph: Any, variable: Any) -> Any:
    """Return the tensor by which the graph knows this `tf.Variable`."""
    return graph.capture(variable.handle) if hasattr(graph, "capture") else variable.handle


def accesses(graph: Any, start: int, late: int | None = None) -> Iterable[Access]:
    """Yield every touch of a resource by the operations made since `start`.

    Calls of functions, loops and conditionals carry the attribute `_read_only_resource_inputs`, which TensorFlow's
    automatic control dependencies set (tensorflow/python/framework/auto_control_deps.py): inputs that it does not name
    count as written.
    """
    for position, op in enumerate(graph.get_operations()[start:], start):
        resources = [i for i, t in enumerate(op.inputs) if t.dtype == tf.resource]
        if not resources or op.type.startswith("Collective"):  # what orders collectives is no state of the model
            continue
        reads = set(resources) if op.type in _READS else _read_only(op)
        for i in resources:
            yield Access(op.inputs[i], i not in reads, _dtype(op), late is not None and position >= late)


def _read_only(op: Any) -> set[int]:
    try:
        return set(op.get_attr("_read_only_resource_inputs"))
    except ValueError:
        return set()


def _dtype(op: Any) -> Any:
    if op.type in _RANDOM:
        return tf.int64
    for name in ("dtype", "T"):
        try:
            return tf.as_dtype(op.get_attr(name))
        except (ValueError, TypeError):
            continue
    return None


def eager_handle(handle: Any) -> Any:
    """Return the resource outside of all graphs that this tensor stands for, or `None` where there is none."""
    while not hasattr(handle, "numpy"):
        graph = handle.graph
        outer = [external for external, internal in getattr(graph, "captures", ()) if internal is handle]
        if not outer:
            return None
        handle = outer[0]
    return handle


class Stray:
    """A variable that the step writes although Keras lists it nowhere, known by its handle alone."""

    def __init__(self, handle: Any, dtype: Any):
        self.handle, self.dtype, self.name = handle, dtype, "unlisted variable"

    def read_value(self) -> Any:
        """Return its value at this point of the program."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def assign(self, value: Any) -> None:
        """Give it a value."""
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)
