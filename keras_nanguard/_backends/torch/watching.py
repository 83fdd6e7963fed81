"""What an eager step on torch shows while it runs, in its thread only.

- `RECORDED_WRITES`: what Keras, schedulers and gradient scalers write, for the undo logs.
- `CALLS`: backward passes, scaled losses, and updates of Keras optimizers that only its code knows,
  for the recorders.
- `LateWrites`: what it writes in place after its update, for instance a slow copy of the weights.
  From the first update on, a `TorchDispatchMode` sees each operation before it writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import keras
import torch
from torch.autograd.graph import increment_version
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from keras_nanguard._backends.shared.thread_overrides import ThreadOverrides
from keras_nanguard._backends.torch.optimizers import TorchOptimizer, tensors_in
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._keras.torch_tensors import local

COMMUNICATING = (
    *("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"),
    *("symm_mem", "_dtensor"),
)
"""Namespaces in which torch registers operations that communicate."""


def is_in_backward() -> bool:
    """Whether this thread is within a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes in place: tensors, and lists of them."""
    if not func._schema.is_mutable:
        return []
    return [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _keeping(keep: Callable[[UndoLog, Any], None]) -> Callable[..., Any]:
    """Return a replacement of a method that writes its object. It keeps the object first."""

    def write(
        real: Callable[..., Any], logs: list[UndoLog], target: Any, *args: Any, **kwargs: Any
    ) -> Any:
        for undo_log in logs:
            keep(undo_log, target)
        return real(target, *args, **kwargs)

    return write


def _initialize(real: Callable[..., Any], logs: list[UndoLog], variable: Any, value: Any) -> None:
    real(variable, value)
    for undo_log in logs:
        undo_log.note_created(variable)


def _with_subclasses(base: Any) -> list[Any]:
    """Return a class and all of its subclasses, each once."""
    found = {base: None}
    for kind in base.__subclasses__():
        found |= dict.fromkeys(_with_subclasses(kind))
    return list(found)


def where_defined(
    base: Any, functions: Mapping[str, Callable[..., Any]]
) -> Iterator[tuple[type, dict[str, Callable[..., Any]]]]:
    """Yield a class and its subclasses, each with those of these functions that it defines."""
    for kind in _with_subclasses(base):
        yield kind, {name: f for name, f in functions.items() if name in vars(kind)}


def _companions() -> Iterator[tuple[type, dict[str, Callable[..., Any]]]]:
    """Yield what writes schedulers and scalers, by class."""
    yield from where_defined(LRScheduler, {"step": _keeping(UndoLog.keep_scheduler)})
    methods = dict.fromkeys(("unscale_", "step", "update"), _keeping(UndoLog.keep_scaler))
    yield from where_defined(torch.amp.GradScaler, methods)


RECORDED_WRITES = ThreadOverrides(
    keras_variables.VARIABLE,
    {keras_variables.ASSIGN: _keeping(UndoLog.note), keras_variables.INITIALIZE: _initialize},
    _companions,
)
"""The override through which the undo logs record writes."""


def is_undone_as_a_whole() -> bool:
    """Whether an undo log around that of an eager step restores everything that it writes."""
    return len(RECORDED_WRITES.inside()) > 1


class LateWrites(TorchDispatchMode):  # type: ignore[misc]
    """Keeps each tensor that the code of a step writes in place, in the undo logs of this thread.

    Args:
        weights: the `id` of the weights of the step.

    Attributes:
        continues: whether an optimizer of weights has updated that only the body knows, or the step
            has communicated with other processes.
    """

    def __init__(self, weights: Container[int]) -> None:
        super().__init__()
        self._weights = weights
        self.continues = self._is_due = self._is_paused = False
        self._waiting: contextlib.ExitStack | None = None
        self._updating: Any = None

    def wait(self, stack: contextlib.ExitStack) -> None:
        """Wait for `begin`, or for an update by an optimizer that only the body knows; `stack`:
        ends the watch.
        """
        self._waiting = stack
        stack.callback(register_optimizer_step_pre_hook(self._before_torch_update).remove)

    def begin(self) -> None:
        """Begin to watch, unless it does already, or does not wait for it.

        Within a backward pass, whose hooks may update, it begins after the pass, at the end of
        which torch restores the modes with which it began.
        """
        self._is_due = is_in_backward()
        if self._is_due:
            return
        stack, self._waiting = self._waiting, None
        if stack is not None:
            stack.enter_context(self)

    @contextlib.contextmanager
    def around_backward(self) -> Iterator[None]:
        """Begin to watch after a backward pass if it should have begun within it."""
        try:
            yield
        finally:
            if self._is_due:
                self.begin()

    @contextlib.contextmanager
    def during(self, update: Update) -> Iterator[None]:
        """Do not watch an update inside of this context, unless it calls the user's code."""
        self._is_paused, self._updating = not update.has_hooks, update.of_torch
        try:
            yield
        finally:
            self._is_paused, self._updating = False, None

    def note_update(self) -> None:
        """Note that an optimizer updates."""
        if not self._is_paused:
            self.continues = True
            self.begin()

    def _before_torch_update(self, optimizer: Any, *_: Any) -> None:
        """Keep what an optimizer of torch is about to write that only the body knows, or that
        another one wraps. One of other tensors is part of the computation, as in meta-learning.
        """
        watched = [recorder.late_writes for recorder in CALLS.inside()]  # in this thread
        if self not in watched or optimizer is self._updating:
            return
        adapted = TorchOptimizer(optimizer, {})
        parameters = list(map(local, adapted.parameters))
        if any(id(parameter) in self._weights for parameter in parameters):
            self.note_update()
            has_begun = self._waiting is None or self._is_due
            for undo_log in RECORDED_WRITES.inside() if has_begun else ():
                undo_log.keep_updated(adapted, parameters, copies=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.continues = self.continues or func.namespace in COMMUNICATING
        # Gradients that a backward pass adds up are not kept.
        if not (self._is_paused or is_in_backward()):
            for tensor in map(local, tensors_in(written_by(func, args, kwargs))):
                for undo_log in RECORDED_WRITES.inside():
                    undo_log.keep_outside(tensor)
                if not tensor.is_inference():
                    increment_version(tensor)  # within a mode torch does not count `_foreach_add_`
        return func(*args, **kwargs)


def _backward(
    real: Callable[..., Any], inside: Sequence[Any], tensors: Any, *args: Any, **kwargs: Any
) -> Any:
    if is_in_backward():  # a part of another one, as in checkpointing
        return real(tensors, *args, **kwargs)
    with contextlib.ExitStack() as stack:
        for recorder in inside:
            if recorder.shows_losses:
                recorder.note_losses("backward", tensors)
                stack.enter_context(recorder.around_backward())
        return real(tensors, *args, **kwargs)


def _scale(real: Callable[..., Any], inside: Sequence[Any], scaler: Any, outputs: Any) -> Any:
    for recorder in inside if scaler.is_enabled() else ():
        if recorder.shows_losses:
            recorder.note_losses("scale", outputs)
    return real(scaler, outputs)


def _apply(real: Callable[..., Any], inside: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    for recorder in inside:
        recorder.late_writes.note_update()
    return real(*args, **kwargs)


def _scalers_and_optimizers() -> Iterator[tuple[type, Mapping[str, Callable[..., Any]]]]:
    yield from where_defined(torch.amp.GradScaler, {"scale": _scale})
    # That of a `LossScaleOptimizer` updates by its inner one. Torch has hooks for its own.
    kind = next(kind for kind in keras.optimizers.Optimizer.__mro__ if "apply" in vars(kind))
    yield kind, {"apply": _apply}


CALLS = ThreadOverrides(torch.autograd, {"backward": _backward}, _scalers_and_optimizers)
"""The override through which recorders see what only the code of an eager step calls:
`Tensor.backward` calls `torch.autograd.backward`. `torch.autograd.grad` is not overridden, because
functions that torch compiles or transforms (`torch.func`) call it.
"""
