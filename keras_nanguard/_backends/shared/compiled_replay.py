"""Replays a step in its compiled mode, whose trace returns the tensors of all layers.

This finds faults that an eager replay does not show (a square root at 0 under XLA), by layer
instead of by operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_nanguard._backends import current
from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.instrument import LAYER, Call, layer_row
from keras_nanguard._backends.shared.origins import bad_rows, operand
from keras_nanguard._backends.shared.replay import ReplayableStep, ReplayResult, first_bad, total
from keras_nanguard._core import finiteness
from keras_nanguard._core.evidence import COMPILE_LOSS, Origin
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._keras.train_state import TrainState


def run_compiled(step: ReplayableStep, args: Sequence[Any], jit: bool) -> ReplayResult:
    """Run a step once in its compiled mode, without side effects; return its result.

    The program that returns the tensors of all layers may be finite although the one of training is
    not. The result is then that of the latter, without layers.

    Args:
        step: the step.
        args: its arguments.
        jit: whether to compile with XLA.
    """
    with step.preserved():
        run = _CompiledPass(step).run(args, jit)
    return step.rerun(args) if run.finite and step.judged is not None else run


class _CompiledPass:
    """One replay in compiled mode.

    It is its own tracker of origins: the origin of a bad value is the first layer with finite
    inputs and a bad result.
    """

    def __init__(self, step: ReplayableStep):
        self.step = step
        statistics = TrainState.of(step.model, step.optimizers).statistics
        self.statistics = [v for v in statistics if id(v) not in step.tolerated]

    def run(self, args: Sequence[Any], jit: bool) -> ReplayResult:
        """Run the step; return its result."""
        try:
            losses, gradients, statistics, tensors = current.replay().compiled(
                self._body, self.step, args, jit
            )
        except Exception as error:  # noqa: BLE001  an exception of the user's step is evidence
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

    def _body(self, args: Sequence[Any]) -> Any:
        """Run the step in the trace.

        Returns:
            Losses, gradients, statistics, and of each call its inputs, outputs, and the gradients
            by its outputs and inputs.
        """
        step, replay = self.step, current.replay()
        with (
            replay.Instrument(step.model, keep=True) as recorded,
            replay.intercepted(step.model, step.optimizers, step.keeps_undo) as seen,
        ):
            outputs = step.body(*args)
        losses, self.calls = seen.losses or step.losses(outputs), recorded.calls
        pairs = [(g, v.path) for r in seen.records for g, v in r.pairs if g is not None]
        self.paths = [path for _, path in pairs]
        groups = ((c.inputs, c.outputs, c.gradients_out, c.gradients_in) for c in self.calls)
        tensors = [tuple(map(recorded.returned, group)) for group in groups]
        gradients = recorded.returned(gradient for gradient, _ in pairs)
        return losses, gradients, list(map(recorded.tensor_of, self.statistics)), tensors

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


def _finite(tensors: Sequence[Any]) -> bool:
    return all(finiteness.is_finite(keras_variables.dense(t)) for t in tensors)
