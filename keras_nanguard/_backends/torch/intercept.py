"""Intercepts the optimizer calls and the losses of a step on torch while its body runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from types import MethodType
from typing import Any

import keras
import torch

from keras_nanguard._backends.torch.modules import tensors_in
from keras_nanguard._backends.torch.reductions import is_inexact
from keras_nanguard._backends.torch.undo_log import with_subclasses
from keras_nanguard._backends.torch.updates import KerasUpdate, TorchUpdate, Update
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras.layers import named_outputs
from keras_nanguard._keras.losses import predicted
from keras_nanguard._keras.overrides import Overrides, ThreadOverrides

SOURCES = ("compute_loss", "scale", "backward")
"""Functions whose values are the losses of a step: of the first one that the step calls. Those of
the others are these losses once more, scaled, or parts of them.
"""


class Intercept:
    """Replaces the updates of optimizers and the loss computation of one model, and records what
    they are called with.

    With `body` it belongs to a compiled step and is used again in each run of it: torch would
    compile the step again if a function that it calls were another one. Two kinds of functions are
    not part of the compiled step. What records a call runs as plain Python, since it computes the
    verdict. An update of a Keras optimizer is compiled separately; one of a torch optimizer is not
    compiled, nor one of `LossScaleOptimizer`, which would be compiled again in each step, because
    it names an operation differently each time.

    Args:
        model: the model whose `compute_loss` is recorded, or `None`.
        body: a step to compile, as Keras does with `jit_compile=True`; `None` if it runs eagerly.
        roots: whether to note the losses of an eager step that does not call `compute_loss`.

    Attributes:
        compiled: the compiled step, or `None`.
        records: the calls of the optimizers, in order.
        noted: how many losses were noted.
    """

    records: list[Update]
    _losses: Mapping[str, list[Any]]
    _on_update: Callable[[Update], None]
    around_backward: Callable[[], AbstractContextManager[None]]

    def __init__(
        self,
        model: Any,
        optimizers: Iterable[Any],
        body: Callable[..., Any] | None = None,
        roots: bool = True,
    ):
        self.model = model
        self._notes_roots = roots and body is None
        self.compiled = None if body is None else torch.compile(body)
        optimizers = list(optimizers)
        self._replacements = [self._replacement(optimizer) for optimizer in optimizers]
        scaled = filter(keras_optimizers.is_loss_scaled, optimizers if self._notes_roots else ())
        self._replacements += [(o, "scale_loss", self._scaling(o.scale_loss)) for o in scaled]
        if hasattr(model, "compute_loss"):
            self._replacements.append((model, "compute_loss", self._noting(model.compute_loss)))
        self.release()

    @contextlib.contextmanager
    def running(
        self,
        on_update: Callable[[Update], None],
        around_backward: Callable[[], AbstractContextManager[None]],
    ) -> Iterator[Intercept]:
        """Record a step. `on_update` is called with each record in place of the update, and
        `around_backward` returns a context for each backward pass of an eager step.
        """
        self.release()
        self._on_update, self.around_backward = on_update, around_backward
        try:
            with contextlib.ExitStack() as stack:
                overrides = stack.enter_context(Overrides())
                for target, name, function in self._replacements:
                    overrides.set(target, name, function)
                if self._notes_roots:
                    BACKWARD_PASSES.enter(self)
                    stack.callback(BACKWARD_PASSES.leave, self)
                yield self
        finally:
            del self._on_update, self.around_backward  # they refer to the run of the step

    def release(self) -> None:
        """Release what the last step has recorded."""
        self.records, self._losses, self.noted = [], {name: [] for name in SOURCES}, 0
        self._predictions: list[Any] = []

    @property
    def losses(self) -> list[Any]:
        """The losses of the step, from the first of `SOURCES` that has any."""
        return next(filter(None, self._losses.values()), [])

    @property
    def is_scaled(self) -> bool:
        """Whether the losses are scaled."""
        return bool(self._losses["scale"])

    def note_losses(self, source: str, values: Any) -> None:
        """Note those of these values that are real scalars, each of which counts as a loss."""
        for tensor in tensors_in([values]):
            if tensor.numel() == 1 and tensor.is_floating_point():
                self._losses[source].append(tensor.detach())
                self.noted += 1

    @property
    def outputs(self) -> list[tuple[str, Any]]:
        """`(name, tensor)` of the model's outputs that `compute_loss` received."""
        flat = map(keras.tree.flatten, self._predictions)
        named = [pair for outputs in flat for pair in named_outputs(self.model, outputs)]
        tensors = [pair for pair in named if isinstance(pair[1], torch.Tensor)]
        return [pair for pair in tensors if is_inexact(pair[1])]

    def _excluded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that a compiled step calls without compiling it."""
        return function if self.compiled is None else torch.compiler.disable(function)

    def _replacement(self, optimizer: Any) -> tuple[Any, str, Callable[..., Any]]:
        """Return the object, the name of its method that updates, and what replaces it."""
        of_torch: Any = getattr(optimizer, "of", None)
        if of_torch is not None:
            return of_torch, "step", self._stepper(of_torch.step, optimizer)
        real = optimizer.apply
        if self.compiled is not None and not keras_optimizers.is_loss_scaled(optimizer):
            real = torch.compile(real)

        def apply(grads: Iterable[Any], trainable_variables: Any = None) -> Any:
            variables = () if trainable_variables is None else (list(trainable_variables),)
            self._take(KerasUpdate(optimizer, real, list(grads), *variables))

        return optimizer, "apply", self._excluded(apply)

    def _stepper(self, real: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
        @wraps(real)  # schedulers of torch mark the function
        def step(_: Any, closure: Any = None, **kwargs: Any) -> Any:
            args = () if closure is None else (closure,)
            has_closure = bool(args or kwargs)
            record = TorchUpdate(optimizer, partial(real, *args, **kwargs), has_closure)
            self._take(record)
            optimizer.of._opt_called = True  # schedulers of torch check this
            return record.result

        return MethodType(self._excluded(step), optimizer.of)  # a scheduler wraps its `__func__`

    def _scaling(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def scale_loss(loss: Any) -> Any:
            self.note_losses("scale", loss)
            return real(loss)

        return scale_loss

    def _noting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def note(loss: Any, args: Any, kwargs: Any) -> None:
            if loss is not None:
                is_tensor = isinstance(loss, torch.Tensor)
                loss = loss if is_tensor else keras.ops.convert_to_tensor(loss)
                self._losses["compute_loss"].append(loss)
                self.noted += 1
                self._predictions.append(predicted(args, kwargs))

        note = self._excluded(note)

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = real(*args, **kwargs)
            note(loss, args, kwargs)
            return loss

        return compute_loss

    def _take(self, record: Update) -> None:
        if not record.evaluates:
            self.records.append(record)
            self._on_update(record)
            return
        noted = {name: list(losses) for name, losses in self._losses.items()}
        self._on_update(record)
        record.has_trials = len(self._losses["backward"]) > len(noted["backward"]) + 1
        self.records.append(record)  # its gradients are known only now
        if isinstance(record.result, torch.Tensor):  # not the losses of its line search
            self._losses = noted
            self.note_losses("backward", record.result)


def _backward(
    real: Callable[..., Any], inside: Sequence[Intercept], tensors: Any, *args: Any, **kwargs: Any
) -> Any:
    if torch._C._current_graph_task_id() != -1:  # a part of another one, as in checkpointing
        return real(tensors, *args, **kwargs)
    with contextlib.ExitStack() as stack:
        for intercept in inside:
            intercept.note_losses("backward", tensors)
            stack.enter_context(intercept.around_backward())
        return real(tensors, *args, **kwargs)


def _scale(real: Callable[..., Any], inside: Sequence[Intercept], scaler: Any, outputs: Any) -> Any:
    for intercept in inside if scaler.is_enabled() else ():
        intercept.note_losses("scale", outputs)
    return real(scaler, outputs)


def _scalers() -> Iterator[tuple[type, dict[str, Callable[..., Any]]]]:
    for kind in with_subclasses(torch.amp.GradScaler):
        if "scale" in vars(kind):
            yield kind, {"scale": _scale}


BACKWARD_PASSES = ThreadOverrides(torch.autograd, {"backward": _backward}, _scalers)
"""The override through which an eager step shows which losses it differentiates: `Tensor.backward`
calls `torch.autograd.backward`. `torch.autograd.grad` is not overridden, because functions that
torch compiles or transforms (`torch.func`) call it.
"""
