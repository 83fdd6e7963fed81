"""What one step on PyTorch restores if it is refused: tensors, attributes of layers, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_nanguard._backends.torch.tensors import local
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._keras import layers as keras_layers


class Backup:
    """Everything that a refused step restores, as it is before the body runs.

    Args:
        transaction: the `Transaction`.
        is_compiled: whether the body is compiled, so that its writes are not recorded.
        note_created: called with each Keras variable that is created meanwhile.
        before_write: called with each tensor that Keras is about to write.

    Attributes:
        log: the undo log.
    """

    def __init__(
        self,
        transaction: Any,
        *,
        is_compiled: bool,
        note_created: Callable[[Any], None],
        before_write: Callable[[Any], None] | None,
    ):
        parts, everything = transaction.parts, transaction.is_fresh
        self._transaction = transaction
        adds = not transaction.stock and (everything or transaction.adds_to_gradients)
        found = [(t, t.grad) for t in parts.holders] if adds else []
        # What a step finds stays alive until its end.
        self._gradients = [(t, grad, local(grad)._version) for t, grad in found if grad is not None]
        kept = [*transaction.untracked.values(), *(parts.other if everything else ())]
        if transaction.refuse:
            kept += [local(grad) for _, grad, _ in self._gradients]
            kept += parts.weights_and_slots if everything and not transaction.stock else ()
        if is_compiled:
            uncounted = [*parts.unlisted, *parts.small_state, *kept]
            self.log = UndoLog((), note_created, uncounted, watch=False)
        else:
            self.log = UndoLog(kept, note_created, parts.unlisted, writes=before_write)
        self._recorded = self.log.old if is_compiled else self.log.writers
        state = parts.small_state if transaction.stock else parts.all
        self._versions = [(tensor, tensor._version) for tensor in state]
        self._attributes = parts.attributes(everything)

    @property
    def gradients_were_added_to(self) -> bool:
        """Whether the step has added to the gradients that it found."""
        return any(local(grad)._version != version for _, grad, version in self._gradients)

    def unrecorded(self) -> list[Any]:
        """Return the tensors of the train state that were written past Keras."""
        changed = [tensor for tensor, version in self._versions if tensor._version != version]
        return [tensor for tensor in changed if id(tensor) not in self._recorded]

    def undo(self) -> None:
        """Undo every write, and every replacement of a tensor in an attribute of a layer."""
        self.log.give_back()
        keras_layers.give_back_tensors(self._attributes)

    def restore_gradients(self) -> None:
        """Restore the gradients of a body that accumulates them; for any other leave none."""
        for tensor in self._transaction.parts.holders:
            tensor.grad = None
        for tensor, grad, _ in self._gradients:
            tensor.grad = grad
