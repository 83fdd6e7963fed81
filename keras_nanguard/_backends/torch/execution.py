"""One run of the transaction on PyTorch; `step` has its outline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.arguments import as_tensors
from keras_nanguard._backends.torch.backup import Backup
from keras_nanguard._backends.torch.intercept import Compiled, Intercept
from keras_nanguard._backends.torch.judging import CHECK, REFUSE, Judgement
from keras_nanguard._backends.torch.numeric_errors import is_numeric
from keras_nanguard._backends.torch.update_queue import UpdateQueue
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a guarded step, and the facts that later steps need.

    Attributes:
        outputs: what the body returned; `None` if it raised an exception about a bad number.
        verdict: the numbers of the step; means over all processes, if there are several.
        report: its report, `None` if it is healthy.
        unread: norms of the updated `weights` and `slots`, if they are still on a device. They are
            read with the verdict of the next step.
        slot_versions: `Parts.slot_versions` at its end.
        untracked: tensors that the body has written in place outside of Keras.
        constants: the `id` of tensors that are infinite on purpose.
        adds_to_gradients: whether the body has added to the gradients that it found.
        needed_undo: whether an update had to run before the verdict.
    """

    outputs: Any
    verdict: Verdict
    report: Report | None
    unread: Mapping[str, Sequence[Any]]
    slot_versions: Mapping[int, Sequence[int]]
    untracked: Sequence[Any]
    constants: Set[int]
    adds_to_gradients: bool
    needed_undo: bool


class StepRun:
    """One run of the transaction.

    Args:
        transaction: the `Transaction`.
        args: the arguments of the body.

    Attributes:
        seen: the calls of optimizers and loss.
        is_compiled: whether the body is compiled.
        backup: what a refusal restores.
        updates: the updates, of which some wait for the verdict.
        judgement: the verdict and the decision.
        error: the exception about a bad number that ended the body, if any.
        has_created: whether the step has created variables, so that the train state has to be read
            again.
    """

    def __init__(self, transaction: Any, args: Sequence[Any]):
        self.transaction, self.args = transaction, args
        self.has_created = False
        self.error: BaseException | None = None
        self.seen: Intercept = transaction.intercept()
        self.is_compiled = isinstance(self.seen, Compiled)
        self.backup = Backup(
            transaction,
            is_compiled=self.is_compiled,
            note_created=self._note_created,
            before_write=None if transaction.stock else self._before_write,
        )
        watches = not (transaction.stock or self.is_compiled)
        self.updates = UpdateQueue(self.backup.log, watches)
        self.judgement = Judgement(transaction, self.seen, self.backup.log)

    def complete(self) -> StepResult:
        """Run the step; commit or refuse it."""
        transaction, judgement = self.transaction, self.judgement
        outputs = self._run_body()
        adds_to_gradients = self.backup.gradients_were_added_to
        if judgement.decision is None:
            self._judge(outputs)
        untracked = self._untracked()
        needed_undo = self.updates.early and judgement.decision != CHECK
        if judgement.decision == CHECK and transaction.refuse:
            self.updates.flush(keep=True)
            judgement.judge_update()
        refused = judgement.decision == REFUSE
        report = self._report() if refused else None
        unread: Mapping[str, Sequence[Any]] = {}
        if refused and transaction.refuse:
            self._refuse()
        else:
            unread = self._commit()
        return StepResult(
            outputs,
            judgement.verdict,
            report,
            unread,
            transaction.parts.slot_versions(),
            untracked,
            judgement.constants,
            adds_to_gradients,
            needed_undo,
        )

    def close(self) -> None:
        """Release the gradients. A run and what records it refer to each other and would wait for
        the garbage collector.
        """
        self.seen.release()
        vars(self).clear()

    # Running the body

    def _run_body(self) -> Any:
        """Run the body and return its outputs; `None` if it raised an exception about a bad
        number.
        """
        transaction = self.transaction
        body = self.seen.body if isinstance(self.seen, Compiled) else transaction.body
        with self.backup.log, self.seen.running(self._on_update), self.updates:
            try:
                return body(*self.args)
            except Exception as error:
                if not (self._can_be_undone and is_numeric(error)):
                    self._abandon(error)
                    raise
                self.error = error
                return None

    def _on_update(self, record: Update) -> None:
        """Run an update now if it may or must run before the end of the step."""
        transaction, updates, judgement = self.transaction, self.updates, self.judgement
        # The optimizer is built now, as Keras would, so that its variables are noted.
        self.has_created |= record.build()
        if record.is_immediate:
            updates.run(record, keep=True)
        elif not transaction.refuse:
            updates.run(record)
        elif transaction.stock:
            if judgement.decision is None:
                self._judge(None)
            if judgement.decision != REFUSE:
                updates.run(record, keep=judgement.decision == CHECK)
        elif self.is_compiled:
            updates.run(record, keep=True)
        else:
            updates.defer(record)

    def _note_created(self, variable: Any) -> None:
        tensor = variable.value
        if not tensor.is_meta:
            self.has_created = True
            self.transaction.note_created(tensor, keras_variables.read(variable))

    def _before_write(self, tensor: Any) -> None:
        """Run the deferred updates before Keras writes a tensor that they may read, such as a rate.
        None reads a metric.
        """
        if self.updates.waiting and id(tensor) not in self.transaction.parts.metrics:
            self.updates.flush(keep=True)

    @property
    def _can_be_undone(self) -> bool:
        """Whether the step may still be refused: no decision has let its updates take effect."""
        return bool(self.transaction.refuse) and self.judgement.decision in (None, REFUSE)

    def _abandon(self, error: Exception) -> None:
        """Undo a step that ends in an exception. After its update nothing is kept and nothing can
        be undone.
        """
        if self._can_be_undone:
            self.backup.undo()
        if self.judgement.is_shared:
            host.leave(error)

    def _untracked(self) -> list[Any]:
        """Return the tensors that were written in place outside of Keras, which are kept before
        each later step.
        """
        transaction, log = self.transaction, self.backup.log
        changed = self.backup.unrecorded()
        if changed:
            run = [record for record in self.seen.records if record not in self.updates.waiting]
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
        return self.updates.early or not self.transaction.refuse

    def _judge(self, outputs: Any) -> None:
        if self.has_created:
            self.transaction.read_parts()
        self.judgement.judge(outputs, self.error is not None, self._is_updated)

    def _commit(self) -> Mapping[str, Sequence[Any]]:
        """Run the deferred updates; return the norms of the updated state that are not read now."""
        transaction, judgement = self.transaction, self.judgement
        is_read = judgement.update_is_read and not self.updates.waiting
        self.updates.flush(keep=False)
        created = [found for record in self.seen.records for found in record.created()]
        for tensor, value in created:
            transaction.note_created(tensor, value)
        if created:
            self.has_created = True
            transaction.read_parts()
        if not transaction.refuse or (is_read and not created):
            return {}
        return judgement.read_update()

    def _refuse(self) -> None:
        """Undo the step; each loss scale is updated."""
        self.backup.undo()
        self.backup.restore_gradients()
        verdict = self.judgement.verdict
        for optimizer in self.transaction.parts.train_state.optimizers:
            if keras_optimizers.is_loss_scaled(optimizer) and optimizer.built:
                scale, counter = optimizer.dynamic_scale, optimizer.step_counter
                before = float(scale.value), int(counter.value), optimizer.initial_scale
                after = rules.learned_scale(rules.NUMBERS, verdict.loss, verdict.gradients, *before)
                scale.assign(after[0])
                counter.assign(after[1])
        self.judgement.verdict = verdict._replace(refused=True)

    def _report(self) -> Report:
        """Return the report of a bad step, with the numbers of this process. No argument of the
        step is copied.
        """
        judgement = self.judgement
        places = judgement.places(self._is_updated, raised=self.error is not None)
        return Report(
            judgement.own._replace(refused=self.transaction.refuse),
            tuple((site, path) for site, path, _ in places),
            reductions.counts([tensor for _, _, tensor in places]),
            as_tensors(self.args),
            left_by_previous=judgement.left_by_previous,
        )
