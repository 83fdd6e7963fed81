"""Finds the variables that a traced TensorFlow step reads and writes, from its graph.

The graph shows exactly which operations will run. The transaction traces the user's `train_step`
and inspects the graph: the variables it writes must be restored on a refusal, even if Keras does
not track them, and an update can be deferred to the end of the step if nothing reads its result.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, NamedTuple

import tensorflow as tf

_READS = frozenset(
    {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"}
)


class Access(NamedTuple):
    """One access of an operation to a resource outside of all graphs.

    Attributes:
        handle: the resource as an eager tensor.
        writes: False if the operation only reads it.
        after_mark: whether the operation was created after the mark given to `accesses`.
    """

    handle: Any
    writes: bool
    after_mark: bool

    @property
    def key(self) -> int:
        """Identifies the resource."""
        return id(self.handle)


def mark(graph: Any) -> int:
    """Return a mark: operations created later are after it. Without a graph it has no meaning."""
    return len(graph.get_operations()) if graph is not None else 0


def accesses(graph: Any, start: int = 0, after_mark: int | None = None) -> Iterable[Access]:
    """Yield every access to an outside resource by operations created since `start`.

    Calls of functions, loops and conditionals have the attribute `_read_only_resource_inputs`,
    which TensorFlow's automatic control dependencies set
    (tensorflow/python/framework/auto_control_deps.py). All other inputs count as written.
    """
    captures: dict[int, dict[int, Any]] = {}
    for position, op in enumerate(graph.get_operations()[start:], start):
        resources = [i for i, t in enumerate(op.inputs) if t.dtype == tf.resource]
        if not resources or op.type.startswith("Collective"):
            continue  # resources that order collectives are not state of the model
        reads = set(resources) if op.type in _READS else _read_only(op)
        marked = after_mark is not None and position >= after_mark
        for i in resources:
            handle = _outer(op.inputs[i], captures)
            if handle is not None:
                yield Access(handle, i not in reads, marked)


def _read_only(op: Any) -> set[int]:
    try:
        return set(op.get_attr("_read_only_resource_inputs"))
    except ValueError:
        return set()


def _outer(tensor: Any, captures: dict[int, dict[int, Any]]) -> Any:
    """Return the eager tensor behind one of a nested graph, or `None`; `captures` has what is known
    of each graph.
    """
    while tensor is not None and not hasattr(tensor, "numpy"):
        pairs = getattr(tensor.graph, "captures", ())
        known = captures.get(id(tensor.graph), {})
        if id(tensor) not in known and len(known) != len(pairs):
            known = captures[id(tensor.graph)] = {id(inner): outer for outer, inner in pairs}
        tensor = known.get(id(tensor))
    return tensor


class BodyAccesses:
    """What the body of a step reads and writes, by key.

    Args:
        graph: the graph that it was traced into.
        start: mark of the graph at which it begins.
        boundary: mark at its first update, `None` if it has none.
        foreign: keys that are left out: of the variables of another replica, whose body is in the
            graph after this one.

    Attributes:
        written: the handle of each resource that it writes.
        after_update: whether it writes each resource that it accesses after its first update.
    """

    def __init__(self, graph: Any, start: int, boundary: int | None, foreign: Set[int]):
        self.written: dict[int, Any] = {}
        self.after_update: dict[int, bool] = {}
        for access in accesses(graph, start, boundary):
            key = access.key
            if key in foreign:
                continue
            if access.after_mark:
                self.after_update[key] = access.writes or self.after_update.get(key, False)
            if access.writes:
                self.written[key] = access.handle

    def depend_on(self, updates: Any) -> bool:
        """Whether the rest of the body depends on the updates in this graph: it accesses what they
        write, or writes what they read.
        """
        return any(
            self.after_update[access.key] or access.writes
            for access in (accesses(updates) if self.after_update else ())
            if access.key in self.after_update
        )


class Untracked:
    """A variable that the step writes and Keras does not track, known by its handle only."""

    def __init__(self, handle: Any, dtype: Any):
        self.handle, self.dtype, self.name = handle, dtype, "untracked variable"

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of its current value."""
        with tf.init_scope():
            return self.read_value().shape

    def read_value(self) -> Any:
        """Return its value at this point of the program."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def assign(self, value: Any) -> None:
        """Set its value."""
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)


def untracked(handle: Any) -> Untracked | None:
    """Return the variable behind this eager handle, or `None` for another resource: a table, a
    queue, a summary writer.

    `Tensor._handle_data` is private to TensorFlow. It has the dtype of a variable that is only
    written inside of a function, a loop or a conditional. The operations that pass on the handle do
    not have the dtype.
    """
    with tf.init_scope():
        if not tf.raw_ops.VarIsInitializedOp(resource=handle):
            return None
    data: Any = getattr(handle, "_handle_data", None)
    known = data is not None and data.is_set and len(data.shape_and_type) == 1
    return Untracked(handle, tf.as_dtype(data.shape_and_type[0].dtype)) if known else None
