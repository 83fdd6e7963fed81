"""Replays a step for a diagnosis on PyTorch.

One process replays a step of several without the communication of its modules.
`DistributedDataParallel` is replayed as the module that it wraps, which exchanges no gradients and
no buffers. Any other communication ends the replay with an exception before a message is sent,
because a training step of another process would answer it.
"""

from __future__ import annotations

import contextlib
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
from keras_nanguard._backends.torch.host import place
from keras_nanguard._backends.torch.intercept import Intercept
from keras_nanguard._backends.torch.modules import TorchModule, loose_optimizers
from keras_nanguard._backends.torch.origins import Origins
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._backends.torch.updates import Update, UpdateQueue, Watch
from keras_nanguard._keras import layers as keras_layers, variables as keras_variables
from keras_nanguard._keras.overrides import ThreadOverrides

NAMESPACES = (
    *("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"),
    *("symm_mem", "_dtensor"),
)
"""Namespaces in which torch registers operations that communicate."""


class _Local(TorchDispatchMode):  # type: ignore[misc]
    """Raises instead of running an operation that communicates."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        if func.namespace in NAMESPACES:
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


@contextlib.contextmanager
def locally() -> Iterator[None]:
    """Run steps in this thread without communication; raise a `RuntimeError` if they need it."""
    if place()[1] == 1:
        yield
        return
    entered = object()
    _UNWRAPPED.enter(entered)
    try:
        with _Local():
            yield
    finally:
        _UNWRAPPED.leave(entered)


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


def _binary_cross_entropy(
    real: Any,
    _: Any,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    if bool((torch.isfinite(input) & torch.isfinite(target)).all()):
        return real(input, target, weight, size_average, reduce, reduction)
    losses = -(
        target * input.log().clamp(min=-100) + (1 - target) * (1 - input).log().clamp(min=-100)
    )
    losses = losses if weight is None else losses * weight
    return losses if reduction == "none" else getattr(losses, reduction)()


def _total_norm(
    real: Callable[..., Any],
    _: Any,
    tensors: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *more: Any,
    **kwargs: Any,
) -> Any:
    return real(tensors, norm_type, False, *more, **kwargs)


_WITHOUT_ERROR = [
    ThreadOverrides(torch.nn.functional, {"binary_cross_entropy": _binary_cross_entropy})
]
if hasattr(clip_grad, "_get_total_norm"):  # torch 2.6 and later
    _WITHOUT_ERROR.append(ThreadOverrides(clip_grad, {"_get_total_norm": _total_norm}))


def _log(kept: Iterable[Any]) -> UndoLog:
    return UndoLog(kept, (), note_created=lambda variable: None)


def _tensors(variables: Iterable[Any]) -> list[Any]:
    """Return the tensors of these variables."""
    values = (getattr(v, "value", v) for v in variables)
    return keras_variables.unique(v for v in values if isinstance(v, torch.Tensor))


@contextlib.contextmanager
def _without_gradients(tensors: Sequence[Any]) -> Iterator[None]:
    """Begin without the gradients of these tensors, which are restored at the end."""
    grads = [(tensor, tensor.grad) for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, grad in grads:
            tensor.grad = grad


class Replay(interface.Replay):
    """Replays a step and records its operations. A diagnosis always runs eagerly."""

    MODES = ("eager",)
    Origins = Origins
    Instrument = Instrument

    @contextlib.contextmanager
    def intercepted(
        self, model: Any, optimizers: Iterable[Any], immediate: bool
    ) -> Iterator[Intercept]:
        """Record losses and updates; `immediate`: updates run at once.

        Torch's binary cross-entropy raises if a prediction is NaN, and `clip_grad_norm_` can raise
        if a gradient is. A replay continues after them, so that the NaN can be traced.
        """
        queue = UpdateQueue(_log(()), ())

        def on_update(record: Update) -> None:
            if immediate or record.is_immediate:
                queue.run(record, keep=False)
            watch.begin()

        with contextlib.ExitStack() as stack:
            watch = Watch(queue, stack)
            for overrides in _WITHOUT_ERROR:
                overrides.enter(queue)
                stack.callback(overrides.leave, queue)
            watch.begin_with_unknown()
            yield stack.enter_context(Intercept(model, optimizers).running(on_update))

    @contextlib.contextmanager
    def preserved(self, variables: Sequence[Any]) -> Iterator[None]:
        """Restore these variables, everything else that Keras writes, and torch's generators at the
        end; leave no gradient.
        """
        if any(getattr(v, "of", v.value) is not v.value for v in variables if hasattr(v, "value")):
            raise RuntimeError("the parameters are sharded, so one process alone cannot replay it")
        natives = _tensors(variables)
        undo_log = _log(natives)
        try:
            with _without_gradients(natives), undo_log, locally():
                yield
        finally:
            undo_log.give_back(unseen=True)

    @contextlib.contextmanager
    def undone(self, variables: Sequence[Any]) -> Iterator[None]:
        natives, undo_log = _tensors(variables), _log(())
        undo_log.writers |= dict.fromkeys(map(id, natives))  # which it need not keep
        try:
            with _without_gradients(natives), undo_log:
                yield
        finally:
            undo_log.give_back(unseen=True)

    def held(self, model: Any, optimizers: Iterable[Any]) -> list[Callable[[], None]]:
        layers = [] if model is None else keras_layers.layers_of(model)
        known = [optimizer for optimizer in optimizers if hasattr(optimizer, "held")]
        return [o.held() for o in (*known, *loose_optimizers(layers, known))]

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
        if not isinstance(variable, keras.Variable):
            return None
        native = variable.value
        return torch.nn.Parameter(native.detach().float(), requires_grad=native.requires_grad)
