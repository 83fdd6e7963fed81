"""The update of a step as values beside the old state, so that committing it is to put them in its place.

An update that waits for the verdict cannot run while the backward pass is still on its way, as TensorFlow lets it in an
unguarded step, and on a CPU that is where much of the time of a large model goes. So the update is traced by itself and
rewritten: what it reads of a variable is what it has written to it before, and what it writes is kept. What remains has
no effect, may run at any time, and computes the same bits: `x += d` and `x + d` round alike. Variables take values over
without copying them. While a step runs there is one more copy of what it writes.

An update that writes in a conditional or in a loop, or scattered entries only, stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from keras_nanguard._step import _graph

__all__ = ["Draft", "drafted"]

MOST_BYTES = 512 << 20
"""What the values of a draft may take; a larger update is worth waiting for."""

_IN_PLACE = {"AssignAddVariableOp": "AddV2", "AssignSubVariableOp": "Sub", "AssignVariableOp": "Identity"}
"""Operations that write a variable, and what they write as a value."""


class Draft:
    """What an update would write.

    Args:
        values: the handle of each variable that is written, and its new value, by `id` of its eager handle.
        source: the trace that it was made of. Functions that are called in it live as long as it does.
    """

    def __init__(self, values: dict[int, tuple[Any, Any]], source: Any):
        self.values, self.source = values, source

    def read(self, variable: Any) -> Any:
        """Return the new value of a `tf.Variable`, the variable itself where it is not written."""
        return self.values.get(id(variable.handle), (None, variable))[1]

    def commit(self) -> None:
        """Put the new values in the place of the old ones."""
        for handle, value in self.values.values():
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def drafted(update: Callable[[], None], written: Iterable[Any]) -> Draft | None:
    """Return an update as values, in the graph that is being built; `None` where it has to run as it is.

    Args:
        update: makes the update.
        written: `tf.Variable`s that it writes, as far as they are known.
    """
    written = list(written)
    size = sum((v.shape.num_elements() or 0) * v.dtype.size for v in written)
    if size > MOST_BYTES or any("CPU" not in v.device for v in written):
        return None
    source = tf.function(update, autograph=False).get_concrete_function()
    try:
        return Draft(_Rewritten(source.graph).values(), source)
    except _Unsuited:
        return None


class _Unsuited(Exception):
    """The update does something that has no value. Never leaves this file."""


class _Rewritten:
    """The graph of an update, with every variable in it replaced by its value at that point of the program."""

    def __init__(self, graph: Any):
        whole = graph.as_graph_def()
        self.program = tf.compat.v1.GraphDef(versions=whole.versions, library=whole.library)
        self.given: dict[str, Any] = {}  # what stands outside, by the name of what stands for it
        self.handles: dict[str, Any] = {}
        self.now: dict[int, str] = {}  # the name of each variable's value at this point, by `id` of its eager handle
        self.changed: dict[int, Any] = {}
        for external, internal in graph.captures:
            if internal.dtype == tf.resource:
                self.handles[internal.name] = external
            else:
                self.given[internal.name] = external
        for operation in graph.get_operations():
            self._take(operation)

    def _take(self, operation: Any) -> None:
        """Add one operation to the program."""
        kind = operation.type
        if kind in ("Placeholder", "NoOp"):
            return
        if kind == "ReadVariableOp" or kind in _IN_PLACE:
            handle = self._handle(operation)
            key, value = self._value(handle, operation)
            inputs = [value] if kind == "ReadVariableOp" else [value, operation.inputs[1].name][kind == "AssignVariableOp" :]
            node = self.program.node.add(name=operation.name, op=_IN_PLACE.get(kind, "Identity"), input=inputs)
            node.attr["T"].type = operation.get_attr("dtype").as_datatype_enum
            if kind in _IN_PLACE:
                self.now[key], self.changed[key] = f"{operation.name}:0", handle
            return
        if operation.op_def.is_stateful or any(tensor.dtype == tf.resource for tensor in operation.inputs):
            raise _Unsuited
        copy = self.program.node.add()
        copy.CopyFrom(operation.node_def)
        copy.attr.pop("_class", None)
        copy.input[:] = [tensor.name for tensor in operation.inputs]

    def _handle(self, operation: Any) -> Any:
        handle = self.handles.get(operation.inputs[0].name)
        if handle is None or _graph.eager_handle(handle) is None:
            raise _Unsuited
        return handle

    def _value(self, handle: Any, operation: Any) -> tuple[int, str]:
        """Return the key of a variable, and the name of its value at this point; it is read where it was not before."""
        key = id(_graph.eager_handle(handle))
        if key not in self.now:
            self.now[key] = operation.inputs[0].name  # of the placeholder of its handle, which the program has no more
            if operation.type != "AssignVariableOp":
                self.given[self.now[key]] = tf.raw_ops.ReadVariableOp(resource=handle, dtype=operation.get_attr("dtype"))
        return key, self.now[key]

    def values(self) -> dict[int, tuple[Any, Any]]:
        """Add the program to the graph that is being built; returns handle and value of each variable, by key."""
        used = {name for node in self.program.node for name in node.input}
        given = {name: tf.convert_to_tensor(tensor) for name, tensor in self.given.items() if name in used}
        names = [self.now[key] for key in self.changed]
        values = tf.graph_util.import_graph_def(self.program, given, names, name="update")
        return {key: (handle, value) for (key, handle), value in zip(self.changed.items(), values)}
