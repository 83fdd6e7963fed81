"""When the updates of one step on torch run: at once, or after the verdict on the step.

An eager step may read its weights after the update (a GAN, a metric of the learning rate, a slow
copy of the weights). A watch detects the first operation on a tensor that a deferred update reads
or writes, and runs the update before it, with the old values kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from keras_nanguard._backends.torch.tensors import local, storage, storages, written_by
from keras_nanguard._backends.torch.undo_log import WRITES, UndoLog
from keras_nanguard._backends.torch.updates import Update


class UpdateQueue:
    """The updates of one step; a context in which the code after an update is watched.

    Args:
        log: keeps what an update writes that runs before the verdict, if it has to be undone.
        watches: whether user code may follow an update.

    Attributes:
        waiting: the deferred updates that have not run yet.
        early: whether an update had to run before the verdict, with the old values kept.
    """

    def __init__(self, log: UndoLog | None = None, watches: bool = True):
        self.log, self.watches = log, watches
        self.waiting: list[Update] = []
        self.early = False
        self._watch: _Watch | None = None

    def __enter__(self) -> UpdateQueue:
        return self

    def __exit__(self, *details: Any) -> None:
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None

    def run(self, record: Update, keep: bool = False) -> None:
        """Run an update now; `keep`: keep the old values first."""
        self._run(record, keep)
        self.watch()

    def defer(self, record: Update) -> None:
        """Run an update in `flush`, or before the first operation that depends on it."""
        self.watch()
        self.waiting.append(record)

    def flush(self, keep: bool) -> None:
        """Run the deferred updates; `keep`: keep the old values first."""
        waiting, self.waiting[:] = list(self.waiting), []
        for record in waiting:
            self._run(record, keep)

    def watch(self) -> None:
        """Begin to watch, if user code may follow."""
        if self._watch is None and self.watches:
            self._watch = _Watch(self)
            self._watch.__enter__()

    def _run(self, record: Update, keep: bool) -> None:
        if keep:
            self.early = True
            if self.log is not None:
                self.log.keep_updated(record.state(), record.held())
        watch = self._watch
        if watch is None or record.is_immediate:
            record.run()
            return
        watch.updating = True
        try:
            record.run()
        finally:
            watch.updating = False


class _Watch(TorchDispatchMode):  # type: ignore[misc]
    """Runs the deferred updates before the first operation on a tensor that one of them reads or
    writes, or on a view of one, and keeps each tensor that the user's code writes in place.

    Attributes:
        updating: whether an optimizer runs, whose writes are kept elsewhere.
    """

    def __init__(self, queue: UpdateQueue):
        super().__init__()
        self.queue, self.updating = queue, False
        self._storages: set[int] = set()
        self._known = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        waiting = self.queue.waiting
        if waiting:
            for record in waiting[self._known :]:
                self._storages |= storages([*record.state(), *record.gradients])
            self._known = len(waiting)
            given = _tensors((*args, *kwargs.values()))
            if any(storage(local(tensor)) in self._storages for tensor in given):
                self._storages, self._known = set(), 0
                self.queue.flush(keep=True)
        # Gradients that a backward pass adds up are not kept.
        if not self.updating and torch._C._current_graph_task_id() == -1:
            for tensor in _tensors(written_by(func, args, kwargs)):
                for undo_log in WRITES.inside():
                    undo_log.keep_outside(local(tensor))
        return func(*args, **kwargs)


def _tensors(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors among these values and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
