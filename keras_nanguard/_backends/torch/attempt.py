"""One attempt of a step on PyTorch: what earlier steps have shown, its undo log, what its body has
done so far, and what that shows for later steps.

An eager body cannot be inspected before it runs. So each step shows which tensors it writes past
Keras, by the version that torch counts for each tensor; see `Learned`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from keras_nanguard._backends import interface
from keras_nanguard._backends.torch import reductions
from keras_nanguard._backends.torch.intercept import Recorder
from keras_nanguard._backends.torch.state import StateTensors
from keras_nanguard._backends.torch.undo_log import FoundGradients, UndoLog
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._core.verdict import Report

FIRST_STEPS = 2
"""Number of first steps in which the train state is read each time and everything is kept, to find
the tensors that a step writes.
"""

READ_EVERY = 100
"""Steps between two later readings of the train state."""


@dataclass(frozen=True)
class Learned(interface.Learned):
    """What the steps of one body have shown. Keys are the `id` of tensors; untracked ones are kept
    before each step. What is `None` is not known yet: the next step may do it.

    Attributes:
        steps: their number.
        stale: whether the train state has to be read again before the next one.
        unread: norms of the updated `weights` and `slots`, if they are still on a device. They are
            read with the verdict of the next step. If one is not finite, the tensors decide, which
            an action may have replaced until then.
        continues: whether the body may continue after its first update in a way that can make the
            step bad: with another update, loss or statistic, or because its loss is known at its
            end only; or in a way in which it must not wait for other processes before. `None` until
            it has updated. A body with several optimizers may.
        uncounted: keys of the untracked tensors whose writes torch does not count (`p.data.mul_`).
        adds_by_hand: whether the body adds to the gradients that it finds without a backward pass
            that is seen (`p.grad += new`, a compiled body), so that they are kept before each step.
            `None` until it has found some.
    """

    updates_first: bool = True
    steps: int = 0
    stale: bool = True
    continues: bool | None = None
    unread: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    uncounted: frozenset[int] = frozenset()
    adds_by_hand: bool | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether it is not known yet what the body writes."""
        return self.steps < FIRST_STEPS

    @property
    def is_reading_due(self) -> bool:
        """Whether the train state has to be read again before the next step."""
        return self.stale or self.is_fresh or self.steps % READ_EVERY == 0

    def after_error(self) -> Learned:
        """Return what is known after a step that has ended in an exception."""
        return replace(self, steps=self.steps + 1, stale=True)

    def of_another_body(self) -> Learned:
        """Return what is assumed of a body that may be another one: what this one has not done,
        that one may do.
        """
        return replace(
            self,
            steps=min(self.steps, 1),
            stale=True,
            continues=self.continues or None,
            updates_first=True,
            adds_by_hand=self.adds_by_hand or None,
        )


class GuardedStep(interface.Transaction):
    """The facts about a step that its runs use and do not change. With `jit` its body, `replayed`,
    is compiled once its writes are known.
    """

    learned: Learned

    reports: list[Report]
    """Those of bad steps that the host has not taken yet."""

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
        by_hand_before: what `written_by_hand` was then.
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
        self.shows_losses = not (step.stock or step.jit)
        self.log = self._new_log()
        watched = state.small_state if step.stock else state.all
        self.versions = {id(t): (t, t._version) for t in watched}
        self.losses_before = 0
        self.by_hand_before: dict[int, tuple[Any, bool]] = {}
        self.updated: list[Update] = []
        self.created: list[tuple[Any, Any]] = []
        self.versions_after: dict[int, tuple[Any, int]] = {}
        self.outputs: Any = None
        self.raised = False

    def _new_log(self) -> UndoLog:
        """Return the log of this run, with copies of what it may write unnoticed."""
        step, state, learned = self.step, self.state, self.learned
        undoes_updates, is_compiled = step.may_undo_update, self.is_compiled
        untracked = learned.untracked.items()
        uncounted = [*state.unlisted, *state.buffers()]
        uncounted += [tensor for key, tensor in untracked if key in learned.uncounted]
        kept = [tensor for key, tensor in untracked if key not in learned.uncounted]
        if learned.is_fresh:
            kept += state.other
            kept += state.weights_and_slots if undoes_updates else ()
        if is_compiled:
            uncounted, kept = [*uncounted, *state.small_state, *kept], []
        at_first = learned.adds_by_hand is not False
        log = UndoLog(
            kept,
            uncounted,
            attributes=state.attributes(every=learned.is_fresh),
            restore_modes=state.modes.restorer(),
            gradients=FoundGradients(state.gradient_holders, undoes_updates, at_first),
        )
        # `LateWrites` keeps those of an eager step when they update.
        for optimizer in state.unlisted_optimizers if undoes_updates and is_compiled else ():
            log.keep_updated(optimizer, (), copies=True)
        return log

    @property
    def has_written_weights(self) -> bool:
        """Whether a weight or slot was written."""
        updated, versions = self.state.updated, self.versions.items()
        return any(t._version != version for key, (t, version) in versions if key in updated)

    def written_by_hand(self) -> dict[int, tuple[Any, bool]]:
        """Return the tensors of the train state that were written past Keras, by their `id`, each
        with whether torch has counted it. Only the first steps compare values to find the others.
        """
        by_keras = self.log.kept if self.is_compiled else self.log.writers
        changed = [(k, t) for k, (t, version) in self.versions.items() if t._version != version]
        found = {key: (t, True) for key, t in changed if key not in by_keras}
        for key in self.versions if self.learned.is_fresh else ():
            kept = self.log.kept.get(key)
            if kept is not None and not kept.is_written and kept.differs:
                found[key] = kept.tensor, False
        return found

    def versions_now(self) -> dict[int, tuple[Any, int]]:
        """Return the watched and the kept tensors by their `id`, with their current versions."""
        tensors = {key: tensor for key, (tensor, _) in self.versions.items()}
        tensors |= {key: kept.tensor for key, kept in self.log.kept.items()}
        return {key: (tensor, tensor._version) for key, tensor in tensors.items()}

    def note_created(self) -> None:
        """Tell the host which variables Keras has created so far; tolerate Inf and NaN that they
        had at first on purpose.
        """
        step, before = self.step, self.learned
        if self.log.created:
            for pair in self.log.created:
                step.run.note_created(*pair)
            tolerated = {key for v in step.run.tolerate_created() for key in step.keys_of(v)}
            self.learned = replace(before, tolerated=before.tolerated | tolerated)

    def release(self) -> None:
        """Forget everything: an exception that refers to this run would keep its tensors."""
        vars(self.log).clear()
        vars(self).clear()

    # What it shows for later steps

    def learned_after(self, constants: frozenset[int], any_continues: bool) -> Learned:
        """Return what this step, which has run, and those before it have shown.

        Args:
            constants: the `id` of its statistics that are infinite on purpose.
            any_continues: whether the body of any process may continue after its update.
        """
        before, continues = self.learned, self._continues()
        written = self._assigned() | self._not_updated(self.written_by_hand()) | self.by_hand_before
        self.log.gradients.choose()
        adds = self.log.gradients.added_by_hand
        is_one_of_several = self.step.run.agreement.count > 1
        return replace(
            before,
            untracked={**before.untracked, **{key: t for key, (t, _) in written.items()}},
            tolerated=before.tolerated | constants,
            updates_first=any_continues if is_one_of_several else continues is not False,
            steps=before.steps + 1,
            stale=bool(self.log.created or self.created),
            unread={},
            continues=continues,
            uncounted=before.uncounted.union(k for k, (_, seen) in written.items() if not seen),
            adds_by_hand=before.adds_by_hand if adds is None else before.adds_by_hand or adds,
        )

    def _continues(self) -> bool | None:
        """Return whether the body continues after its first update, see `Learned`."""
        before, updates, noted = self.learned.continues, self.updated, self.loss_count
        if self.step.stock:
            return False
        if before or not updates:
            return before
        has_several = len(self.state.train_state.optimizers) > 1 or len(updates) > 1
        has_late_losses = not noted or noted > self.losses_before
        is_continued = has_several or has_late_losses or self.late_writes.continues
        return is_continued or updates[0].evaluates or self._writes_after()

    def _writes_after(self) -> bool:
        """Whether something that is judged was written after the last update."""
        state, log, after = self.state, self.log, self.versions_after
        written = [t for t, version in after.values() if t._version != version]
        written += [entry.tensor for key, entry in log.kept.items() if key not in after]
        if not written:
            return False
        # The next step judges the sum of the gradients.
        unjudged = (state.not_statistics - state.updated) | log.gradients.kept_ids
        # Of batch normalization torch counts only the writes of its integer buffer.
        buffers = set(map(id, state.unlisted))
        return any(
            id(t) not in unjudged and (reductions.is_inexact(t) or id(t) in buffers)
            for t in written
        )

    def _assigned(self) -> dict[int, tuple[Any, bool]]:
        """Return what a step assigns to before it is compiled; a compiled one does not show it."""
        step, state = self.step, self.state
        if not step.jit or self.is_compiled:
            return {}
        listed = set(map(id, state.all if step.stock else state.small_state))
        writers = self.log.writers.keys() - listed
        return {key: (self.log.kept[key].tensor, True) for key in writers}

    def _not_updated(self, written: dict[int, tuple[Any, bool]]) -> dict[int, tuple[Any, bool]]:
        """Return those of these tensors that none of its updates may have written."""
        if not written:
            return {}
        updated = {id(t) for update in self.updated for t in update.written()}
        return {key: entry for key, entry in written.items() if key not in updated}
