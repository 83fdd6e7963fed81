"""Replays a step for a diagnosis on TensorFlow, and finds the origin of NaN and Inf.

TensorFlow reports each operation through `tensorflow.python.framework.op_callbacks`, on which
`tf.debugging` is built. It has no public name. Without it, only the layer table is available
(`keras_nanguard._backends.shared.instrument`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from keras_nanguard._backends import interface
from keras_nanguard._backends.shared import instrument
from keras_nanguard._backends.shared.origins import CONSTANT, OriginTracker, is_finite
from keras_nanguard._backends.shared.replay import ReplayableStep
from keras_nanguard._backends.shared.thread_overrides import ThreadOverrides
from keras_nanguard._backends.tensorflow.intercept import Intercept, StepRecord
from keras_nanguard._core.observations import Origin
from keras_nanguard._keras import (
    arrays as keras_arrays,
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.all_or_none import finish

try:
    from tensorflow.python.framework import op_callbacks
except ImportError:
    op_callbacks = None

Frames = list[tuple[str, str]]


class Origins(OriginTracker):
    """Context that records every eager operation of this thread; keys are the ids of handles."""

    available = op_callbacks is not None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._forward: dict[int, Frames] = {}
        self._derived: dict[int, Frames] = {}

    def __enter__(self) -> Origins:
        if self.available:
            op_callbacks.add_op_callback(self._seen)
        return self

    def __exit__(self, *details: Any) -> None:
        if self.available:
            op_callbacks.remove_op_callback(self._seen)

    @staticmethod
    def number_of(variable: Any) -> int | None:
        handle = getattr(getattr(variable, "value", variable), "handle", None)
        return None if handle is None else int(handle._id)

    def _key(self, tensor: Any) -> int:
        """Return the number of a tensor of TensorFlow, which counts them, or of an array."""
        number = getattr(getattr(tensor, "values", tensor), "_id", None)
        return id(tensor) if number is None else int(number)

    def _seen(
        self,
        op_type: Any,
        inputs: Sequence[Any],
        attrs: Any,
        outputs: Any,
        op_name: Any = None,
        graph: Any = None,
    ) -> None:
        if graph is not None or isinstance(outputs, tf.Tensor):
            return
        self.count += 1
        bad = [t for t in outputs if not is_finite(t)]
        frames = self._note_frames(inputs, outputs)
        name = op_type.decode() if isinstance(op_type, bytes) else str(op_type)
        if name == "ReadVariableOp" and inputs[0]._id in self._variables:
            self._variables[outputs[0]._id] = self._variables[inputs[0]._id]
        if not bad:
            if not outputs and name.startswith("Assign") and len(inputs) == 2:
                self._assigned(name, inputs)
            return
        before, self.frames = self.frames, frames
        origin = self._origin(name, inputs, bad)
        self.frames = before
        for tensor in bad:
            self._keep(tensor, origin)

    def _note_frames(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Frames:
        """Return the layers of an operation; in the backward pass, in which TensorFlow's tape
        interleaves branches, those whose forward values it uses.
        """
        if self.phase != "backward":
            self._forward.update((t._id, list(self.frames)) for t in outputs)
            return self.frames
        made = [t._id for t in inputs if t._id in self._forward]
        derived = [t._id for t in inputs if t._id in self._derived]
        if made:
            frames = self._forward[max(made)]
        elif derived:
            frames = self._derived[max(derived)]
        else:
            return self.frames
        if len(made) + len(derived) + sum(not len(t.shape) for t in inputs) >= len(inputs):
            self._derived.update((t._id, frames) for t in outputs)
        return frames

    def _assigned(self, name: str, inputs: Sequence[Any]) -> None:
        handle, value = inputs
        origin = self._lineage.get(value._id)
        if origin is not None:
            self._lineage[handle._id] = origin
        elif name == "AssignVariableOp":
            self._lineage.pop(handle._id, None)

    def _origin(self, name: str, inputs: Sequence[Any], bad: Sequence[Any]) -> Origin:
        """Return the origin behind the bad results of an operation."""
        for number in (t._id for t in inputs if t.dtype == tf.resource):
            known = number in self._lineage or number in self._tolerated
            if number in self._variables and not known:
                self._lineage[number] = self._add(self._variables[number], bad[0])
        return self._inherited(name, self._inputs(inputs), bad, name in ("Fill", "Const"))

    def _parent(self, tensor: Any) -> Origin | None:
        if tensor.dtype != tf.resource:
            return super()._parent(tensor)
        tolerated = CONSTANT if tensor._id in self._tolerated else None
        return self._lineage.get(tensor._id, tolerated)


class Instrument(instrument.Instrument):
    """Records layers and losses in eager execution, or in the graph that is being built."""

    GRADIENTS = ThreadOverrides(tf.GradientTape, {"gradient": instrument.backward})

    def _begin(self) -> None:
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def _here(self) -> bool:
        if self.graph is None:
            return bool(tf.executing_eagerly())
        return not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is self.graph

    def _is_float(self, value: Any) -> bool:
        return isinstance(value, tf.Tensor) and bool(value.dtype.is_floating)

    def tensor_of(self, variable: Any) -> Any:
        return tf.convert_to_tensor(variable.value)

    def returned(self, tensors: Iterable[Any]) -> list[Any]:
        found = [t.values if isinstance(t, tf.IndexedSlices) else t for t in tensors]
        return [t for t in found if getattr(t, "graph", None) is self.graph]

    def _identity(self, value: Any, passed: Callable[[Any], Any]) -> Any:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def identity(x: Any) -> Any:
            return tf.identity(x), passed

        return identity(value)


class Replay(interface.Replay):
    """Replays a step and records its operations."""

    Origins = Origins
    Instrument = Instrument

    @contextlib.contextmanager
    def intercepted(
        self, model: Any, optimizers: Iterable[Any], immediate: bool
    ) -> Iterator[StepRecord]:
        """Record losses and updates on one replica; `immediate`: updates run at once."""
        alone = keras_optimizers.without_strategy(optimizers, tf.distribute.get_strategy())
        notes = Intercept(model, optimizers, immediate)
        with alone, notes, notes.creating():
            yield notes.seen()

    @contextlib.contextmanager
    def preserved(
        self, variables: Sequence[Any], model: Any, optimizers: Iterable[Any]
    ) -> Iterator[None]:
        """Restore these variables, and the eager generator without a seed, at the end.

        Inside, each variable is its copy on the first replica: no other one is needed or changed.
        """
        natives = map(keras_variables.native, variables)
        copies = [copy for v in natives for copy in getattr(v, "values", (v,))]  # one per replica
        copies = [v for v in copies if hasattr(v, "assign")]
        old = [v.read_value() for v in copies]
        try:
            with (
                self.restoring_side_effects(variables, model, optimizers),
                keras_variables.on_first_replica(variables),
            ):
                yield
        finally:
            finish(partial(v.assign, value) for v, value in zip(copies, old))

    @contextlib.contextmanager
    def restoring_side_effects(
        self, variables: Sequence[Any], model: Any, optimizers: Iterable[Any]
    ) -> Iterator[None]:
        drawn = getattr(context.context(), "_rng", None)
        stream = drawn.getstate() if drawn is not None else None
        try:
            yield
        finally:
            if drawn is not None and stream is not None:
                drawn.setstate(stream)

    def without_rows(self, value: Any, kept: Any) -> Any:
        if isinstance(value, tf.SparseTensor):
            return tf.SparseTensor(*keras_arrays.gathered(value, np.asarray(kept)))
        return tf.gather(value, kept)

    def twin(self, variable: Any) -> Any:
        native = getattr(variable, "value", None)
        if not isinstance(native, tf.Variable):
            return None
        return tf.Variable(tf.cast(native, tf.float32), trainable=native.trainable)

    def compiled(
        self, function: Callable[..., Any], step: ReplayableStep, args: Sequence[Any], jit: bool
    ) -> Any:
        return tf.function(function, jit_compile=jit, autograph=False)(list(args))
