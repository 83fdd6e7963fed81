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
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._backends.torch.updates import Update, UpdateQueue
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._keras import attributes as keras_attributes, optimizers as keras_optimizers


class StepRun:
    """One run of the transaction, from the arguments of the body to its result.

    Args:
        transaction: the `Transaction`.
        args: the arguments of the body.

    Attributes:
        seen: the calls of optimizers and loss.
        is_compiled: whether the body is compiled, so that its writes are not recorded.
        log: what a refusal restores.
        queue: the updates, of which some wait for the verdict.
        judged: the verdict, if it was computed in the body.
    """

    judged: Judged | None = None

    def __init__(self, transaction: Any, args: Sequence[Any]):
        self.transaction, self.args, parts = transaction, args, transaction.parts
        self.seen = transaction.intercept()
        self.is_compiled = self.seen.body is not None
        may_add = transaction.is_fresh or transaction.learned.adds_to_gradients is not False
        holders = parts.holders if may_add and transaction.may_undo_update else ()
        # What a step finds stays alive until its end.
        self._gradients = [(t, t.grad) for t in holders if t.grad is not None]
        self.log = self._undo_log()
        watched = parts.small_state if transaction.stock else parts.all
        self._versions = [(t, t._version) for t in watched]
        self.queue = UpdateQueue(self.log, parts.other)

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
        learned = self._learned(judged)
        if judged.decision is Decision.CHECK:
            self.queue.flush(keep=True)
            judged = self._judge(outputs, raised)
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
        self.queue.waiting.clear()
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
                        self.queue.watch_from_update(stack)
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
        record.build()  # as Keras would, so that its variables are noted
        refuses = self.transaction.refuses
        if refuses and not self.is_compiled:
            self.queue.defer(record)
        else:
            self.queue.run(record, keep=refuses)

    @property
    def _can_be_undone(self) -> bool:
        """Whether the step may still be refused: no verdict has let its updates take effect."""
        undecided = self.judged is None or self.judged.decision is Decision.REFUSE
        return self.transaction.refuses and undecided

    # After the body

    def _judge(self, outputs: Any, raised: bool) -> Judged:
        transaction, seen = self.transaction, self.seen
        if self.log.created:
            transaction.read_parts()
        losses = [loss.detach() for loss in seen.losses or transaction.losses(outputs)]
        is_updated = self.queue.early or not transaction.refuses
        ran = Ran(seen, self.log, losses, raised, is_updated)
        return judge(ran, transaction.parts, transaction.learned, transaction.agreement)

    def _learned(self, judged: Judged) -> Facts:
        """Return what the body has shown for later steps."""
        before, log = self.transaction.learned, self.log
        early = self.queue.early and judged.decision is not Decision.CHECK
        adds = before.adds_to_gradients
        if self._gradients:
            adds = adds or any(log.kept[id(local(grad))].is_written for _, grad in self._gradients)
        uncounted = {id(tensor): tensor for tensor in self._written_uncounted()}
        untracked = {id(tensor): tensor for tensor in self._untracked()}
        return Facts(
            untracked={**before.untracked, **untracked, **uncounted},
            tolerated=before.tolerated | judged.constants,
            keeps_undo=before.keeps_undo or early,
            steps=before.steps + 1,
            stale=bool(log.created),
            adds_to_gradients=adds,
            uncounted={**before.uncounted, **uncounted},
        )

    def _untracked(self) -> list[Any]:
        """Return the tensors of the train state that were written past Keras so far."""
        transaction, kept = self.transaction, self.log.kept
        by_keras = {k for k, entry in kept.items() if self.is_compiled or entry.writer is not None}
        changed = [t for t, version in self._versions if t._version != version]
        changed = self._not_updated([t for t in changed if id(t) not in by_keras])
        # A compiled step does not show what it assigns to.
        if transaction.jit and not self.is_compiled:
            parts = transaction.parts
            listed = set(map(id, parts.all if transaction.stock else parts.small_state))
            changed += [kept[key].tensor for key in by_keras - listed]
        return changed

    def _written_uncounted(self) -> list[Any]:
        """Return those whose value differs although torch has counted no write of them. Only the
        first steps read this.
        """
        if not self.transaction.is_fresh:
            return []
        kept = [self.log.kept.get(id(tensor)) for tensor, _ in self._versions]
        unwritten = [entry for entry in kept if entry is not None and not entry.is_written]
        return self._not_updated([entry.tensor for entry in unwritten if entry.differs])

    def _not_updated(self, tensors: list[Any]) -> list[Any]:
        """Return the tensors that no update which has run may have written."""
        if not tensors:
            return []
        run = [record for record in self.seen.records if record not in self.queue.waiting]
        updated = {id(t) for record in run for t in record.state()}
        return [t for t in tensors if id(t) not in updated]

    def _commit(self, verdict: Verdict, learned: Facts) -> tuple[Verdict, Facts]:
        """Run the deferred updates, and read the updated state, now or with the next step."""
        transaction, queue = self.transaction, self.queue
        # The verdict did not see what is written past Keras for the first time.
        unseen = learned.untracked.keys() - self.log.kept.keys()
        unseen |= learned.uncounted.keys() - transaction.learned.uncounted.keys()
        is_read = queue.early and not queue.waiting
        queue.flush(keep=False)
        for created in queue.created:
            transaction.run.note_created(*created)
        if queue.created:
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


class StockRun(StepRun):
    """One run of Keras' own train step, in which nothing can fail after the update. The verdict is
    computed when it calls its update, so nothing large is copied.
    """

    def _on_update(self, record: Update) -> None:
        record.build()
        if self.judged is None:
            self.judged = self._judge(None, raised=False)
        if self.judged.decision is not Decision.REFUSE:
            self.queue.run(record, keep=self.judged.decision is Decision.CHECK)


def as_tensors(args: Sequence[Any]) -> Any:
    """Return the arguments of a step with arrays converted to tensors."""

    def converted(value: Any) -> Any:
        has_numbers = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
        return keras.ops.convert_to_tensor(value) if has_numbers else value

    return with_arrays(converted, tuple(args))
