"""Intercepts the optimizer calls and the losses of a step on torch while its body runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, wraps
from types import MethodType
from typing import Any

import keras
import torch

from keras_nanguard._backends.shared.thread_overrides import ThreadOverrides
from keras_nanguard._backends.torch.calls import Recorder
from keras_nanguard._backends.torch.optimizers import TorchOptimizer
from keras_nanguard._backends.torch.undo_log import where_defined
from keras_nanguard._backends.torch.updates import KerasUpdate, TorchUpdate
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras.losses import predicted
from keras_nanguard._keras.overrides import Overrides


class Intercept:
    """Replaces the updates of optimizers and the loss computation of one model by functions that
    call the recorder of the step that runs.

    With `body` it belongs to a compiled step and is used again in each run of it: torch would
    compile the step again if a function that it calls were another one. Two kinds of functions are
    not part of the compiled step. What records a call runs as plain Python, since it computes the
    verdict. An update of a Keras optimizer is compiled separately; one of a torch optimizer is not
    compiled, nor one of `LossScaleOptimizer`, which would be compiled again in each step, because
    it names an operation differently each time.

    Args:
        model: the model whose `compute_loss` is recorded, or `None`.
        body: a step to compile, as Keras does with `jit_compile=True`; `None` if it runs eagerly.
        notes_backward: whether to note the losses of an eager step that does not call
            `compute_loss`.

    Attributes:
        compiled: the compiled step, or `None`.
    """

    _recorder: Recorder

    def __init__(
        self,
        model: Any,
        optimizers: Iterable[Any],
        body: Callable[..., Any] | None = None,
        notes_backward: bool = True,
    ):
        self._notes_backward = notes_backward and body is None
        self.compiled = None if body is None else torch.compile(body)
        optimizers = list(optimizers)
        self._replacements = [self._replacement(optimizer) for optimizer in optimizers]
        if self._notes_backward:
            scaled = filter(keras_optimizers.is_loss_scaled, optimizers)
            self._replacements += [(o, "scale_loss", self._scaling(o.scale_loss)) for o in scaled]
        if hasattr(model, "compute_loss"):
            self._replacements.append((model, "compute_loss", self._noting(model.compute_loss)))

    @contextlib.contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Record the step that runs in this context."""
        self._recorder = recorder
        try:
            with contextlib.ExitStack() as stack:
                overrides = stack.enter_context(Overrides())
                for target, name, function in self._replacements:
                    overrides.set(target, name, function)
                if self._notes_backward:
                    stack.enter_context(BACKWARD_PASSES.entered(recorder))
                yield
        finally:
            del self._recorder  # it refers to the run of the step

    def _excluded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that a compiled step calls without compiling it."""
        return function if self.compiled is None else torch.compiler.disable(function)

    def _replacement(self, optimizer: Any) -> tuple[Any, str, Callable[..., Any]]:
        """Return the object, the name of its method that updates, and what replaces it."""
        if isinstance(optimizer, TorchOptimizer):
            return optimizer.of, "step", self._stepper(optimizer.of.step, optimizer)
        real = optimizer.apply
        if self.compiled is not None and not keras_optimizers.is_loss_scaled(optimizer):
            real = torch.compile(real)

        def apply(grads: Iterable[Any], trainable_variables: Any = None) -> Any:
            variables = () if trainable_variables is None else (list(trainable_variables),)
            self._recorder.update(KerasUpdate(optimizer, real, list(grads), *variables))

        return optimizer, "apply", self._excluded(apply)

    def _stepper(self, real: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
        @wraps(real)  # schedulers of torch mark the function
        def step(_: Any, closure: Any = None, **kwargs: Any) -> Any:
            args = () if closure is None else (closure,)
            has_closure = bool(args or kwargs)
            update = TorchUpdate(optimizer, partial(real, *args, **kwargs), has_closure)
            result = self._recorder.update(update)
            optimizer.of._opt_called = True  # schedulers of torch check this
            return result

        return MethodType(self._excluded(step), optimizer.of)  # a scheduler wraps its `__func__`

    def _scaling(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def scale_loss(loss: Any) -> Any:
            self._recorder.note_losses("scale", loss)
            return real(loss)

        return scale_loss

    def _noting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def note(loss: Any, args: Any, kwargs: Any) -> None:
            if loss is not None:
                is_tensor = isinstance(loss, torch.Tensor)
                loss = loss if is_tensor else keras.ops.convert_to_tensor(loss)
                self._recorder.note_loss_of_model(loss, predicted(args, kwargs))

        note = self._excluded(note)

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = real(*args, **kwargs)
            note(loss, args, kwargs)
            return loss

        return compute_loss


def _backward(
    real: Callable[..., Any], inside: Sequence[Recorder], tensors: Any, *args: Any, **kwargs: Any
) -> Any:
    if torch._C._current_graph_task_id() != -1:  # a part of another one, as in checkpointing
        return real(tensors, *args, **kwargs)
    with contextlib.ExitStack() as stack:
        for recorder in inside:
            recorder.note_losses("backward", tensors)
            stack.enter_context(recorder.around_backward())
        return real(tensors, *args, **kwargs)


def _scale(real: Callable[..., Any], inside: Sequence[Recorder], scaler: Any, outputs: Any) -> Any:
    for recorder in inside if scaler.is_enabled() else ():
        recorder.note_losses("scale", outputs)
    return real(scaler, outputs)


BACKWARD_PASSES = ThreadOverrides(
    torch.autograd,
    {"backward": _backward},
    partial(where_defined, torch.amp.GradScaler, {"scale": _scale}),
)
"""The override through which an eager step shows which losses it differentiates: `Tensor.backward`
calls `torch.autograd.backward`. `torch.autograd.grad` is not overridden, because functions that
torch compiles or transforms (`torch.func`) call it.
"""
