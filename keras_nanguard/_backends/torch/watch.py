"""Watches the operations that follow an update of a step on torch.

An eager step may read its weights after the update (a GAN, a metric of the learning rate, a slow
copy of the weights). `Watch` detects the first operation on a tensor that a deferred update reads
or writes, and runs the update before it, with the old values kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from keras_nanguard._backends.torch.modules import local, storage, storages
from keras_nanguard._backends.torch.undo_log import WRITES
from keras_nanguard._backends.torch.updates import Update

__all__ = ["Watch"]


class Watch(TorchDispatchMode):  # type: ignore[misc]
    """Calls `touched` before the first operation on a tensor that a deferred update reads or
    writes, or on a view of one, and keeps each tensor that the user's code writes in place.

    Attributes:
        waiting: the deferred updates.
        updating: whether an optimizer runs, whose writes are kept elsewhere.
    """

    def __init__(self, waiting: list[Update], touched: Callable[[], None]):
        super().__init__()
        self.waiting, self.touched, self.updating = waiting, touched, False
        self._storages: set[int] = set()
        self._known = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if self.waiting:
            for record in self.waiting[self._known :]:
                self._storages |= storages([*record.state(), *record.gradients])
            self._known = len(self.waiting)
            if self._touches(args) or self._touches(kwargs.values()):
                self._storages, self._known = set(), 0
                self.touched()
        if not self.updating and func._schema.is_mutable:
            _keep_written(func, args, kwargs)
        return func(*args, **kwargs)

    def _touches(self, args: Iterable[Any]) -> bool:
        for arg in args:
            if isinstance(arg, torch.Tensor):
                if storage(local(arg)) in self._storages:
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
