"""Intercepts the optimizer calls and the loss of a step on torch while its body runs.

Updates are deferred if possible. An eager step may read its weights after the update (a GAN, a
metric of the learning rate, a slow copy of the weights). `Watch` detects the first operation on a
tensor that a deferred update reads or writes, and runs the update before it, with the old values
kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any

import keras
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from keras_nanguard._backends.torch.modules import local, storage
from keras_nanguard._backends.torch.undo_log import WRITES, UndoLog
from keras_nanguard._backends.torch.updates import KerasUpdate, TorchUpdate, Update
from keras_nanguard._core.verdict import named_outputs, predicted
from keras_nanguard._keras.overrides import Overrides

__all__ = ["Intercept", "StandIns"]


class Watch(TorchDispatchMode):  # type: ignore[misc]
    """Calls `touched` before the first operation on one of the watched tensors, or on a view of
    one, and keeps each tensor that the user's code writes in place.

    Attributes:
        updating: whether an optimizer runs, whose writes are kept elsewhere.
    """

    def __init__(self, touched: Callable[[], None]):
        super().__init__()
        self.touched, self.updating = touched, False
        self.storages: set[int] = set()

    def arm(self, tensors: Iterable[Any]) -> None:
        """Watch these tensors, too."""
        self.storages |= {storage(tensor) for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if self.storages and (self._touches(args) or self._touches(kwargs.values())):
            self.storages = set()
            self.touched()
        if not self.updating and func._schema.is_mutable:
            _keep_written(func, args, kwargs)
        return func(*args, **kwargs)

    def _touches(self, args: Iterable[Any]) -> bool:
        for arg in args:
            if isinstance(arg, torch.Tensor):
                if storage(local(arg)) in self.storages:
                    return True
            elif isinstance(arg, (list, tuple)) and self._touches(arg):
                return True
        return False


def _keep_written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Keep the tensors that an operation writes in place. Gradients that a backward pass adds up
    are not among them.
    """
    if torch._C._current_graph_task_id() != -1:
        return
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        for tensor in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(tensor, torch.Tensor):
                for undo_log in WRITES.inside():
                    undo_log.keep_outside(local(tensor))


class StandIns:
    """Replacements of optimizers and of the loss computation, which report to the interception of
    the running step.

    Args:
        model: the model whose `compute_loss` is recorded, or `None`.
        optimizers: the intercepted optimizers.
        reporting: wraps each function that reports to the interception, which only the host can
            run.
        update: creates the update of a Keras optimizer from its `apply`.

    Attributes:
        running: the interception of the running step as the only element of a list, so that no
            function refers to its owner.
        places: `(object, attribute, function)` of each of them.
    """

    def __init__(
        self,
        model: Any,
        optimizers: Iterable[Any],
        reporting: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
        update: Callable[[Any], Callable[..., Any]] = lambda optimizer: optimizer.apply,
    ):
        self.model, self.reporting = model, reporting
        self.running: list[Intercept] = []
        self.places: list[tuple[Any, str, Callable[..., Any]]] = []
        for optimizer in optimizers:
            of_torch: Any = getattr(optimizer, "of", None)
            if of_torch is not None:
                self.places.append((of_torch, "step", self._stepper(optimizer, of_torch.step)))
            else:
                apply = self._applier(optimizer, update(optimizer))
                self.places.append((optimizer, "apply", apply))
        if hasattr(model, "compute_loss"):
            self.places.append((model, "compute_loss", self._noting(model.compute_loss)))

    def _applier(self, optimizer: Any, real: Callable[..., Any]) -> Callable[..., Any]:
        running = self.running

        def apply(grads: Iterable[Any], trainable_variables: Any = None) -> Any:
            running[0].take(optimizer, real, grads, trainable_variables)

        return self.reporting(apply)

    def _stepper(self, optimizer: Any, real: Callable[..., Any]) -> Callable[..., Any]:
        running = self.running

        @functools.wraps(real)  # a scheduler of torch's marks the function
        def step(_: Any, closure: Any = None, **kwargs: Any) -> Any:
            return running[0].take_step(optimizer, real, closure, kwargs)

        return MethodType(self.reporting(step), optimizer.of)  # a scheduler wraps its `__func__`

    def _noting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        running = self.running
        note = self.reporting(lambda loss, args, kwargs: running[0].note(loss, args, kwargs))

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = real(*args, **kwargs)
            note(loss, args, kwargs)
            return loss

        return compute_loss


class Intercept:
    """Context that records the calls of optimizers instead of (or besides) updating, and the
    model's loss.

    Args:
        stand_ins: their replacements.
        asked: called with each record; returns `"now"` to run the update at once, `"kept"` to keep
            the old values first, `"later"` to defer it, `"never"` to omit it.
        paths: path of each parameter by its `id`, for torch optimizers.
        tensors: the tensors of variables, by their `id`.
        undo_log: keeps the old values of an update that cannot be deferred; `None` keeps none.
        watches: whether code of the user's own may follow an update.

    Attributes:
        records: the calls of the optimizers, in order.
        losses: the results of `compute_loss`.
        outputs: `(name, tensor)` of the model's outputs that `compute_loss` received.
        waiting: deferred records that have not run yet.
        early: whether an update had to run before the verdict.
    """

    def __init__(
        self,
        stand_ins: StandIns,
        asked: Callable[[Update], str],
        paths: dict[int, str],
        tensors: Mapping[int, Any],
        undo_log: UndoLog | None = None,
        watches: bool = True,
    ):
        self.stand_ins, self.asked, self.paths, self.tensors = stand_ins, asked, paths, tensors
        self.undo_log, self.early, self.watches = undo_log, False, watches
        self.records: list[Update] = []
        self.losses: list[Any] = []
        self.outputs: list[tuple[str, Any]] = []
        self.waiting: list[Update] = []
        self._watch: Watch | None = None
        self._overrides = Overrides()

    def __enter__(self) -> Intercept:
        self.stand_ins.running.append(self)
        for target, name, function in self.stand_ins.places:
            self._overrides.set(target, name, function)
        return self

    def __exit__(self, *details: Any) -> None:
        if self._watch is not None and self.watches:
            self._watch.__exit__(*details)
        self._watch = None
        self.stand_ins.running.clear()
        self._overrides.give_back()

    def take(
        self, optimizer: Any, real: Callable[..., Any], grads: Iterable[Any], variables: Any
    ) -> None:
        """Record the update `real(grads, variables)`."""
        variables = None if variables is None else list(variables)
        self._take(KerasUpdate(optimizer, real, list(grads), variables, self.tensors))

    def take_step(
        self, optimizer: Any, real: Callable[..., Any], closure: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Record the update `real(closure, **kwargs)` of a torch optimizer."""
        if closure is None and not kwargs:
            self._take(TorchUpdate(optimizer, real, self.paths))
            optimizer.of._opt_called = True  # what a scheduler of torch's looks for
            return None
        record = TorchUpdate(optimizer, real, self.paths)
        self._keep(record)  # it evaluates the loss itself, several times
        result = real(closure, **kwargs) if closure is not None else real(**kwargs)
        self._begin_watch()
        made = TorchUpdate(optimizer, real, self.paths)
        made.slots = record.slots
        self.records.append(made)
        return result

    def _take(self, record: Update) -> None:
        self.records.append(record)
        when = self.asked(record)
        if when == "kept":
            self._keep(record)
        if when in ("now", "kept"):
            self._run(record)
        watch = self._begin_watch()
        if when == "later":
            self.waiting.append(record)
            watch.arm([*record.state(), *record.gradients])

    def _begin_watch(self) -> Watch:
        """Return the watch of this step; it begins now if code of the user's own may follow."""
        if self._watch is None:
            self._watch = Watch(self.make)
            if self.watches:
                self._watch.__enter__()
        return self._watch

    def _run(self, record: Update) -> None:
        watch = self._watch
        if watch is None:
            record.run()
            return
        watch.updating = True
        try:
            record.run()
        finally:
            watch.updating = False

    def make(self, keep: bool = True) -> None:
        """Keep the old values, then run the deferred updates."""
        waiting, self.waiting = self.waiting, []
        for record in waiting:
            if keep:
                self._keep(record)
            self._run(record)

    def _keep(self, record: Update) -> None:
        """Keep what an update is about to write."""
        self.early = True
        if self.undo_log is not None:
            self.undo_log.keep_updated(record.state(), record.held())

    def before_write(self, tensor: Any, unread: Container[int]) -> None:
        """Run the deferred updates before a write to a tensor that they may read, such as a rate.
        None reads `unread`.
        """
        if self.waiting and id(tensor) not in unread:
            self.make()

    def note(self, loss: Any, args: Any, kwargs: Any) -> None:
        """Record the result of `compute_loss(*args, **kwargs)`."""
        if loss is not None:
            self.losses.append(keras.ops.convert_to_tensor(loss))
            outputs = keras.tree.flatten(predicted(args, kwargs))
            named = named_outputs(self.stand_ins.model, outputs)
            self.outputs += [(name, value) for name, value in named if _is_float(value)]


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
