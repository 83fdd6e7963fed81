"""Updates of a step on torch, by a Keras or a torch optimizer, and when they run: at once, or after
the verdict on the step.

A deferred update must have the same effect as an immediate one. So a record holds everything that
the call depended on and that may change meanwhile: the gradients, whether autograd was on, and the
rates of a torch optimizer.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import torch
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode

from keras_nanguard._backends.torch.modules import first_value, local, settings_of
from keras_nanguard._backends.torch.undo_log import WRITES, UndoLog, storage, written_by
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.overrides import ThreadOverrides


class Update:
    """One call of an update.

    Attributes:
        optimizer: the optimizer.
        gradients: the gradients.
        variables: the variables that it will write, one for each gradient, without slots; each has
            a `path`.
        is_immediate: whether it cannot be deferred, because it evaluates the loss itself.
    """

    is_immediate = False
    optimizer: Any
    gradients: list[Any]
    variables: list[Any]

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """`(gradient, variable)` of each gradient."""
        return list(zip(self.gradients, self.variables))

    def state(self) -> list[Any]:
        """Return every tensor that the update reads and writes, or writes."""
        updated = [*self.variables, *self.optimizer.variables]
        return [keras_variables.stored(variable) for variable in updated]

    def build(self) -> None:
        """Build the optimizer as the update itself would."""

    def run(self) -> list[tuple[Any, Any]]:
        """Run the update; return the tensors that it has created outside of Keras, each with its
        first value.
        """
        with torch.set_grad_enabled(self._grad):
            return self._call()

    def _call(self) -> list[tuple[Any, Any]]:
        raise NotImplementedError


class KerasUpdate(Update):
    """One call of `apply` of a Keras optimizer.

    Args:
        optimizer: the optimizer.
        real: runs the update.
        grads: the gradients.
        variables: the variables, or `None` for those of the optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        real: Callable[..., Any],
        grads: list[Any],
        variables: Sequence[Any] | None,
    ):
        super().__init__()
        self.optimizer, self.real, self.grads, self.given = optimizer, real, grads, variables
        asked = variables if variables is not None else keras_optimizers.trained_by(optimizer)
        self.variables = [v for g, v in zip(grads, asked) if g is not None]
        self.gradients = [g for g, _ in zip(grads, asked) if g is not None]

    def state(self) -> list[Any]:
        trained = keras_optimizers.trained_by(self.optimizer)  # an average may write all of them
        return [*map(keras_variables.stored, trained), *super().state()]

    def build(self) -> None:
        optimizer = self.optimizer
        if self.given and not optimizer.built:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(self.given)
            optimizer.built = True  # where `build` leaves that to `apply`

    def _call(self) -> list[tuple[Any, Any]]:
        self.real(self.grads) if self.given is None else self.real(self.grads, self.given)
        return []


class TorchUpdate(Update):
    """One call of `step` of a `torch.optim.Optimizer`.

    Args:
        optimizer: the adapter of the optimizer.
        real: runs the update.
        args, kwargs: the arguments: none, or a closure that evaluates the loss.

    Attributes:
        result: what the update has returned.
    """

    def __init__(
        self,
        optimizer: Any,
        real: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ):
        super().__init__()
        self.optimizer, self.torch, self.real = optimizer, optimizer.of, real
        self._args, self._kwargs, self.result = args, kwargs, None
        self.is_immediate = bool(args or kwargs)
        self._read()
        if self.is_immediate:  # it computes the gradients of all of them
            self.variables = [optimizer.variable_of(p) for p, _ in self.grads]

    def _read(self) -> None:
        """Read what the update depends on."""
        groups = self.torch.param_groups
        self.groups = settings_of(groups)
        self.grads = [(p, p.grad) for group in groups for p in group["params"]]
        written = [(p, g) for p, g in self.grads if g is not None]
        self.gradients = [local(g) for _, g in written]
        self.variables = [self.optimizer.variable_of(p) for p, _ in written]

    def _call(self) -> list[tuple[Any, Any]]:
        """Step with the gradients and rates of the original call, or with its closure."""
        names = [tuple(slots) for slots in self.torch.state.values()]
        if self.is_immediate:
            self.result = self.real(*self._args, **self._kwargs)
            self._read()
            return self._created(names)
        now = [(p, p.grad) for p, _ in self.grads]
        groups = settings_of(self.torch.param_groups)
        self._place(self.grads, self.groups)
        try:
            if self.optimizer.global_clipnorm:
                written = [p for p, g in self.grads if g is not None]
                torch.nn.utils.clip_grad_norm_(written, self.optimizer.global_clipnorm)
            self.real()
        finally:
            self._place(now, groups)
        return self._created(names)

    def _created(self, before: Sequence[Sequence[str]]) -> list[tuple[Any, Any]]:
        """Return the slots that the update has created, each with its first value, from the names
        of those of each parameter before it.
        """
        found = []
        known = itertools.chain(before, itertools.repeat(()))
        for (p, slots), names in zip(self.torch.state.items(), known):
            if len(slots) != len(names):
                groups = zip(self.torch.param_groups, self.groups)
                rates = (s.get("lr", 0.0) for g, s in groups if any(q is p for q in g["params"]))
                rate = float(next(rates, 0.0))
                new = {k: local(t) for k, t in slots.items() if k not in names}
                tensors = {k: t for k, t in new.items() if isinstance(t, torch.Tensor)}
                found += [(t, first_value(k, t, rate)) for k, t in tensors.items()]
        return found

    def _place(self, grads: Any, groups: Any) -> None:
        for p, grad in grads:
            if p.grad is not grad:
                p.grad = grad
        for group, values in zip(self.torch.param_groups, groups):
            group.update(values)


class UpdateQueue:
    """The updates of one step, of which some wait for the verdict.

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
        self.log, self._readable = log, readable
        self.waiting: list[Update] = []
        self.created: list[tuple[Any, Any]] = []
        self.early = self.is_running = False
        self._storages: set[int] = set()

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

    def defer(self, record: Update) -> None:
        """Run an update in `flush`, or before the first operation that depends on it."""
        self.waiting.append(record)
        self._storages = set()

    def flush(self, keep: bool) -> None:
        """Run the deferred updates; `keep`: keep the old values first."""
        waiting, self.waiting[:] = list(self.waiting), []
        for record in waiting:
            self.run(record, keep)

    def flush_for(self, tensors: Iterable[Any]) -> None:
        """Run the deferred updates, with the old values kept, if one of them reads or writes one of
        these tensors, or a view of one.
        """
        if self.waiting and not self._storages:
            used = [t for record in self.waiting for t in (*record.state(), *record.gradients)]
            self._storages = set(map(storage, (*used, *self._readable)))
        if self.waiting and any(storage(local(t)) in self._storages for t in tensors):
            self.flush(keep=True)


class Watch(TorchDispatchMode):  # type: ignore[misc]
    """Watches the code of a step after its first update.

    An eager step may read its weights after the update (a GAN, a metric of the learning rate, a
    slow copy of the weights). Before the first operation on a tensor that a deferred update reads
    or writes, it runs the update. It also keeps each tensor that the user's code writes in place.

    Args:
        queue: the updates of the step.
        stack: ends the watching.
    """

    def __init__(self, queue: UpdateQueue, stack: contextlib.ExitStack):
        super().__init__()
        self._queue, self._stack = queue, stack
        self._has_begun = False

    def begin(self) -> None:
        """Watch from now on."""
        if not self._has_begun:
            self._has_begun = True
            self._stack.enter_context(self)

    def begin_with_unknown(self) -> None:
        """Watch from the first update on by a Keras optimizer that only the body knows, such as one
        within another object.
        """

        def watch() -> None:
            if not self._queue.is_running:
                self.begin()

        _APPLY.enter(watch)
        self._stack.callback(_APPLY.leave, watch)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if self._queue.waiting:
            self._queue.flush_for(_tensors((*args, *kwargs.values())))
        # Gradients that a backward pass adds up are not kept.
        if not self._queue.is_running and torch._C._current_graph_task_id() == -1:
            for tensor in map(local, _tensors(written_by(func, args, kwargs))):
                for undo_log in WRITES.inside():
                    undo_log.keep_outside(tensor)
                if not tensor.is_inference():
                    increment_version(tensor)  # within a mode torch does not count `_foreach_add_`
        return func(*args, **kwargs)


def _applying(
    real: Callable[..., Any], inside: Sequence[Callable[[], None]], *args: Any, **kwargs: Any
) -> Any:
    for watch in inside:
        watch()
    return real(*args, **kwargs)


_APPLY = ThreadOverrides(
    next(kind for kind in keras.optimizers.Optimizer.__mro__ if "apply" in vars(kind)),
    {"apply": _applying},
)
"""Every update of a Keras optimizer. That of a `LossScaleOptimizer` updates by its inner one."""


def _tensors(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors among these values and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
