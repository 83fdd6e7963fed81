"""One step on PyTorch before its body runs: what earlier steps have shown, the values that decide
how it runs, and its undo log.

An eager body cannot be inspected before it runs. So each step shows which tensors it writes past
Keras, by the version that torch counts for each tensor.
"""

from __future__ import annotations

from typing import Any

from keras_nanguard._backends import interface
from keras_nanguard._backends.torch.learned import Learned
from keras_nanguard._backends.torch.state_tensors import StateTensors
from keras_nanguard._backends.torch.undo_log import UndoLog


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


class StepContext:
    """A step that is about to run.

    Args:
        is_compiled: whether the body is compiled, so that its writes are not recorded.

    Attributes:
        learned: what earlier steps have shown.
        log: what a refusal restores.
        versions: the watched tensors of the train state by their `id`, with their versions.
    """

    def __init__(self, step: GuardedStep, state: StateTensors, is_compiled: bool):
        self.step, self.learned = step, step.learned
        self.state, self.is_compiled = state, is_compiled
        self.log = UndoLog.of(state, step.learned, step.may_undo_update, is_compiled)
        watched = state.small_state if step.stock else state.all
        self.versions = {id(t): (t, t._version) for t in watched}

    # What the body has written so far

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
