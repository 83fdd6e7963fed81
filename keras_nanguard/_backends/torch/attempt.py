"""One attempt of a step on PyTorch: what earlier steps have shown, the values that decide how it
runs, its undo log, and what its body has done so far.

An eager body cannot be inspected before it runs. So each step shows which tensors it writes past
Keras, by the version that torch counts for each tensor.
"""

from __future__ import annotations

from typing import Any

from keras_nanguard._backends import interface
from keras_nanguard._backends.torch.calls import Recorder
from keras_nanguard._backends.torch.learned import Learned
from keras_nanguard._backends.torch.state_tensors import StateTensors
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._backends.torch.updates import Update


class GuardedStep(interface.Transaction):
    """The facts about a step that its runs use and do not change. With `jit` its body, `replayed`,
    is compiled once its writes are known.
    """

    learned: Learned

    model: Any
    """The model whose `compute_loss` it calls, or `None`."""

    stock: bool
    """Whether it is Keras' own train step, in which nothing can fail after the update."""

    @property
    def may_undo_update(self) -> bool:
        """Whether a step may be updated before its verdict, because it continues."""
        return self.run.refuses and not self.stock

    def read_state(self) -> StateTensors:
        """Read the train state."""
        return StateTensors(self.run.read_train_state(), self.run.model)


class Attempt(Recorder):
    """One run of the body of a step. Its hooks write here, and in its undo log, only.

    Args:
        is_compiled: whether the body is compiled, so that its writes are not recorded.

    Attributes:
        learned: what earlier steps have shown.
        log: what a refusal restores.
        versions: the watched tensors of the train state by their `id`, with their versions.
        losses_before: the number of its losses before its first update.
        written_before: the tensors of the train state that it had written past Keras until then.
        uncounted_before: those whose writes torch had not counted.
        updated: those of its updates that have run.
        created: the tensors that they have created, each with its first value.
        versions_after: `versions_now` after the last one.
        outputs: its outputs, `None` if it has not ended, or has raised.
        raised: whether torch has raised about a bad number.
    """

    def __init__(self, step: GuardedStep, state: StateTensors, is_compiled: bool):
        super().__init__(state.updated)
        self.step, self.learned = step, step.learned
        self.state, self.is_compiled = state, is_compiled
        self.log = UndoLog.of(state, step.learned, step.may_undo_update, is_compiled)
        watched = state.small_state if step.stock else state.all
        self.versions = {id(t): (t, t._version) for t in watched}
        self.losses_before = 0
        self.written_before: list[Any] = []
        self.uncounted_before: list[Any] = []
        self.updated: list[Update] = []
        self.created: list[tuple[Any, Any]] = []
        self.versions_after: dict[int, tuple[Any, int]] = {}
        self.outputs: Any = None
        self.raised = False

    @property
    def has_written_weights(self) -> bool:
        """Whether a weight or slot was written."""
        updated, versions = self.state.updated, self.versions.items()
        return any(t._version != version for key, (t, version) in versions if key in updated)

    def written(self) -> list[Any]:
        """Return the tensors of the train state that were written past Keras."""
        changed = [t for t, version in self.versions.values() if t._version != version]
        if not changed:
            return []
        by_keras = self.log.kept if self.is_compiled else self.log.writers
        return [t for t in changed if id(t) not in by_keras]

    def written_uncounted(self) -> list[Any]:
        """Return those whose value differs although torch has counted no write of them. Only the
        first steps read this.
        """
        if not self.learned.is_fresh:
            return []
        kept = [self.log.kept.get(key) for key in self.versions]
        unwritten = [entry for entry in kept if entry is not None and not entry.is_written]
        return [entry.tensor for entry in unwritten if entry.differs]

    def versions_now(self) -> dict[int, tuple[Any, int]]:
        """Return the watched and the kept tensors by their `id`, with their current versions."""
        tensors = [tensor for tensor, _ in self.versions.values()]
        tensors += [kept.tensor for kept in self.log.kept.values()]
        return {id(t): (t, t._version) for t in tensors}

    def release(self) -> None:
        """Release all tensors, which an exception that refers to it would keep."""
        self.log.release()
        for held in (self.losses_of, self.versions, self.versions_after):
            held.clear()
        for noted in (self.updates, self.predictions, self.updated, self.created):
            noted.clear()
        self.written_before = self.uncounted_before = []
        self.outputs = None
