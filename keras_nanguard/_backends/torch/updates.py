"""Updates of a step on torch, by a Keras or a torch optimizer, and when they run: at once, or after
the verdict on the step.

A deferred update must have the same effect as an immediate one. So a record holds everything that
the call depended on and that may change meanwhile: the gradients, whether autograd was on, and the
rates of a torch optimizer, and the scale that a `GradScaler` gives it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import torch
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode

from keras_nanguard._backends.torch.modules import local, settings_of, tensors_in
from keras_nanguard._backends.torch.undo_log import WRITES, UndoLog, storage, written_by
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.overrides import ThreadOverrides

_SCALING = ("grad_scale", "found_inf")
"""Attributes that a `GradScaler` sets on a fused optimizer for the time of the call."""


class Update:
    """One call of an update.

    Args:
        optimizer: the optimizer.
        call: runs the update.

    Attributes:
        pairs: each gradient with the variable that the update will write; it has a `path`.
        is_immediate: whether it cannot be deferred, because it evaluates the loss itself.
        result: what the update has returned.
    """

    is_immediate = False
    pairs: list[tuple[Any, Any]]
    result: Any = None

    def __init__(self, optimizer: Any, call: Callable[[], Any]):
        self.optimizer, self._call, self._grad_mode = optimizer, call, torch.is_grad_enabled()

    def state(self) -> list[Any]:
        """Return every tensor that the update reads and writes, or writes."""
        updated = [*(variable for _, variable in self.pairs), *self.optimizer.variables]
        return list(map(keras_variables.stored, updated))

    def build(self) -> None:
        """Build the optimizer as the update itself would."""

    def run(self) -> list[tuple[Any, Any]]:
        """Run the update; return the tensors that it has created outside of Keras, each with its
        first value.
        """
        with torch.set_grad_enabled(self._grad_mode):
            self.result = self._call()
        return []


class KerasUpdate(Update):
    """One call `apply(grads)` or `apply(grads, variables)` of a Keras optimizer."""

    def __init__(self, optimizer: Any, apply: Callable[..., Any], grads: Any, *variables: Any):
        super().__init__(optimizer, partial(apply, grads, *variables))
        self._variables = variables[0] if variables else keras_optimizers.trained_by(optimizer)
        self.pairs = [(g, v) for g, v in zip(grads, self._variables) if g is not None]

    def state(self) -> list[Any]:
        trained = keras_optimizers.trained_by(self.optimizer)  # an average may write all of them
        return [*map(keras_variables.stored, trained), *super().state()]

    def build(self) -> None:
        optimizer = self.optimizer
        if self._variables and not optimizer.built:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(self._variables)
            optimizer.built = True  # where `build` leaves that to `apply`


class TorchUpdate(Update):
    """One call of `step` of a `torch.optim.Optimizer`, given by its adapter. It is immediate if it
    has a closure that evaluates the loss.
    """

    def __init__(self, optimizer: Any, call: Callable[[], Any], is_immediate: bool):
        super().__init__(optimizer, call)
        self._of, self.is_immediate = optimizer.of, is_immediate
        self._read()
        if is_immediate:  # it computes the gradients of all of them
            self.pairs = [(None, optimizer.variable_of(p)) for p, _ in self._grads]

    def _read(self) -> None:
        """Read what the update depends on."""
        groups = self._of.param_groups
        self._settings, self._scaling = settings_of(groups), self._given_scaling()
        values = [v for settings in self._settings for v in settings.values()]
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        # A scheduler writes a rate that is a tensor in place.
        self._rates = [(tensor, tensor.clone(), tensor._version) for tensor in tensors]
        self._grads = [(p, p.grad) for group in groups for p in group["params"]]
        written = [(p, g) for p, g in self._grads if g is not None]
        self.pairs = [(local(g), self.optimizer.variable_of(p)) for p, g in written]

    def run(self) -> list[tuple[Any, Any]]:
        """Step with the gradients and rates of the original call, or with its closure."""
        before = {p: set(slots) for p, slots in self._of.state.items()}
        if self.is_immediate:
            super().run()
            self._read()
        else:
            with self._as_called():
                if self.optimizer.global_clipnorm:
                    written = [p for p, g in self._grads if g is not None]
                    torch.nn.utils.clip_grad_norm_(written, self.optimizer.global_clipnorm)
                super().run()
        created: list[tuple[Any, Any]] = self.optimizer.created_since(before, self._settings)
        return created

    @contextlib.contextmanager
    def _as_called(self) -> Iterator[None]:
        """Let everything be as in the original call. At the end it is as before, except for what
        the update itself has changed in the settings, such as a count of its steps.
        """
        groups, given = self._of.param_groups, self._settings
        grads, later = [(p, p.grad) for p, _ in self._grads], settings_of(groups)
        scaling = self._given_scaling()
        rates = [(t, v, t.clone()) for t, v, version in self._rates if t._version != version]
        self._place(self._grads, given, self._scaling)
        for tensor, value, _ in rates:
            tensor.copy_(value)
        try:
            yield
        finally:
            kept = [
                {k: v for k, v in now.items() if v is not old.get(k) or group.get(k) is old.get(k)}
                for group, now, old in zip(groups, later, given)
            ]
            self._place(grads, kept, scaling)
            for tensor, _, value in rates:
                tensor.copy_(value)

    def _given_scaling(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self._of).items() if name in _SCALING}

    def _place(self, grads: Any, settings: Any, scaling: Mapping[str, Any]) -> None:
        for p, grad in grads:
            if p.grad is not grad:
                p.grad = grad
        for group, values in zip(self._of.param_groups, settings):
            group.update(values)
        for name in _SCALING:
            vars(self._of).pop(name, None)
        vars(self._of).update(scaling)


class UpdateQueue(TorchDispatchMode):  # type: ignore[misc]
    """The updates of one step, of which some wait for the verdict.

    An eager step may read its weights after the update (a GAN, a metric of the learning rate, a
    slow copy of the weights). So the queue watches the operations after the first update: before
    one on a tensor that a deferred update reads or writes, it runs the update. It also keeps each
    tensor that the user's code writes in place.

    Args:
        log: keeps what an update writes that runs before the verdict, if it has to be undone.
        readable: further tensors that an update may read, such as a rate that a layer has.

    Attributes:
        waiting: the deferred updates that have not run yet.
        early: whether an update had to run before the verdict, with the old values kept.
        is_running: whether an update is running.
        created: the tensors that the updates have created outside of Keras, each with its first
            value.
    """

    def __init__(self, log: UndoLog, readable: Sequence[Any]):
        super().__init__()
        self.log, self._readable = log, readable
        self.waiting: list[Update] = []
        self.created: list[tuple[Any, Any]] = []
        self.early = self.is_running = False
        self._storages: set[int] = set()
        self._unwatched: contextlib.ExitStack | None = None

    def watch_from_update(self, stack: contextlib.ExitStack) -> None:
        """Watch the code of the step from its first update on, until the stack is closed. The
        update may be one by a Keras optimizer that only the body knows.
        """
        self._unwatched = stack
        _APPLY.enter(self)
        stack.callback(_APPLY.leave, self)

    def watch(self) -> None:
        """Watch from now on, if the step is to be watched."""
        stack, self._unwatched = self._unwatched, None
        if stack is not None:
            stack.enter_context(self)

    def run(self, record: Update, keep: bool) -> None:
        """Run an update now; `keep`: keep the old values first."""
        if record.is_immediate:
            self.flush(keep=True)
        if keep:
            self.early = True
            self.log.keep_updated(record.optimizer, record.state())
        self.is_running = True
        try:
            self.created += record.run()
        finally:
            self.is_running = False
        self.watch()

    def defer(self, record: Update) -> None:
        """Run an update in `flush`, or before the first operation that depends on it."""
        if record.is_immediate:
            self.run(record, keep=True)
        else:
            self.waiting.append(record)
            self._storages = set()
            self.watch()

    def flush(self, keep: bool) -> None:
        """Run the deferred updates; `keep`: keep the old values first."""
        waiting, self.waiting[:] = list(self.waiting), []
        for record in waiting:
            self.run(record, keep)

    def _flush_for(self, tensors: Iterable[Any]) -> None:
        """Run the deferred updates if one of them reads or writes one of these, or a view of it."""
        if not self._storages:
            used = [t for record in self.waiting for t in record.state()]
            used += [gradient for record in self.waiting for gradient, _ in record.pairs]
            self._storages = set(map(storage, (*used, *self._readable)))
        if any(storage(local(t)) in self._storages for t in tensors):
            self.flush(keep=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.waiting:
            self._flush_for(tensors_in((*args, *kwargs.values())))
        # Gradients that a backward pass adds up are not kept.
        if not self.is_running and torch._C._current_graph_task_id() == -1:
            for tensor in map(local, tensors_in(written_by(func, args, kwargs))):
                for undo_log in WRITES.inside():
                    undo_log.keep_outside(tensor)
                if not tensor.is_inference():
                    increment_version(tensor)  # within a mode torch does not count `_foreach_add_`
        return func(*args, **kwargs)


def _applying(
    real: Callable[..., Any], inside: Sequence[UpdateQueue], *args: Any, **kwargs: Any
) -> Any:
    for queue in inside:
        if not queue.is_running:
            queue.watch()
    return real(*args, **kwargs)


_APPLY = ThreadOverrides(
    next(kind for kind in keras.optimizers.Optimizer.__mro__ if "apply" in vars(kind)),
    {"apply": _applying},
)
"""Every update of a Keras optimizer. That of a `LossScaleOptimizer` updates by its inner one."""
