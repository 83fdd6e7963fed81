"""What a step on PyTorch shows about its body, for later steps.

An eager body cannot be inspected before it runs. So each step shows which tensors it writes past
Keras, by the version that torch counts for each tensor, and what it does after its update.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from keras_nanguard._backends.torch import reductions
from keras_nanguard._backends.torch.judging import Judged
from keras_nanguard._backends.torch.parts import Learned, Parts, StepFacts
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._keras.tensors import local

PATIENCE = 100
"""Steps after which an optimizer that has not updated counts as one that never does."""


class Lesson:
    """What one step shows. Created before it runs.

    Args:
        before: what earlier steps have shown.
    """

    def __init__(
        self,
        step: StepFacts,
        parts: Parts,
        before: Learned,
        log: UndoLog,
        is_compiled: bool,
    ):
        self._step, self._parts, self._before = step, parts, before
        self._log, self._is_compiled = log, is_compiled
        watched = parts.small_state if step.stock else parts.all
        self._versions = [(t, t._version) for t in watched]
        self._versions_after: dict[int, tuple[Any, int]] = {}
        self._by_hand: tuple[list[Any], list[Any]] = [], []
        self._losses = 0

    def before_update(self, losses: int) -> None:
        """Note what the body has written before its first update, and the number of its losses so
        far.
        """
        if not self._step.stock:
            self._losses = losses
            self._by_hand = self._written(), self._written_uncounted()

    def after_update(self) -> None:
        """Note the state after an update."""
        if not (self._step.stock or self._before.continues):
            tensors = [tensor for tensor, _ in self._versions]
            tensors += [kept.tensor for kept in self._log.kept.values()]
            self._versions_after = {id(t): (t, t._version) for t in tensors}

    def learned(self, judged: Judged, updates: Sequence[Update], is_continued: bool) -> Learned:
        """Return what this step and those before it have shown, at its end.

        Args:
            is_continued: whether `Watch` has shown that the body continues.
        """
        before, losses = self._before, judged.observed.intercept.noted
        by_hand, uncounted = self._by_hand
        by_hand = [*by_hand, *_not_updated(self._written(), updates), *self._assigned()]
        uncounted = [*uncounted, *_not_updated(self._written_uncounted(), updates)]
        continues = self._continues(updates, losses, is_continued)
        is_one_of_several = self._step.run.agreement.count > 1
        return replace(
            before,
            untracked={**before.untracked, **{id(t): t for t in (*by_hand, *uncounted)}},
            tolerated=before.tolerated | judged.constants,
            keeps_undo=judged.keeps_undo if is_one_of_several else continues is not False,
            steps=before.steps + 1,
            stale=bool(self._log.created),
            unread={},
            continues=continues,
            updated_by=self._updated_by(updates),
            uncounted={**before.uncounted, **{id(t): t for t in uncounted}},
        )

    def _continues(self, updates: Sequence[Update], losses: int, is_continued: bool) -> bool | None:
        """Return whether the body continues after its first update, see `Learned`."""
        if self._step.stock:
            return False
        if self._before.continues or not updates:
            return self._before.continues
        has_more = len(updates) > 1 or updates[0].evaluates or is_continued
        if has_more or losses > self._losses or not losses or self._writes_after():
            return True
        known = {id(optimizer) for optimizer in self._parts.train_state.optimizers}
        has_seen_all = known <= self._updated_by(updates) or self._before.steps >= PATIENCE
        return False if has_seen_all else None

    def _updated_by(self, updates: Sequence[Update]) -> frozenset[int]:
        return self._before.updated_by | {id(update.optimizer) for update in updates}

    @property
    def has_written_weights(self) -> bool:
        """Whether a weight or slot was written so far."""
        updated = self._parts.updated
        return any(t._version != version for t, version in self._versions if id(t) in updated)

    def _written(self) -> list[Any]:
        """Return the tensors of the train state that were written past Keras so far."""
        changed = [t for t, version in self._versions if t._version != version]
        if not changed:
            return []
        kept = self._log.kept.items()
        by_keras = {k for k, entry in kept if self._is_compiled or entry.writer is not None}
        return [t for t in changed if id(t) not in by_keras]

    def _written_uncounted(self) -> list[Any]:
        """Return those whose value differs although torch has counted no write of them. Only the
        first steps read this.
        """
        if not self._before.is_fresh:
            return []
        kept = [self._log.kept.get(id(tensor)) for tensor, _ in self._versions]
        unwritten = [entry for entry in kept if entry is not None and not entry.is_written]
        return [entry.tensor for entry in unwritten if entry.differs]

    def _assigned(self) -> list[Any]:
        """Return what the eager step assigns to before it is compiled: a compiled one does not show
        it.
        """
        if not self._step.jit or self._is_compiled:
            return []
        parts, kept = self._parts, self._log.kept.items()
        listed = set(map(id, parts.all if self._step.stock else parts.small_state))
        return [e.tensor for key, e in kept if e.writer is not None and key not in listed]

    def _writes_after(self) -> bool:
        """Whether something that is judged was written after the last update."""
        parts, after = self._parts, self._versions_after
        written = [t for t, version in after.values() if t._version != version]
        written += [e.tensor for key, e in self._log.kept.items() if key not in after]
        if not written:
            return False
        unjudged = parts.judged_elsewhere - parts.updated
        unjudged |= {
            id(local(g)) for _, g in self._log.gradients or ()
        }  # the next step judges them
        # Of batch normalization torch counts only the writes of its integer buffer.
        buffers = set(map(id, parts.unlisted))
        return any(
            id(t) not in unjudged and (reductions.is_inexact(t) or id(t) in buffers)
            for t in written
        )


def _not_updated(tensors: list[Any], updates: Iterable[Update]) -> list[Any]:
    """Return the tensors that none of these updates may have written."""
    if not tensors:
        return []
    updated = {id(t) for update in updates for t in update.state()}
    return [t for t in tensors if id(t) not in updated]
