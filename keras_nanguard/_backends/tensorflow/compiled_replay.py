"""Replays a step in its compiled mode and records its layers.

This finds faults that an eager replay does not show (a square root at 0 under XLA), by layer
instead of by operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_nanguard._backends import current
from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.instrument import LAYER, Call, layer_row
from keras_nanguard._backends.shared.origins import operand
from keras_nanguard._backends.shared.replay import OVERFLOW, ReplayableStep, ReplayResult
from keras_nanguard._core import finiteness
from keras_nanguard._core.evidence import COMPILE_LOSS, Origin
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._keras.train_state import TrainState

__all__ = ["run_compiled"]


def run_compiled(step: ReplayableStep, args: Sequence[Any], jit: bool) -> ReplayResult:
    """Compile a step, run it once, and return the result.

    Args:
        step: the step.
        args: its arguments.
        jit: whether to compile with XLA.
    """
    with step.preserved():
        return _Traced(step).run(args, jit)


class _Traced:
    """One trace of a step that returns the tensors of its layers."""

    def __init__(self, step: ReplayableStep):
        self.step = step
        self.train_state = TrainState.of(step.model, step.optimizers)

    def run(self, args: Sequence[Any], jit: bool) -> ReplayResult:
        compiled = tf.function(self._body, jit_compile=jit, autograph=False)
        try:
            traced = compiled.get_concrete_function(list(args))
            losses, gradients, statistics, tensors = traced(list(args))
        except Exception as error:  # noqa: BLE001  whatever the user's step raises is evidence, not a crash
            return ReplayResult(error=f"{type(error).__name__}: {error}")
        for call, (inputs, outputs, upstream, downstream) in zip(self.calls, tensors):
            call.inputs, call.outputs, call.gradients_out, call.gradients_in = (
                inputs,
                outputs,
                upstream,
                downstream,
            )
        rows = tuple(
            layer_row(c.path, c.layer_class, keras_variables.dense(t), _finite(c.inputs))
            for c in self.calls
            if c.role == LAYER
            for t in c.outputs
        )
        self.count = batches.row_count(args)
        self.batch = [part for part in batches.parts(args) if not _finite([part.value])]
        first, path, origin = self._judge(losses, gradients, statistics)
        return ReplayResult(
            first=first, first_path=path, origin=origin, loss=_sum(losses), rows=rows
        )

    def _body(self, args: list[Any]) -> Any:
        step, replay = self.step, current.replay()
        with (
            replay.Instrument(step.model, keep=True) as instrument,
            replay.intercepted(step.model, step.optimizers, step.keeps_undo) as seen,
        ):
            outputs = step.body(*args)
        losses = seen.losses or self.step.losses(outputs)
        graph = tf.compat.v1.get_default_graph()
        self.calls = instrument.calls
        self.paths = [v.path for record in seen.records for g, v in record.pairs if g is not None]
        gradients = [
            _values(g) for record in seen.records for g, _ in record.pairs if g is not None
        ]
        statistics = [v.value.read_value() for v in self.train_state.statistics]
        tensors = [
            tuple(
                _here(group, graph)
                for group in (c.inputs, c.outputs, c.gradients_out, c.gradients_in)
            )
            for c in self.calls
        ]
        return losses, gradients, statistics, tensors

    def _judge(
        self, losses: Any, gradients: Any, statistics: Any
    ) -> tuple[str, str, Origin | None]:
        if not _finite(losses):
            return "loss", "", self._forward("")
        for variable, value in zip(self.train_state.statistics, statistics):
            if id(variable) not in self.step.tolerated and not _finite([value]):
                return "statistics", variable.path, self._forward(variable.path.rpartition("/")[0])
        bad = [path for path, g in zip(self.paths, gradients) if not _finite([g])]
        if bad:
            return "gradients", bad[0], self._backward(bad)
        squares = [
            float(np.square(finiteness.widen(keras_variables.dense(g)).astype(np.float64)).sum())
            for g in gradients
        ]
        if sum(squares) >= OVERFLOW:
            return "gradients", self.paths[int(np.argmax(squares))], None
        return "", "", None

    def _forward(self, layer: str) -> Origin | None:
        """Return the first bad place in the forward pass: a call, else the statistics of this
        layer, else the loss.
        """
        for call in self.calls:
            if not _finite(call.outputs) and _finite(call.inputs):
                return _origin(call, call.phase, call.outputs, call.inputs, self.count)
        if self.batch:
            return Origin(0, "batch", self.batch[0].path, "forward")
        for call in self.calls:
            if layer and call.path == layer:
                return _origin(call, "forward", call.outputs, call.inputs, self.count)
        return Origin(0, "operation", "", "loss", culprit="loss")

    def _backward(self, bad: Sequence[str]) -> Origin | None:
        """Return the first bad layer in the backward pass: its incoming gradient is finite, its
        outgoing one is not.
        """
        for call in reversed(self.calls):
            if call.gradients_in and not _finite(call.gradients_in) and _finite(call.gradients_out):
                return _origin(call, "backward", call.gradients_in, call.inputs, self.count)
        for call in reversed(self.calls):
            if (
                not call.loss
                and _finite(call.gradients_out)
                and any(p.startswith(f"{call.path}/") for p in bad)
            ):
                return _origin(call, "backward", call.gradients_out, call.inputs, self.count)
        return None


def _origin(
    call: Call, phase: str, results: Sequence[Any], inputs: Sequence[Any], count: int
) -> Origin:
    arrays = [finiteness.widen(keras_variables.dense(t)) for t in results]
    counted = [finiteness.counts(a) for a in arrays]
    path = "" if call.path == COMPILE_LOSS else call.path
    return Origin(
        order=call.finished,
        source="operation",
        op="",
        phase=phase,
        frames=(call.path,),
        culprit=path or "loss",
        layer_class=call.layer_class,
        nan=sum(n for n, _, _ in counted),
        inf=sum(i for _, i, _ in counted),
        size=sum(s for _, _, s in counted),
        operands=tuple(operand(keras_variables.dense(t), str(t.dtype.name)) for t in inputs),
        rows=_rows(arrays, count),
    )


def _rows(arrays: Sequence[np.ndarray[Any, Any]], count: int) -> tuple[int, ...]:
    """Return the bad rows of the first array with one entry per row of the batch, none if all are
    bad.
    """
    for array in arrays:
        if array.ndim and count > 1 and array.shape[0] == count:
            wrong = ~np.isfinite(array).reshape(array.shape[0], -1).all(axis=1)
            if wrong.any() and not wrong.all():
                return tuple(int(i) for i in np.flatnonzero(wrong))
    return ()


def _here(tensors: Sequence[Any], graph: Any) -> list[Any]:
    return [_values(t) for t in tensors if getattr(_values(t), "graph", None) is graph]


def _values(tensor: Any) -> Any:
    return getattr(tensor, "values", tensor) if isinstance(tensor, tf.IndexedSlices) else tensor


def _finite(tensors: Sequence[Any]) -> bool:
    return all(finiteness.is_finite(keras_variables.dense(t)) for t in tensors)


def _sum(losses: Sequence[Any]) -> float:
    values = [keras_variables.dense(loss).astype(np.float64) for loss in losses]
    return float(sum(np.sum(value) for value in values)) if values else float("nan")
