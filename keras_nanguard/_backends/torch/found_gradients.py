"""The gradients that a step on torch finds, and may add to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.weak import TensorWeakRef

from keras_nanguard._backends.torch.learned import Seen
from keras_nanguard._keras.torch_tensors import local


class FoundGradients:
    """The gradients that a step finds. A refusal restores them if it has added to them.

    Args:
        holders: the tensors that have a gradient.
        may_add: whether the step may add to those that it finds.
        at_first: whether to keep them before the step.

    Attributes:
        kept: each of these tensors whose gradient is to be restored, with this gradient. `None`
            until they are chosen: when the step is about to add to one, or to use one.
    """

    def __init__(self, holders: Sequence[Any] = (), may_add: bool = True, at_first: bool = False):
        self._holders = holders
        # A step that clears them first is to release their memory.
        found = [(p, p.grad) for p in holders if p.grad is not None] if may_add else []
        self._found = [(p, TensorWeakRef(grad), _version_of(grad)) for p, grad in found]
        self.kept = found if at_first else None
        self._added_by_hand = Seen.UNKNOWN

    @property
    def kept_ids(self) -> set[int]:
        """The `id` of each gradient, or shard of one, that is kept."""
        return {id(local(gradient)) for _, gradient in self.kept or ()}

    def note_writes(self) -> Seen:
        """Return whether the step has written one before this was first called: at its first
        backward pass or update, or its end. Unknown if it has found none.

        Of those that are kept already, it forgets the ones that the step has cleared or replaced.
        """
        if self._added_by_hand is not Seen.UNKNOWN or not self._found:
            return self._added_by_hand
        found = [(p, ref(), version) for p, ref, version in self._found]
        written = {id(g) for _, g, v in found if g is not None and _version_of(g) != v}
        self._added_by_hand = Seen.of(bool(written))
        if self.kept is not None:
            self.kept = [(p, g) for p, g in self.kept if p.grad is g or id(g) in written]
        return self._added_by_hand

    def choose(self) -> list[tuple[Any, Any]]:
        """Return those to keep, each with its tensor: those that the step has neither cleared nor
        replaced when it first asks.
        """
        self.note_writes()
        if self.kept is None:
            pairs = [(p, p.grad, found) for p, found, _ in self._found]
            self.kept = [(p, g) for p, g, found in pairs if g is not None and found() is g]
        return self.kept

    def give_back(self, was_finite: Callable[[Any], bool]) -> None:
        """Restore those that are kept; for all other tensors leave none.

        Args:
            was_finite: whether a gradient was finite before the step. A bad sum, which no later
                step could correct, is dropped.
        """
        chosen = self.choose()
        for holder in self._holders:
            holder.grad = None
        for holder, gradient in chosen:
            if was_finite(gradient):
                holder.grad = gradient

    def release(self) -> None:
        """Release all tensors."""
        self.kept, self._found, self._holders = None, [], ()


def _version_of(gradient: Any) -> int:
    """Return how many writes torch has counted: in `torch.inference_mode` it counts none."""
    tensor = local(gradient)
    return 0 if tensor.is_inference() else int(tensor._version)
