"""Keeps what a step on torch writes in place after an update, outside of its train state.

A step may continue after its update, for instance with a slow copy of the weights. From the first
update on, a `TorchDispatchMode` sees each operation before it writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import keras
import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from keras_nanguard._backends.shared.thread_overrides import ThreadOverrides
from keras_nanguard._backends.torch.modules import tensors_in
from keras_nanguard._backends.torch.optimizers import TorchOptimizer
from keras_nanguard._backends.torch.undo_log import RECORDED_WRITES
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._keras.torch_tensors import local

COMMUNICATING = (
    *("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"),
    *("symm_mem", "_dtensor"),
)
"""Namespaces in which torch registers operations that communicate."""


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes in place: tensors, and lists of them."""
    if not func._schema.is_mutable:
        return []
    return [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


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
        self.continues = self._is_paused = self._is_due = False
        self._waiting: contextlib.ExitStack | None = None
        self._updating: Any = None

    def wait(self, stack: contextlib.ExitStack) -> None:
        """Wait for `begin`, or for an update by an optimizer that only the body knows; `stack`:
        ends the watch.
        """
        self._waiting = stack
        stack.enter_context(_KERAS_UPDATES.entered(self))
        stack.callback(register_optimizer_step_pre_hook(self._before_torch_update).remove)

    def begin(self) -> None:
        """Begin to watch, unless it does already, or does not wait for it.

        Within a backward pass, whose hooks may update, it begins after the pass, at the end of
        which torch restores the modes with which it began.
        """
        self._is_due = torch._C._current_graph_task_id() != -1
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
        if self not in _KERAS_UPDATES.inside() or optimizer is self._updating:
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
        if not self._is_paused and torch._C._current_graph_task_id() == -1:
            for tensor in map(local, tensors_in(written_by(func, args, kwargs))):
                for undo_log in RECORDED_WRITES.inside():
                    undo_log.keep_outside(tensor)
                if not tensor.is_inference():
                    increment_version(tensor)  # within a mode torch does not count `_foreach_add_`
        return func(*args, **kwargs)


def _applying(
    real: Callable[..., Any], inside: Sequence[LateWrites], *args: Any, **kwargs: Any
) -> Any:
    for late_writes in inside:
        late_writes.note_update()
    return real(*args, **kwargs)


_KERAS_UPDATES = ThreadOverrides(
    next(kind for kind in keras.optimizers.Optimizer.__mro__ if "apply" in vars(kind)),
    {"apply": _applying},
)
"""Every update of a Keras optimizer; torch has hooks for its own. That of a `LossScaleOptimizer`
updates by its inner one.
"""
