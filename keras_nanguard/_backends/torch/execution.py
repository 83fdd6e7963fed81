"""One run of the transaction on PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_nanguard._backends import interface
from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.intercept import is_numeric
from keras_nanguard._backends.torch.judging import Decision, Facts, Judged, Ran, judge, read_update
from keras_nanguard._backends.torch.modules import local
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._backends.torch.updates import Update, UpdateQueue, Watch
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._keras import (
    attributes as keras_attributes,
    optimizers as keras_optimizers,
    variables as keras_variables,
)


class Done(NamedTuple):
    """The result of one run of the transaction.

    Attributes:
        outputs: what the body has returned, `None` if it raised an exception about a bad number.
        verdict: the verdict.
        reports: the report, if the step was bad.
        learned: what the steps so far have shown.
    """

    outputs: Any
    verdict: Verdict
    reports: Sequence[Report]
    learned: Facts


class StepRun:
    """One run of the transaction.

    Args:
        transaction: the `Transaction`.
        args: the arguments of the body.

    Attributes:
        seen: the calls of optimizers and loss.
        is_compiled: whether the body is compiled, so that its writes are not recorded.
        log: what a refusal restores.
        queue: the updates, of which some wait for the verdict.
        created: the tensors of the variables that Keras has created meanwhile.
        judged: the verdict and the decision, once there is one.
    """

    def __init__(self, transaction: Any, args: Sequence[Any]):
        self.transaction, self.args = transaction, args
        learned, parts = transaction.learned, transaction.parts
        self.seen = transaction.intercept()
        self.is_compiled = self.seen.body is not None
        self.created: list[Any] = []
        self.judged: Judged | None = None
        adds = transaction.is_fresh or learned.adds_to_gradients
        found = [(t, t.grad) for t in parts.holders] if adds and transaction.may_undo_update else []
        # What a step finds stays alive until its end.
        self._gradients = [(t, grad) for t, grad in found if grad is not None]
        self.log = self._undo_log()
        watched = parts.small_state if transaction.stock else parts.all
        self._versions = [(t, t._version) for t in watched]
        self.queue = UpdateQueue(self.log, parts.other)

    def _undo_log(self) -> UndoLog:
        """Return the undo log of the step, with copies of what it may write unnoticed: anything in
        its first steps, then what they have shown; if it is compiled, all of the small state.
        """
        transaction, parts = self.transaction, self.transaction.parts
        note_created = partial(_note_created, transaction.run, self.created)
        kept = list(transaction.learned.untracked.values())
        kept += [local(grad) for _, grad in self._gradients]
        if transaction.is_fresh:
            kept += parts.other
            kept += parts.weights_and_slots if transaction.may_undo_update else ()
        if self.is_compiled:
            log = UndoLog((), [*parts.unlisted, *parts.small_state, *kept], note_created)
        else:
            log = UndoLog(kept, parts.unlisted, note_created)
        attributes = parts.attributes(every=transaction.is_fresh)
        log.at_undo("attributes", partial(keras_attributes.give_back_tensors, attributes))
        log.at_undo("gradients", partial(_restore_gradients, transaction, self._gradients))
        for optimizer in parts.loose if transaction.may_undo_update else ():
            log.at_undo(id(optimizer), optimizer.held())
        return log

    def complete(self) -> Done:
        """Run the step; commit or refuse it."""
        transaction = self.transaction
        outputs, raised = self._run_body()
        judged = self.judged or self._judge(outputs, raised)
        learned, writes_unkept = self._learned(judged)
        if judged.decision is Decision.CHECK:
            self.queue.flush(keep=True)
            judged = self._judge(outputs, raised)
        is_bad = judged.decision is Decision.REFUSE
        reports: list[Report] = []
        if is_bad:
            with contextlib.suppress(Exception):  # the step is refused even without a description
                reports.append(self._report(judged))
        if is_bad and transaction.refuses:
            verdict = self._refuse(judged)
        else:
            verdict, learned = self._commit(judged, learned, writes_unkept)
        return Done(outputs, verdict, reports, learned)

    # Running the body

    def _run_body(self) -> tuple[Any, bool]:
        """Run the body; return its outputs, and whether it has raised an exception about a bad
        number.
        """
        transaction, body = self.transaction, self.seen.body or self.transaction.body
        try:
            with contextlib.ExitStack() as stack:
                watch = Watch(self.queue, stack)
                if not self.is_compiled:
                    stack.enter_context(self.log)
                if transaction.may_undo_update and not transaction.jit:
                    watch.begin_with_unknown()
                stack.enter_context(self.seen.running(partial(self._on_update, watch)))
                return body(*self.args), False
        except Exception as error:
            if not (self._can_be_undone and is_numeric(error)):
                self._abandon(error)
                raise
            return None, True

    def _on_update(self, watch: Watch, record: Update) -> None:
        """Run an update now if it may or must run before the end of the step."""
        transaction, queue = self.transaction, self.queue
        # The optimizer is built now, as Keras would, so that its variables are noted.
        record.build()
        if not transaction.refuses:
            queue.run(record, keep=False)
        elif transaction.stock:
            self._run_judged(record)
        elif self.is_compiled or record.is_immediate:
            queue.run(record, keep=True)
        else:
            queue.defer(record)
        if not (transaction.stock or self.is_compiled):
            watch.begin()

    def _run_judged(self, record: Update) -> None:
        """Run the update of Keras' own step, unless the verdict, which is known now, forbids it."""
        if self.judged is None:
            self.judged = self._judge(None, raised=False)
        if self.judged.decision is not Decision.REFUSE:
            self.queue.run(record, keep=self.judged.decision is Decision.CHECK)

    @property
    def _can_be_undone(self) -> bool:
        """Whether the step may still be refused: no decision has let its updates take effect."""
        undecided = self.judged is None or self.judged.decision is Decision.REFUSE
        return self.transaction.refuses and undecided

    def _abandon(self, error: Exception) -> None:
        """Undo a step that ends in an exception. After its update nothing is kept and nothing can
        be undone.
        """
        if self._can_be_undone:
            self.log.give_back()
        if self.transaction.is_shared:
            host.leave(error)

    # What later steps need

    def _learned(self, judged: Judged) -> tuple[Facts, bool]:
        """Return what the body has shown for later steps, and whether it has written weights or
        slots that are not kept, so that the verdict did not see it.
        """
        before, log = self.transaction.learned, self.log
        untracked = {id(tensor): tensor for tensor in self._untracked()}
        early = self.queue.early and judged.decision is not Decision.CHECK
        adds = any(log.counted(local(grad)) for _, grad in self._gradients)
        learned = Facts(
            untracked={**before.untracked, **untracked},
            tolerated=before.tolerated | judged.constants,
            keeps_undo=before.keeps_undo or early,
            steps=before.steps + 1,
            stale=bool(self.created),
            adds_to_gradients=before.adds_to_gradients or adds,
        )
        unkept = untracked.keys() - log.old.keys()
        return learned, not self.transaction.parts.updated.isdisjoint(unkept)

    def _untracked(self) -> list[Any]:
        """Return the tensors of the train state that were written past Keras so far."""
        transaction, log = self.transaction, self.log
        recorded = log.old if self.is_compiled else log.writers
        changed = [t for t, version in self._versions if t._version != version]
        changed = [tensor for tensor in changed if id(tensor) not in recorded]
        if changed:
            run = [record for record in self.seen.records if record not in self.queue.waiting]
            updated = {id(t) for record in run for t in record.state()}
            changed = [t for t in changed if id(t) not in updated]
        # A compiled step does not show what it assigns to.
        if transaction.jit and not self.is_compiled:
            kept = transaction.parts.all if transaction.stock else transaction.parts.small_state
            keys = log.writers.keys() - {id(tensor) for tensor in kept}
            changed += [log.old[key].tensor for key in keys]
        return changed

    # The end of the step

    @property
    def _is_updated(self) -> bool:
        """Whether an update has run before the verdict."""
        return self.queue.early or not self.transaction.refuses

    def _judge(self, outputs: Any, raised: bool) -> Judged:
        transaction, seen = self.transaction, self.seen
        if self.created:
            transaction.read_parts()
        losses = [loss.detach() for loss in seen.losses or transaction.losses(outputs)]
        ran = Ran(seen, self.log, losses, raised, self._is_updated)
        return judge(ran, transaction.parts, transaction.learned, transaction.agreement)

    def _commit(
        self, judged: Judged, learned: Facts, writes_unkept: bool
    ) -> tuple[Verdict, Facts]:
        """Run the deferred updates, and read the updated state, now or with the next step; return
        the verdict, and what the steps have shown.

        Args:
            judged: the verdict so far.
            learned: what the steps have shown so far.
            writes_unkept: whether the state is to be read also without updates, because the verdict
                did not see all that the body has written.
        """
        transaction, queue = self.transaction, self.queue
        is_read = self._is_updated and not queue.waiting
        queue.flush(keep=False)
        for tensor, value in queue.created:
            transaction.run.note_created(tensor, value)
        if queue.created:
            learned = replace(learned, stale=True)
            transaction.read_parts()
        is_due = bool(self.seen.records) and not (is_read and not queue.created)
        if not transaction.refuses or not (is_due or writes_unkept):
            return judged.verdict, learned
        verdict, unread = read_update(transaction.parts, judged.verdict, transaction.is_shared)
        return verdict, replace(learned, unread=unread)

    def _refuse(self, judged: Judged) -> Verdict:
        """Undo the step; each loss scale is updated. Return the verdict."""
        self.log.give_back()
        verdict = judged.verdict
        for optimizer in self.transaction.parts.train_state.optimizers:
            if keras_optimizers.is_loss_scaled(optimizer) and optimizer.built:
                scale, counter = optimizer.dynamic_scale, optimizer.step_counter
                before = float(scale.value), int(counter.value), optimizer.initial_scale
                after = rules.learned_scale(rules.NUMBERS, verdict.loss, verdict.gradients, *before)
                scale.assign(after[0])
                counter.assign(after[1])
        return verdict._replace(refused=True)

    def _report(self, judged: Judged) -> Report:
        """Return the report of a bad step, with the numbers of this process. No argument is copied.
        """
        places = judged.places(self.transaction.parts)
        return Report(
            judged.own._replace(refused=self.transaction.refuses),
            tuple((site, path) for site, path, _ in places),
            reductions.counts([tensor for _, _, tensor in places]),
            as_tensors(self.args),
            left_by_previous=judged.left_by_previous,
        )


def _note_created(run: interface.Run, created: list[Any], variable: Any) -> None:
    """Note a variable that Keras has created, with its first value."""
    tensor = variable.value
    if not tensor.is_meta:
        created.append(tensor)
        run.note_created(tensor, keras_variables.read(variable))


def _restore_gradients(transaction: Any, kept: Sequence[tuple[Any, Any]]) -> None:
    """Restore the gradients of a body that accumulates them; for any other leave none."""
    for tensor in transaction.parts.holders:
        tensor.grad = None
    for tensor, grad in kept:
        tensor.grad = grad


def as_tensors(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of a step with arrays converted to tensors."""
    converted: tuple[Any, ...] = keras.tree.map_structure(_as_tensor, tuple(args))
    return converted


def _as_tensor(value: Any) -> Any:
    has_numbers = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    return keras.ops.convert_to_tensor(value) if has_numbers else value
