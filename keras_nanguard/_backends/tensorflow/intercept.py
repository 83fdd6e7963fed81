"""What the body of a step does while it runs or is traced: losses and updates, which are
intercepted, and the variables that it reads and writes, which its graph shows.

Every train step, including the user's own, ends in `Optimizer.apply`. Overriding it on the instance
gives the gradients of any train step, without changes to the optimizer's class, config and
variables.

The graph shows exactly which operations will run. The variables that the body writes must be
restored on a refusal, even if Keras does not track them, and an update can be deferred to the end
of the step if nothing reads its result.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from keras_nanguard._core.finiteness import is_inexact
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras.layers import named_outputs
from keras_nanguard._keras.losses import is_loss, predicted
from keras_nanguard._keras.overrides import Overrides
from keras_nanguard._keras.variables import as_keras

_READS = frozenset(
    {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"}
)


class Update:
    """One call of `Optimizer.apply`."""

    def __init__(self, optimizer: Any, real: Callable[..., Any], grads: list[Any], *given: Any):
        self.optimizer, self.real, self.grads, self.given = optimizer, real, grads, given
        known = given[0] if given else keras_optimizers.trained_by(optimizer)
        self.pairs = [(g, v) for g, v in zip(grads, map(as_keras, known)) if g is not None]
        self.variables = [v for _, v in self.pairs]

    def run(self, grads: list[Any] | None = None) -> None:
        """Run the deferred call; `grads`: other tensors with the same gradients."""
        self.real(self.grads if grads is None else grads, *self.given)


@dataclass(slots=True)
class StepRecord:
    """The recorded actions of one run of the body.

    Attributes:
        records: the calls of `apply`, in order.
        outputs: `(name, tensor)` of the model's outputs that `compute_loss` received.
        boundary: mark of the graph at the first update, or `None`.
    """

    records: list[Update] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)
    outputs: list[tuple[str, Any]] = field(default_factory=list)
    boundary: int | None = None


class Intercept(Overrides):
    """Context that records the calls of optimizers instead of (or besides) updating, and the
    model's loss.

    Args:
        model: the model whose `compute_loss` is recorded, or `None`.
        immediate: whether each update runs at once (its effect can be undone) instead of being
            deferred.

    Attributes:
        is_empty: whether an update has no gradients, as in the first trace of a step that lists the
            weights of a model before it calls the model, which builds it.
    """

    def __init__(self, model: Any, optimizers: Iterable[Any], immediate: bool):
        super().__init__()
        self.is_empty = False
        self.model, self.optimizers, self.immediate = model, list(optimizers), immediate
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._seen = StepRecord()
        self._creating = False

    def seen(self) -> StepRecord:
        """Return the records of the calling replica, to which calls are appended."""
        return self._seen

    def on_update(self, record: Update) -> None:
        """Note an update before it runs, also one in a function or conditional within the step."""

    def note_created(self, variable: Any) -> None:
        """Note a variable that is created while the body runs, before its first write."""

    def __enter__(self) -> Intercept:
        for optimizer in self.optimizers:
            self.set(optimizer, "apply", self._applier(optimizer, optimizer.apply))
        if hasattr(self.model, "compute_loss"):
            self.set(self.model, "compute_loss", self._noting(self.model.compute_loss))
        return self

    def creating(self) -> Any:
        """Return a context, one per thread, in which variables are created outside of the graph."""
        return tf.variable_creator_scope(self._create)

    def _applier(self, optimizer: Any, real: Callable[..., Any]) -> Callable[..., Any]:
        note = tf.autograph.experimental.do_not_convert(self._note)  # this is no code of the user

        def apply(grads: Iterable[Any], trainable_variables: Any = None) -> Any:
            grads = list(grads)
            given = () if trainable_variables is None else (list(trainable_variables),)
            if not grads:  # Keras does nothing
                self.is_empty = True
                return real(grads, *given)
            if not optimizer.built and given:
                build(optimizer, *given, eagerly=tf.executing_eagerly())
            record = Update(optimizer, real, grads, *given)
            if not note(record):
                return real(grads, *given)
            if self.immediate:
                record.run()
            return None

        return apply

    def _note(self, record: Update) -> bool:
        """Note an update; return whether it is recorded. One in a function or conditional within
        the step will run plainly.
        """
        with self._outside():
            self.on_update(record)
        is_recorded, seen = self._here(), self.seen()
        if is_recorded:
            seen.records.append(record)
            if seen.boundary is None:  # what is read until here is not read after it
                seen.boundary = mark(self.graph)
        return is_recorded

    def _outside(self) -> Any:
        """Return a context for code outside of the functions and conditionals within the step."""
        return tf.init_scope() if self.graph is None else self.graph.as_default()

    def _here(self) -> bool:
        """Whether this is the graph of the step, or its eager run, not of a function or conditional
        within it.
        """
        if self.graph is None:
            return bool(tf.executing_eagerly())
        return tf.compat.v1.get_default_graph() is self.graph

    def _create(self, create: Callable[..., Any], **kwargs: Any) -> Any:
        """Create a variable of the step (metrics, lazily built layers) outside of its graph: with a
        first value before anything writes it, and without a second trace by `tf.function`.
        """
        if self._creating:  # the scope follows into `init_scope`
            return create(**kwargs)
        self._creating = True
        try:
            with tf.init_scope():
                variable = tf.Variable(**kwargs)
        finally:
            self._creating = False
        with self._outside():
            self.note_created(variable)
        return variable

    def _noting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = real(*args, **kwargs)
            if is_loss(loss) and self._here():
                seen, outputs = self.seen(), keras.tree.flatten(predicted(args, kwargs))
                seen.losses.append(tf.convert_to_tensor(loss))
                named = named_outputs(self.model, outputs)
                seen.outputs += [(n, t) for n, t in named if tf.is_tensor(t) and is_inexact(t)]
            return loss

        return compute_loss


def build(optimizer: Any, variables: Sequence[Any], eagerly: bool) -> None:
    """Build an optimizer as Keras' own step does: variables outside of every graph, with Keras'
    names.

    The values that it writes to them are part of the graph. `tf.function` discards the first trace
    of a step, in which variables are created. So in graph mode stock `ScheduleFreeAdamW` starts
    with momenta of 0 and not with the weights, as it does in eager execution, and a guarded one has
    to do the same.
    """

    def built() -> None:
        if not optimizer.built:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(variables)

    if eagerly:
        built()
    else:
        with tf.init_scope():
            tf.function(built, autograph=False).get_concrete_function()
    optimizer.built = True


# What a graph reads and writes


def mark(graph: Any) -> int:
    """Return a mark: operations created later are after it. Without a graph it has no meaning."""
    return len(graph.get_operations()) if graph is not None else 0


class Accesses:
    """What operations of a graph read and write outside of all graphs, by the `id` of its handle.

    Calls of functions, loops and conditionals have the attribute `_read_only_resource_inputs`,
    which TensorFlow's automatic control dependencies set
    (tensorflow/python/framework/auto_control_deps.py). All other inputs count as written.

    Args:
        start: mark of the first operation.
        boundary: mark of the first update; `None` if there is none.
        foreign: keys that are left out: of the variables of another replica, whose body is in the
            graph after this one.

    Attributes:
        written: the handle of each resource that is written.
        late: of each resource that is accessed after the boundary, whether it is written there.
    """

    def __init__(self, graph: Any, start: int, boundary: int | None, foreign: Collection[int] = ()):
        self.written: dict[int, Any] = {}
        self.late: dict[int, bool] = {}
        captures: dict[int, dict[int, Any]] = {}
        for position, op in enumerate(graph.get_operations()[start:], start):
            resources = [i for i, t in enumerate(op.inputs) if t.dtype == tf.resource]
            if not resources or op.type.startswith("Collective"):
                continue  # resources that order collectives are not state of the model
            reads = resources if op.type in _READS else _read_only(op)
            for i in resources:
                handle = _outer(op.inputs[i], captures)
                key, writes = id(handle), i not in reads
                if handle is None or key in foreign:
                    continue
                if writes:
                    self.written[key] = handle
                if boundary is not None and position >= boundary:
                    self.late[key] = writes or self.late.get(key, False)

    def depend_on(self, updates: Any) -> bool:
        """Whether what is after the boundary depends on the updates in another graph: it accesses
        what they write, or writes what they read.
        """
        if not self.late:
            return False
        others = Accesses(updates, 0, 0).late
        return any(self.late[key] or others[key] for key in self.late.keys() & others.keys())


def _read_only(op: Any) -> Collection[int]:
    try:
        return op.get_attr("_read_only_resource_inputs")  # type: ignore[no-any-return]
    except ValueError:
        return ()


def _outer(tensor: Any, captures: dict[int, dict[int, Any]]) -> Any:
    """Return the eager tensor behind one of a nested graph, or `None`; `captures` is a cache."""
    while tensor is not None and not hasattr(tensor, "numpy"):
        graph = tensor.graph
        if id(graph) not in captures:
            pairs = getattr(graph, "captures", ())
            captures[id(graph)] = {id(inner): outer for outer, inner in pairs}
        tensor = captures[id(graph)].get(id(tensor))
    return tensor


_HIDDEN = ("Random", "Multinomial", "TruncatedNormal", "ParameterizedTruncatedNormal", "Print")
_CALLS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})


def has_hidden_state(graph: Any) -> bool:
    """Return whether a graph has operations with a random generator of their own, or that print or
    call Python. `FuncGraph._functions`, private to TensorFlow, has the functions within it.
    """
    found = {op.type for op in graph.get_operations()}
    for function in getattr(graph, "_functions", {}).values():
        found |= {node.op for node in function.definition.node_def}
    return any(kind in _CALLS or kind.startswith(_HIDDEN) for kind in found)


class Untracked:
    """A variable that the step writes and Keras does not track, known by its handle only."""

    def __init__(self, handle: Any, dtype: Any):
        self.handle, self.dtype, self.name = handle, dtype, "untracked variable"

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of its current value; a replay sums up the sizes of what it keeps."""
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
