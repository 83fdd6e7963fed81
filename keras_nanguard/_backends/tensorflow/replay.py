"""Replays a step for a diagnosis on TensorFlow: eagerly, or in its compiled mode.

A compiled replay finds faults that an eager one does not show (a square root at 0 under XLA), by
layer instead of by operation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from keras_nanguard._backends import interface
from keras_nanguard._backends.shared import batches, instrument
from keras_nanguard._backends.shared.instrument import LAYER, Call, layer_row
from keras_nanguard._backends.shared.origins import bad_rows, operand
from keras_nanguard._backends.shared.replay import (
    ReplayableStep,
    ReplayResult,
    first_bad,
    total,
)
from keras_nanguard._backends.tensorflow.intercept import Intercept, Seen
from keras_nanguard._backends.tensorflow.origins import Origins
from keras_nanguard._core import finiteness
from keras_nanguard._core.evidence import COMPILE_LOSS, Origin
from keras_nanguard._keras import (
    optimizers as keras_optimizers,
    sparse_arrays,
    variables as keras_variables,
)
from keras_nanguard._keras.overrides import ThreadOverrides
from keras_nanguard._keras.train_state import TrainState


class Instrument(instrument.Instrument):
    """Records layers and losses in eager execution, or in the graph that is being built."""

    def _begin(self) -> None:
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        _GRADIENTS.enter(self)

    def _end(self) -> None:
        _GRADIENTS.leave(self)

    def _here(self) -> bool:
        if self.graph is None:
            return bool(tf.executing_eagerly())
        return not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is self.graph

    def _is_float(self, value: Any) -> bool:
        return isinstance(value, tf.Tensor) and bool(value.dtype.is_floating)

    def _tensor_of(self, variable: Any) -> Any:
        return tf.convert_to_tensor(variable.value)

    def _identity(self, value: Any, passed: Callable[[Any], Any]) -> Any:
        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def identity(x: Any) -> Any:
            return tf.identity(x), passed

        return identity(value)


def _gradient(
    real: Callable[..., Any], running: Sequence[Instrument], *args: Any, **kwargs: Any
) -> Any:
    return running[-1].differentiate(real, *args, **kwargs)


_GRADIENTS = ThreadOverrides(tf.GradientTape, {"gradient": _gradient})


class Replay(interface.Replay):
    """Replays a step and records its operations."""

    Origins = Origins
    Instrument = Instrument

    @contextlib.contextmanager
    def intercepted(self, model: Any, optimizers: Iterable[Any], immediate: bool) -> Iterator[Seen]:
        """Record losses and updates on one replica; `immediate`: updates run at once."""
        alone = keras_optimizers.without_strategy(optimizers, tf.distribute.get_strategy())
        seen = Seen()
        notes = Intercept(model, optimizers, immediate, lambda variable: None, lambda: seen)
        with alone, notes, notes.creating():
            yield seen

    @contextlib.contextmanager
    def preserved(self, variables: Sequence[Any]) -> Iterator[None]:
        """Restore these variables, and the generator of eager operations without a seed, at the
        end.

        Inside the context a variable with a copy per replica is that of the first replica, so no
        other replica is needed or changed.
        """
        natives = [part for v in map(keras_variables.native, variables) for part in _copies(v)]
        natives = [v for v in natives if hasattr(v, "assign")]
        old = [v.read_value() for v in natives]
        drawn = getattr(context.context(), "_rng", None)
        stream = drawn.getstate() if drawn is not None else None
        try:
            with keras_variables.on_first_replica(variables):
                yield
        finally:
            for variable, value in zip(natives, old):
                variable.assign(value)
            if drawn is not None and stream is not None:
                drawn.setstate(stream)

    def without_rows(self, value: Any, kept: Any) -> Any:
        if isinstance(value, tf.SparseTensor):
            return tf.SparseTensor(*sparse_arrays.gathered(value, np.asarray(kept)))
        return tf.gather(value, kept)

    def twin(self, variable: Any) -> Any:
        native = getattr(variable, "value", None)
        if not isinstance(native, tf.Variable):
            return None
        return tf.Variable(tf.cast(native, tf.float32), trainable=native.trainable)

    def run_compiled(self, step: ReplayableStep, args: Sequence[Any], jit: bool) -> ReplayResult:
        with step.preserved():
            return _CompiledPass(step).run(args, jit)


def _copies(variable: Any) -> Sequence[Any]:
    return getattr(variable, "values", (variable,))  # type: ignore[no-any-return]


class _CompiledPass:
    """One replay in compiled mode, whose trace returns the tensors of all layers.

    It is its own tracker of origins: that of a bad value is the first layer with a bad result of
    finite inputs.
    """

    def __init__(self, step: ReplayableStep):
        self.step, self.replay = step, Replay()
        statistics = TrainState.of(step.model, step.optimizers).statistics
        self.statistics = [v for v in statistics if id(v) not in step.tolerated]

    def run(self, args: Sequence[Any], jit: bool) -> ReplayResult:
        """Run the step; return its result."""
        compiled = tf.function(self._body, jit_compile=jit, autograph=False)
        try:
            traced = compiled.get_concrete_function(list(args))
            losses, gradients, statistics, tensors = traced(list(args))
        except Exception as error:  # noqa: BLE001  whatever the user's step raises is evidence, not a crash
            return ReplayResult(error=f"{type(error).__name__}: {error}")
        for call, found in zip(self.calls, tensors):
            call.inputs, call.outputs, call.gradients_out, call.gradients_in = found
        rows = tuple(
            layer_row(c.path, c.layer_class, keras_variables.dense(t), _finite(c.inputs))
            for c in self.calls
            if c.role == LAYER
            for t in c.outputs
        )
        self.count = batches.row_count(args)
        self.batch = [part for part in batches.parts(args) if not _finite([part.value])]
        pairs = list(zip(gradients, self.paths))
        self.bad = [path for gradient, path in pairs if not _finite([gradient])]
        first, path, origin = first_bad(losses, pairs, zip(self.statistics, statistics), self)
        return ReplayResult(
            first=first, first_path=path, origin=origin, loss=total(losses), rows=rows
        )

    def _body(self, args: list[Any]) -> Any:
        step = self.step
        with (
            Instrument(step.model, keep=True) as recorded,
            self.replay.intercepted(step.model, step.optimizers, step.keeps_undo) as seen,
        ):
            outputs = step.body(*args)
        losses = seen.losses or step.losses(outputs)
        graph, self.calls = tf.compat.v1.get_default_graph(), recorded.calls
        pairs = [(g, v.path) for r in seen.records for g, v in r.pairs if g is not None]
        self.paths = [path for _, path in pairs]
        statistics = [v.value.read_value() for v in self.statistics]
        groups = [(c.inputs, c.outputs, c.gradients_out, c.gradients_in) for c in self.calls]
        tensors = [tuple(_of_graph(graph, tensors) for tensors in group) for group in groups]
        return losses, [_values(gradient) for gradient, _ in pairs], statistics, tensors

    def of(self, loss: Any, layer: str = "") -> Origin | None:
        """Return the first bad place in the forward pass: a call, else this layer, else the
        loss.
        """
        for call in self.calls:
            if not _finite(call.outputs) and _finite(call.inputs):
                return self._origin(call, call.phase, call.outputs)
        if self.batch:
            return Origin(0, "batch", self.batch[0].path, "forward")
        for call in self.calls:
            if layer and call.path == layer:
                return self._origin(call, "forward", call.outputs)
        return Origin(0, "operation", "", "loss", culprit="loss")

    def written(self, variable: Any) -> Origin | None:
        """Return the origin of a bad statistic."""
        return self.of(None, variable.path.rpartition("/")[0])

    def of_gradient(self, gradient: Any) -> Origin | None:
        """Return the first bad layer in the backward pass: its incoming gradient is finite, its
        outgoing one is not.
        """
        for call in reversed(self.calls):
            if call.gradients_in and not _finite(call.gradients_in) and _finite(call.gradients_out):
                return self._origin(call, "backward", call.gradients_in)
        for call in reversed(self.calls):
            own = any(path.startswith(f"{call.path}/") for path in self.bad)
            if own and not call.loss and _finite(call.gradients_out):
                return self._origin(call, "backward", call.gradients_out)
        return None

    def _origin(self, call: Call, phase: str, results: Sequence[Any]) -> Origin:
        arrays = [finiteness.widen(keras_variables.dense(t)) for t in results]
        nan, inf, size = map(sum, zip((0, 0, 0), *map(finiteness.counts, arrays)))
        path = "" if call.path == COMPILE_LOSS else call.path
        rows = (bad_rows(array, self.count)[0] for array in arrays if self.count > 1)
        return Origin(
            order=call.finished,
            source="operation",
            op="",
            phase=phase,
            frames=(call.path,),
            culprit=path or "loss",
            layer_class=call.layer_class,
            nan=nan,
            inf=inf,
            size=size,
            operands=tuple(operand(keras_variables.dense(t), t.dtype.name) for t in call.inputs),
            rows=next(filter(None, rows), ()),
        )


def _of_graph(graph: Any, tensors: Sequence[Any]) -> list[Any]:
    return [t for t in map(_values, tensors) if getattr(t, "graph", None) is graph]


def _values(tensor: Any) -> Any:
    return tensor.values if isinstance(tensor, tf.IndexedSlices) else tensor


def _finite(tensors: Sequence[Any]) -> bool:
    return all(finiteness.is_finite(keras_variables.dense(t)) for t in tensors)
