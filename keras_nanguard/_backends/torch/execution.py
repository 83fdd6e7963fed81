"""One run of the transaction on PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.shared.batches import with_arrays
from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.intercept import is_numeric
from keras_nanguard._backends.torch.judging import Decision, Facts, Judged, Ran, judge, read_update
from keras_nanguard._backends.torch.modules import local
from keras_nanguard._backends.torch.undo_log import WRITES, UndoLog
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._backends.torch.watch import Watch
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._keras import attributes as keras_attributes, optimizers as keras_optimizers


class StepRun:
    """One run of the transaction, from the arguments of the body to its result.

    The verdict is computed when the body calls its update, so a refused step is never updated. A
    body that goes on after its update is updated at once, with the old values kept, and the verdict
    is computed at its end.

    Args:
        transaction: the `Transaction`.
        args: the arguments of the body.

    Attributes:
        seen: the calls of optimizers and loss.
        is_compiled: whether the body is compiled, so that its writes are not recorded.
        keeps_undo: whether it is updated at once, with the old values kept.
        log: what a refusal restores.
        updates: the updates that have run.
        judged: the verdict, if it was computed in the body.
    """

    judged: Judged | None = None

    def __init__(self, transaction: Any, args: Sequence[Any]):
        self.transaction, self.args, parts = transaction, args, transaction.parts
        self.seen = transaction.intercept()
        self.is_compiled = self.seen.body is not None
        keeps_undo = self.is_compiled or transaction.is_fresh or transaction.learned.keeps_undo
        self.keeps_undo = transaction.may_undo_update and keeps_undo
        may_add = transaction.is_fresh or transaction.learned.adds_to_gradients is not False
        holders = parts.holders if may_add and transaction.may_undo_update else ()
        # What a step finds stays alive until its end.
        self._gradients = [(t, t.grad) for t in holders if t.grad is not None]
        self.log = self._undo_log()
        watched = parts.small_state if transaction.stock else parts.all
        self._versions = [(t, t._version) for t in watched]
        self._versions_after: dict[int, tuple[Any, int]] = {}
        self._by_hand: tuple[list[Any], list[Any]] = [], []
        self._knows_loss = False
        self.updates: list[Update] = []
        self._created: list[tuple[Any, Any]] = []
        self._watch = Watch()

    def _undo_log(self) -> UndoLog:
        """Return the undo log of the step, with copies of what it may write unnoticed."""
        transaction, parts = self.transaction, self.transaction.parts
        learned = transaction.learned
        uncounted = [*parts.unlisted, *learned.uncounted.values()]
        kept = list(learned.untracked.values())
        kept += [local(grad) for _, grad in self._gradients]
        if transaction.is_fresh:
            kept += parts.other
            kept += parts.weights_and_slots if transaction.may_undo_update else ()
        if self.is_compiled:
            uncounted, kept = [*uncounted, *parts.small_state, *kept], []
        log = UndoLog(kept, uncounted)
        attributes = parts.attributes(every=transaction.is_fresh)
        log.at_undo("attributes", partial(keras_attributes.give_back_tensors, attributes))
        log.at_undo("gradients", self._restore_gradients)
        for optimizer in parts.loose if transaction.may_undo_update else ():
            log.at_undo(id(optimizer), optimizer.held())
        return log

    def _restore_gradients(self) -> None:
        """Restore the gradients of a body that accumulates them; for any other leave none."""
        for tensor in self.transaction.parts.holders:
            tensor.grad = None
        for tensor, grad in self._gradients:
            tensor.grad = grad

    def complete(self) -> tuple[Any, Verdict, Facts, list[Report]]:
        """Run the step; commit or refuse it. Return the outputs, `None` if the body raised an
        exception about a bad number, the verdict, what the steps have shown, and the report of a
        bad one.
        """
        refuses = self.transaction.refuses
        outputs, raised = self._run_body()
        judged = self.judged or self._judge(outputs, raised)
        if judged.decision is Decision.CHECK:
            judged = self._judge(outputs, raised)
        learned = self._learned(judged)
        reports: list[Report] = []
        if judged.decision is Decision.REFUSE:
            with contextlib.suppress(Exception):  # the step is refused even without a description
                reports.append(self._report(judged))
        if judged.decision is Decision.REFUSE and refuses:
            return outputs, self._refuse(judged.verdict), learned, reports
        return outputs, *self._commit(judged.verdict, learned), reports

    def release(self) -> None:
        """Release all tensors, so that an exception that refers to this run does not keep them."""
        self.seen.release()
        self.log.release()
        vars(self).clear()

    # In the body

    def _run_body(self) -> tuple[Any, bool]:
        """Run the body; return its outputs, and whether torch has raised about a bad number."""
        transaction = self.transaction
        body = self.seen.body or transaction.body
        try:
            with contextlib.ExitStack() as stack:
                if not self.is_compiled:
                    stack.enter_context(self.log)
                    if transaction.may_undo_update:
                        self._watch.wait(stack)
                stack.enter_context(self.seen.running(self._on_update))
                return body(*self.args), False
        except Exception as error:
            if self._can_be_undone and is_numeric(error):
                return None, True
            if self._can_be_undone:
                self.log.give_back()
            if transaction.agreement.count > 1:
                host.leave(error)
            raise
        finally:
            for created in self.log.created:
                transaction.run.note_created(*created)

    def _on_update(self, record: Update) -> None:
        """Run the update, unless the verdict on the step refuses it."""
        record.build()  # as Keras would, so that its variables are noted
        if not (self.updates or self.transaction.stock):
            self._knows_loss = bool(self.seen.losses)
            self._by_hand = self._changed(), self._changed_uncounted()
        if record.evaluates and self.judged is None:
            self.keeps_undo = self.transaction.may_undo_update
        if self.transaction.refuses and not self.keeps_undo:
            self._judge_update()
        if self.judged is None or self.judged.decision is not Decision.REFUSE:
            self._update(record)
        else:
            self._watch.begin()  # the body may go on

    def _judge_update(self) -> None:
        """Compute the verdict on what the body has done until its update."""
        if self.judged is None:
            self.judged = self._judge(None, raised=False)
        elif self.judged.decision is not Decision.REFUSE:  # a further update, for the first time
            self.judged = self._judge(None, raised=False, alone=True)
        self.keeps_undo = self.judged.decision is Decision.CHECK

    def _update(self, record: Update) -> None:
        """Run an update."""
        if self.keeps_undo:
            self.log.keep_updated(record.optimizer, record.state())
        if self.keeps_undo or WRITES.inside()[1:]:  # or all of this step is to be undone
            self._watch.begin()
        with contextlib.nullcontext() if record.has_hooks else self._watch.paused():
            self._created += record.run()
        self.updates.append(record)
        if not (self.transaction.stock or self.transaction.learned.goes_on):
            tensors = [tensor for tensor, _ in self._versions]
            tensors += [kept.tensor for kept in self.log.kept.values()]
            self._versions_after = {id(t): (t, t._version) for t in tensors}

    @property
    def _can_be_undone(self) -> bool:
        """Whether the step may still be refused: everything that it has written is kept."""
        return self.transaction.refuses and (self.keeps_undo or not self.updates)

    # After the body

    def _judge(self, outputs: Any, raised: bool, alone: bool = False) -> Judged:
        transaction, seen = self.transaction, self.seen
        if self.log.created:
            transaction.read_parts()
        losses = [loss.detach() for loss in seen.losses or transaction.losses(outputs)]
        ran = Ran(seen, self.log, losses, raised, bool(self.updates))
        agreement = None if alone else transaction.agreement
        return judge(ran, transaction.parts, transaction.learned, agreement)

    def _learned(self, judged: Judged) -> Facts:
        """Return what the body has shown for later steps."""
        transaction, log = self.transaction, self.log
        before = transaction.learned
        adds = before.adds_to_gradients
        if self._gradients:
            adds = adds or any(log.kept[id(local(grad))].is_written for _, grad in self._gradients)
        by_hand, unnoticed = self._by_hand
        by_hand = [*by_hand, *self._not_updated(self._changed()), *self._assigned_in_compiled()]
        unnoticed = [*unnoticed, *self._not_updated(self._changed_uncounted())]
        uncounted = {id(tensor): tensor for tensor in unnoticed}
        goes_on = self._goes_on()
        several = transaction.agreement.count > 1
        return Facts(
            untracked={**before.untracked, **{id(t): t for t in by_hand}, **uncounted},
            tolerated=before.tolerated | judged.constants,
            keeps_undo=judged.keeps_undo if several else goes_on is not False,
            steps=before.steps + 1,
            stale=bool(log.created),
            goes_on=goes_on,
            adds_to_gradients=adds,
            uncounted={**before.uncounted, **uncounted},
        )

    def _changed(self) -> list[Any]:
        """Return the tensors of the train state that were written past Keras so far."""
        kept = self.log.kept
        by_keras = {k for k, entry in kept.items() if self.is_compiled or entry.writer is not None}
        changed = [t for t, version in self._versions if t._version != version]
        return [t for t in changed if id(t) not in by_keras]

    def _changed_uncounted(self) -> list[Any]:
        """Return those whose value differs although torch has counted no write of them. Only the
        first steps read this.
        """
        if not self.transaction.is_fresh:
            return []
        kept = [self.log.kept.get(id(tensor)) for tensor, _ in self._versions]
        unwritten = [entry for entry in kept if entry is not None and not entry.is_written]
        return [entry.tensor for entry in unwritten if entry.differs]

    def _assigned_in_compiled(self) -> list[Any]:
        """Return the tensors that the eager step assigns to before it is compiled, as a compiled
        step does not show them.
        """
        transaction, parts = self.transaction, self.transaction.parts
        if not transaction.jit or self.is_compiled:
            return []
        listed = set(map(id, parts.all if transaction.stock else parts.small_state))
        kept = self.log.kept.items()
        return [e.tensor for key, e in kept if e.writer is not None and key not in listed]

    def _not_updated(self, tensors: list[Any]) -> list[Any]:
        """Return the tensors that no update which has run may have written."""
        if not tensors:
            return []
        updated = {id(t) for record in self.updates for t in record.state()}
        return [t for t in tensors if id(t) not in updated]

    def _goes_on(self) -> bool | None:
        """Return whether the body goes on after its first update, see `Facts`."""
        transaction = self.transaction
        if transaction.stock or transaction.learned.goes_on or not self.updates:
            return False if transaction.stock else transaction.learned.goes_on
        further = len(self.updates) > 1 or self.updates[0].evaluates or self._watch.found
        return further or not self._knows_loss or self._writes_after()

    def _writes_after(self) -> bool:
        """Whether something that is judged was written after the last update."""
        parts, after = self.transaction.parts, self._versions_after
        written = [t for t, version in after.values() if t._version != version]
        written += [e.tensor for key, e in self.log.kept.items() if key not in after]
        unjudged = parts.judged_elsewhere - parts.updated
        return any(id(t) not in unjudged and reductions.is_inexact(t) for t in written)

    def _commit(self, verdict: Verdict, learned: Facts) -> tuple[Verdict, Facts]:
        """Read the updated state, unless the verdict has, now or with the next step."""
        transaction = self.transaction
        # The verdict did not see what is written past Keras for the first time.
        unseen = learned.untracked.keys() - self.log.kept.keys()
        unseen |= learned.uncounted.keys() - transaction.learned.uncounted.keys()
        is_read = self.keeps_undo
        for created in self._created:
            transaction.run.note_created(*created)
        if self._created:
            learned, is_read = replace(learned, stale=True), False
            transaction.read_parts()
        is_due = bool(self.seen.records) and not is_read
        is_due = is_due or not transaction.parts.updated.isdisjoint(unseen)
        if not (transaction.refuses and is_due):
            return verdict, learned
        verdict, unread = read_update(transaction.parts, verdict, transaction.agreement)
        return verdict, replace(learned, unread=unread)

    def _refuse(self, verdict: Verdict) -> Verdict:
        """Undo the step; each loss scale is updated. Return the verdict."""
        self.log.give_back()
        optimizers = self.transaction.parts.train_state.optimizers
        for optimizer in filter(keras_optimizers.scales_of, optimizers):
            scale, counter = keras_optimizers.scales_of(optimizer)
            before = float(scale.value), int(counter.value), optimizer.initial_scale
            after = rules.learned_scale(rules.NUMBERS, verdict.loss, verdict.gradients, *before)
            scale.assign(after[0])
            counter.assign(after[1])
        return verdict._replace(refused=True)

    def _report(self, judged: Judged) -> Report:
        """Return the report of a bad step of this process. No argument is copied."""
        places = judged.places(self.transaction.parts)
        return Report(
            judged.own._replace(refused=self.transaction.refuses),
            tuple((site, path) for site, path, _ in places),
            reductions.counts([tensor for _, _, tensor in places]),
            as_tensors(self.args),
            left_by_previous=judged.left_by_previous,
        )


def as_tensors(args: Sequence[Any]) -> Any:
    """Return the arguments of a step with arrays converted to tensors."""

    def converted(value: Any) -> Any:
        has_numbers = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
        return keras.ops.convert_to_tensor(value) if has_numbers else value

    return with_arrays(converted, tuple(args))
