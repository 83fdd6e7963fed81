"""While the body of a step runs on torch: what it asks its optimizers for, and the loss it computes.

Where an update can be put off it is; but an eager step may look at its weights after the update (a GAN, a metric of the
learning rate, a slow copy of the weights). `Watch` sees the first operation that touches anything which a waiting
update reads or writes, and has the update made before it, with the old values kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from keras_nanguard import _state
from keras_nanguard._step._torch_records import KerasRecord, Record, TorchRecord, Undo

__all__ = ["Intercept"]

_COMPUTE_LOSS = ("x", "y", "y_pred", "sample_weight", "training")


class Watch(TorchDispatchMode):  # type: ignore[misc]
    """Calls `touched` before the first operation on one of the watched tensors, whatever view of it is used."""

    def __init__(self, touched: Callable[[], None]):
        super().__init__()
        self.touched = touched
        self.storages: set[int] = set()

    def arm(self, tensors: Iterable[Any]) -> None:
        """Watch these tensors, too."""
        self.storages |= {_storage(tensor) for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if self.storages and (self._touches(args) or self._touches(kwargs.values())):
            self.storages = set()
            self.touched()
        return func(*args, **kwargs)

    def _touches(self, args: Iterable[Any]) -> bool:
        for arg in args:
            if isinstance(arg, torch.Tensor):
                if _storage(arg) in self.storages:
                    return True
            elif isinstance(arg, (list, tuple)) and self._touches(arg):
                return True
        return False


def _storage(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse tensor: its parts have a storage, itself has none
        return id(tensor)


class Intercept:
    """Context in which optimizers report instead of (or beside) updating, and the model's loss is noted.

    Args:
        model: the model whose `compute_loss` is noted, or `None`.
        optimizers: the optimizers to stand in for.
        asked: called with each record; returns `"now"` to let the update be made at once, `"kept"` to have the old values
            kept before, `"later"` to put it off, `"never"` to leave it out.
        paths: path of each parameter by its `id`, for optimizers of torch's.
        compiled: the compiled step that runs, which has its stand-ins ready; `None` for one that is not compiled.

    Attributes:
        records: what the optimizers were asked for, in order.
        losses: what `compute_loss` returned.
        outputs: `(name, tensor)` of the model's outputs that `compute_loss` was given.
        waiting: records that were put off and not made since.
        undo: what undoes the updates that had to be made before the verdict, in order.
    """

    def __init__(
        self, model: Any, optimizers: Iterable[Any], asked: Callable[[Record], str], paths: dict[int, str], compiled: Any = None
    ):
        self.compiled = compiled
        self.model, self.optimizers, self.asked, self.paths = model, list(optimizers), asked, paths
        self.records: list[Record] = []
        self.losses: list[Any] = []
        self.outputs: list[tuple[str, Any]] = []
        self.waiting: list[Record] = []
        self.undo: list[Undo] = []
        self._watch: Watch | None = None
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Intercept:
        if self.compiled is not None:
            self.compiled.seen = self
            for target, name, function in self.compiled.stand_ins:
                self._override(target, name, function)
            return self
        for optimizer in self.optimizers:
            of_torch: Any = getattr(optimizer, "of", None)
            if of_torch is not None:
                self._override(of_torch, "step", self._stepper(optimizer, of_torch.step))
            else:
                self._override(optimizer, "apply", self._applier(optimizer, optimizer.apply))
        if hasattr(self.model, "compute_loss"):
            self._override(self.model, "compute_loss", self._noting(self.model.compute_loss))
        return self

    def __exit__(self, *details: Any) -> None:
        if self._watch is not None:
            self._watch.__exit__(*details)
            self._watch = None
        if self.compiled is not None:
            self.compiled.seen = None
        for target, name, before in reversed(self._before):
            _state.unset_instance(target, name) if before is None else _state.set_instance(target, name, before)

    def _override(self, target: Any, name: str, value: Any) -> None:
        self._before.append((target, name, vars(target).get(name)))
        _state.set_instance(target, name, value)

    def _applier(self, optimizer: Any, real: Callable[..., Any]) -> Callable[..., Any]:
        def apply(grads: Iterable[Any], trainable_variables: Any = None) -> Any:
            self.take(optimizer, real, grads, trainable_variables)

        return apply

    def take(self, optimizer: Any, real: Callable[..., Any], grads: Iterable[Any], variables: Any) -> None:
        """Take down an update that `real(grads, variables)` would make."""
        self._take(KerasRecord(optimizer, real, list(grads), None if variables is None else list(variables)))

    def _stepper(self, optimizer: Any, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)  # a scheduler of torch's marks the function
        def step(closure: Any = None, **kwargs: Any) -> Any:
            return self.take_step(optimizer, real, closure, kwargs)

        return step

    def take_step(self, optimizer: Any, real: Callable[..., Any], closure: Any, kwargs: dict[str, Any]) -> Any:
        """Take down an update that `real(closure, **kwargs)` of an optimizer of torch's would make."""
        if closure is None and not kwargs:
            self._take(TorchRecord(optimizer, real, self.paths))
            optimizer.of._opt_called = True  # what a scheduler of torch's looks for
            return None
        record = TorchRecord(optimizer, real, self.paths)  # evaluates the loss itself, several times
        self.undo.append(record.undo())
        result = real(closure, **kwargs) if closure is not None else real(**kwargs)
        made = TorchRecord(optimizer, real, self.paths)
        made.slots = record.slots
        self.records.append(made)
        return result

    def _take(self, record: Record) -> None:
        self.records.append(record)
        when = self.asked(record)
        if when == "kept":
            self.undo.append(record.undo())
        if when in ("now", "kept"):
            record.run()
        elif when == "later":
            self.waiting.append(record)
            if self._watch is None:
                self._watch = Watch(self.make)
                self._watch.__enter__()
            self._watch.arm([*record.state(), *record.gradients])

    def make(self, keep: bool = True) -> None:
        """Make the updates that wait, with the old values kept."""
        waiting, self.waiting = self.waiting, []
        for record in waiting:
            if keep:
                self.undo.append(record.undo())
            record.run()

    def give_back(self) -> None:
        """Undo the updates that were made."""
        for undo in reversed(self.undo):
            undo.give_back()

    def _noting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = real(*args, **kwargs)
            self.note(loss, args, kwargs)
            return loss

        return compute_loss

    def note(self, loss: Any, args: Any, kwargs: Any) -> None:
        """Take down what `compute_loss(*args, **kwargs)` has returned."""
        if loss is not None:
            self.losses.append(keras.ops.convert_to_tensor(loss))
            predicted = {**dict(zip(_COMPUTE_LOSS, args)), **kwargs}.get("y_pred")
            self.outputs += _named(self.model, predicted)


def _named(model: Any, predicted: Any) -> list[tuple[str, Any]]:
    found = keras.tree.flatten(predicted)
    tensors = [t for t in found if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())]
    names = getattr(model, "output_names", None) or []
    return [(str(names[i]) if i < len(names) else f"output_{i}", t) for i, t in enumerate(tensors)]
