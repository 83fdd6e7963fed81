"""Replays a step for a diagnosis on PyTorch.

To find the origin of a NaN or Inf, a `TorchDispatchMode` sees each operation of the run, those of
the backward pass included. Values are identified by their storage, because autograd creates new
tensors with the same storage. A storage that is written in place gets the origin of the new value.

One process replays a step of several without the communication of its modules.
`DistributedDataParallel` is replayed as the module that it wraps, which exchanges no gradients and
no buffers. Any other communication ends the replay with an exception before a message is sent,
because a training step of another process would answer it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import torch
import torch.distributed
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import TorchDispatchMode

from keras_nanguard._backends import interface
from keras_nanguard._backends.shared import instrument
from keras_nanguard._backends.shared.origins import Inputs, OriginTracker, is_finite, operand
from keras_nanguard._backends.shared.thread_overrides import ThreadOverrides
from keras_nanguard._backends.torch.host import place
from keras_nanguard._backends.torch.intercept import Intercept, Recorder
from keras_nanguard._backends.torch.optimizers import TorchOptimizer, unlisted_optimizers
from keras_nanguard._backends.torch.reductions import is_inexact
from keras_nanguard._backends.torch.state import (
    Modes,
    TorchModule,
    is_sharded,
    replaceable_buffers,
)
from keras_nanguard._backends.torch.undo_log import UndoLog, storage
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._backends.torch.watching import COMMUNICATING, RECORDED_WRITES, written_by
from keras_nanguard._core.observations import Origin
from keras_nanguard._keras import layers as keras_layers, variables as keras_variables

UNWRITTEN = ("empty", "resize", "set_")
"""Operations whose result is uninitialized memory."""

FILLING = ("full", "fill", "scalar_tensor", "lift_fresh", "masked_fill", "new_full")


class _Local(TorchDispatchMode):  # type: ignore[misc]
    """Runs steps in this thread without communication; raises a `RuntimeError` if they need it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COMMUNICATING:
            raise RuntimeError(
                f"the step communicates with other processes ({func.overloadpacket}), so one alone"
                " cannot replay it"
            )
        return func(*args, **(kwargs or {}))


def _unwrapped(real: Callable[..., Any], _: Any, wrapper: Any, *inputs: Any, **kwargs: Any) -> Any:
    if not wrapper.device_ids:
        return wrapper.module(*inputs, **kwargs)
    from torch.distributed.utils import _to_kwargs

    device = torch.device(wrapper.device_type, wrapper.device_ids[0])
    (inputs, *_), (kwargs, *_) = _to_kwargs(inputs, kwargs, device, False)
    return wrapper.module(*inputs, **kwargs)


_UNWRAPPED = ThreadOverrides(torch.nn.parallel.DistributedDataParallel, {"forward": _unwrapped})


class Instrument(instrument.Instrument):
    """Records layers and losses."""

    GRADIENTS = ThreadOverrides(  # `Tensor.backward` calls the first one
        torch.autograd, dict.fromkeys(("backward", "grad"), instrument.backward)
    )

    def _targets(self) -> list[tuple[Any, str, str]]:
        if not isinstance(self.model, TorchModule):
            return super()._targets()
        self._names = {id(module): name for name, module in self.model.of.named_modules()}
        return [(module, "forward", instrument.LAYER) for module in self.model.of.modules()]

    def _path(self, target: Any, role: str) -> str:
        if not isinstance(self.model, TorchModule):
            return super()._path(target, role)
        return self._names[id(target)] or self.model.name

    def _is_float(self, value: Any) -> bool:
        known = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
        return known and value.is_floating_point()

    def _identity(self, value: Any, passed: Callable[[Any], Any]) -> Any:
        return _Probe.apply(value, passed)


class _Probe(torch.autograd.Function):  # type: ignore[misc]
    """The identity; its gradient is passed to `passed`."""

    @staticmethod
    def forward(ctx: Any, value: Any, passed: Callable[[Any], Any]) -> Any:
        ctx.passed = passed
        return value.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Any) -> Any:
        return ctx.passed(upstream), None


class Origins(OriginTracker, TorchDispatchMode):  # type: ignore[misc]
    """Context that records every operation of this thread."""

    def __init__(self, *args: Any, **kwargs: Any):
        TorchDispatchMode.__init__(self)
        OriginTracker.__init__(self, *args, **kwargs)

    def of(self, tensor: Any) -> Origin | None:
        if not isinstance(tensor, torch.Tensor) or is_finite(tensor):
            return None
        return super().of(tensor)

    @staticmethod
    def number_of(variable: Any) -> int | None:
        return storage(getattr(variable, "value", variable))

    def _key(self, tensor: Any) -> int:
        return storage(tensor) if isinstance(tensor, torch.Tensor) else id(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = args, kwargs
        name = func.overloadpacket.__name__
        written = _floats(written_by(func, args, kwargs))
        pairs = _pairs(written, *given)
        # Of inputs that it may overwrite, what is known is read before: once, as many share a list.
        distinct = {id(inputs): inputs for _, inputs in pairs}
        known = {key: self._inputs(inputs) for key, inputs in distinct.items()}
        result = func(*args, **kwargs)
        self.count += 1
        if name.startswith(UNWRITTEN):
            return result
        views = {storage(t) for t in _floats(given) if not written}
        for output, inputs in pairs or _pairs(_floats(result), *given):
            number = storage(output)
            if is_finite(output):
                if number not in views:
                    self._lineage.pop(number, None)
            elif number not in views or number not in self._lineage:
                if id(inputs) not in known:
                    known[id(inputs)] = self._inputs(inputs)
                self._keep(output, self._origin(name, known[id(inputs)], output, given))
        return result

    def _origin(self, name: str, inputs: Inputs, bad: Any, given: Any) -> Origin:
        """Return the origin behind the bad result of an operation with these arguments."""
        name = name.removeprefix("_foreach_").rstrip("_")
        filled = name.startswith(FILLING)
        if filled:
            scalars = (a for a in keras.tree.flatten(given) if getattr(a, "ndim", 0) == 0)
            numbers = (np.float64(a) if isinstance(a, float) else a for a in scalars)
            filled = not all(map(is_finite, numbers))
        plain = [a for a in given[0] if isinstance(a, float) and not np.isfinite(a)]
        operands = (operand(torch.as_tensor(a, dtype=bad.dtype)) for a in plain)
        known = inputs._replace(operands=(*inputs.operands, *operands))
        return self._inherited(name, known, [bad], constant=filled or not inputs.parents)


def _floats(values: Any) -> list[Any]:
    """Return the float tensors in nested arguments or results."""
    found = [value for value in keras.tree.flatten(values) if isinstance(value, torch.Tensor)]
    strided = [t for t in found if t.layout == torch.strided and not t.is_meta]
    return list(filter(is_inexact, strided))


def _pairs(outputs: Sequence[Any], args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """Return each output with the inputs that it depends on: element by element if the operation
    takes lists of as many tensors.
    """
    values = (*args, *kwargs.values())
    alone = [a for a in values if isinstance(a, torch.Tensor)]
    lists = [a for a in values if isinstance(a, (list, tuple)) and a]
    lists = [a for a in lists if all(isinstance(item, torch.Tensor) for item in a)]
    if not lists or {len(a) for a in lists} != {len(outputs)}:
        inputs = _floats(values)
        return [(output, inputs) for output in outputs]
    return [(o, _floats([*together, *alone])) for o, together in zip(outputs, zip(*lists))]


def _binary_cross_entropy(real: Callable[..., Any], _: Any, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(real).bind(*args, **kwargs)
    given.apply_defaults()
    input, target, weight, *_, reduction = given.args
    if bool((torch.isfinite(input) & torch.isfinite(target)).all()):
        return real(*args, **kwargs)
    losses = -(
        target * input.log().clamp(min=-100) + (1 - target) * (1 - input).log().clamp(min=-100)
    )
    losses = losses if weight is None else losses * weight
    return losses if reduction == "none" else getattr(losses, reduction)()


def _total_norm(real: Callable[..., Any], _: Any, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(real).bind(*args, **kwargs)
    given.arguments["error_if_nonfinite"] = False
    return real(*given.args, **given.kwargs)


def _clipping() -> Iterator[tuple[Any, dict[str, Callable[..., Any]]]]:
    if hasattr(clip_grad, "_get_total_norm"):  # torch 2.6 and later
        yield clip_grad, {"_get_total_norm": _total_norm}


_WITHOUT_ERROR = ThreadOverrides(
    torch.nn.functional, {"binary_cross_entropy": _binary_cross_entropy}, _clipping
)


def _natives(variables: Iterable[Any]) -> tuple[Any, ...]:
    """Return the tensors of these variables."""
    values = (getattr(v, "value", v) for v in variables)
    return keras_variables.unique(v for v in values if isinstance(v, torch.Tensor))


def _undo_log(model: Any, optimizers: Iterable[Any], kept: Iterable[Any] = ()) -> UndoLog:
    """Return an undo log with these tensors, the buffers and modes of modules, and the state of all
    optimizers of torch, those in attributes of layers included.
    """
    undo_log = UndoLog(
        kept,
        is_replay=True,
        attributes=replaceable_buffers(model),
        restore_modes=Modes(model).restorer(),
    )
    layers = [] if model is None else keras_layers.layers_of(model)
    known = [o for o in optimizers if isinstance(o, TorchOptimizer)]
    for optimizer in (*known, *unlisted_optimizers(layers, known)):
        undo_log.keep_updated(optimizer, (), copies=True)
    return undo_log


@contextlib.contextmanager
def _undone(
    undo_log: UndoLog, variables: Iterable[Any], at_first: Callable[[Any], Any]
) -> Iterator[None]:
    """Restore all writes, and the gradients of these variables, at the end; `at_first`: returns
    with which gradient to begin in place of one.
    """
    holders = _natives(getattr(v, "of", v) for v in variables)  # whole tensors, not shards
    grads = [(tensor, tensor.grad) for tensor in holders]
    try:
        for tensor, grad in grads:
            tensor.grad = None if grad is None else at_first(grad)
        with RECORDED_WRITES.entered(undo_log):
            yield
    finally:
        for tensor, grad in grads:
            tensor.grad = grad
        undo_log.give_back(halfway=True)


class ReplayRecorder(Recorder):
    """Records losses and updates of a replay.

    Args:
        immediate: whether updates run at once.
    """

    def __init__(self, model: Any, immediate: bool):
        super().__init__(set(map(id, _natives(getattr(model, "trainable_variables", ())))))
        self._model, self._immediate = model, immediate

    def on_update(self, update: Update) -> Any:
        self.late_writes.begin()
        if not (self._immediate or update.evaluates):
            return None
        with self.late_writes.during(update):
            return update.run()[0]

    @property
    def records(self) -> tuple[Update, ...]:
        """The updates that were called."""
        return tuple(self.updates)

    @property
    def outputs(self) -> list[tuple[str, Any]]:
        """`(name, tensor)` of the outputs of the model."""
        return self.outputs_of(self._model)


class Replay(interface.Replay):
    """Replays a step and records its operations. A diagnosis always runs eagerly."""

    MODES = ("eager",)
    Origins = Origins
    Instrument = Instrument

    @contextlib.contextmanager
    def intercepted(
        self, model: Any, optimizers: Iterable[Any], immediate: bool
    ) -> Iterator[ReplayRecorder]:
        """Record what a step shows.

        Torch's binary cross-entropy raises if a prediction is NaN, and `clip_grad_norm_` can raise
        if a gradient is. A replay continues after them, so that the NaN can be traced.
        """
        recorder = ReplayRecorder(model, immediate)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_WITHOUT_ERROR.entered(recorder))
            recorder.watch(stack)
            stack.enter_context(Intercept(model, optimizers).recording(recorder))
            yield recorder

    @contextlib.contextmanager
    def preserved(
        self, variables: Sequence[Any], model: Any, optimizers: Iterable[Any]
    ) -> Iterator[None]:
        """Restore these variables, everything else that Keras writes, and torch's generators at the
        end; begin without gradients.
        """
        if is_sharded(variables):
            raise RuntimeError("the parameters are sharded, so one process alone cannot replay it")
        undo_log = _undo_log(model, optimizers, _natives(variables))
        with contextlib.ExitStack() as stack:
            stack.enter_context(_undone(undo_log, variables, lambda grad: None))
            if place()[1] > 1:
                stack.enter_context(_UNWRAPPED.entered(undo_log))
                stack.enter_context(_Local())
            yield

    @contextlib.contextmanager
    def restoring_side_effects(
        self, variables: Sequence[Any], model: Any, optimizers: Iterable[Any]
    ) -> Iterator[None]:
        # A step may use a gradient, and add to it in place.
        with _undone(_undo_log(model, optimizers), variables, lambda grad: grad.detach().clone()):
            yield

    def without_rows(self, value: Any, kept: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value[kept]
        if not isinstance(value, torch.Tensor):
            return value
        rows = torch.as_tensor(kept, device=value.device)
        if value.layout == torch.strided:
            return value[rows]
        taken = value.to_sparse_coo().index_select(0, rows)
        return taken if value.is_sparse else taken.to_sparse(layout=value.layout)

    def twin(self, variable: Any) -> Any:
        if not keras_variables.is_variable(variable):
            return None
        native = variable.value
        return torch.nn.Parameter(native.detach().float(), requires_grad=native.requires_grad)
