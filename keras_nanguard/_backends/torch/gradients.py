"""The gradients that a step finds: those that earlier steps of a loop have left, to add to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from keras_nanguard._backends.torch import reductions
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._keras.tensors import local


@dataclass(frozen=True, eq=False)
class _Found:
    """A gradient that a step finds, of which this process may have a shard only."""

    holder: Any
    gradient: Any
    version: int

    @property
    def is_written(self) -> bool:
        return bool(local(self.gradient)._version != self.version)

    @property
    def is_in_use(self) -> bool:
        """Whether the body has added to it, or not replaced it yet."""
        return self.holder.grad is self.gradient or self.is_written


class FoundGradients:
    """The gradients that a step finds. It may add to them, or replace them by its own.

    Args:
        holders: the tensors that may have gradients.
        is_read: whether to read them. What a step finds stays alive until its end.
    """

    def __init__(self, holders: Sequence[Any], is_read: bool):
        self._holders = holders
        pairs = [(t, t.grad) for t in holders if t.grad is not None] if is_read else []
        self._found = [_Found(t, grad, local(grad)._version) for t, grad in pairs]
        self._at_update: list[_Found] | None = None
        self._added_to: set[_Found] = set()
        self.tensors = [local(grad) for _, grad in pairs]

    def note_update(self) -> None:
        """Note the first update of the step. After it the body may clear what it has used."""
        if self._at_update is None:
            self._at_update = self._in_use()

    @contextlib.contextmanager
    def around_backward(self) -> Iterator[None]:
        """Note to which of them a backward pass adds out of place (`create_graph=True`)."""
        unchanged = [found for found in self._found if found.holder.grad is found.gradient]
        try:
            yield
        finally:
            now = [(found, found.holder.grad) for found in unchanged]
            self._added_to.update(f for f, g in now if g is not None and g is not f.gradient)

    def are_added_to(self) -> bool:
        """Whether the body has added to one of them."""
        return any(found.is_written or found in self._added_to for found in self._in_use())

    def restore(self, log: UndoLog) -> None:
        """Restore those that the body has not replaced; for all others leave none. A bad sum, which
        no later step could correct, is dropped.
        """
        in_use = self._in_use()
        for holder in self._holders:
            holder.grad = None
        for found in in_use:
            if reductions.are_finite([log.kept[id(local(found.gradient))].value]):
                found.holder.grad = found.gradient

    def _in_use(self) -> list[_Found]:
        if self._at_update is not None:
            return self._at_update
        return [found for found in self._found if found.is_in_use or found in self._added_to]
