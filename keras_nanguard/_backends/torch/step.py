"""The transaction on PyTorch.

In outline::

    keep      torch's generators and buffers; other small state is copied when the step writes it
    run       the user's step; its optimizer updates are deferred
    verdict   are loss, gradients and written statistics finite, is the loss scale valid? one read
    commit    the updates run; weights and slots are read once
    refuse    all writes are undone, the loss scale is updated, batch and counts are reported

In Keras' own train step everything that can make it bad is known when it calls its update, so the
verdict is computed there and nothing large is copied. Any other step may continue after an update.
Its updates are deferred to the end of the step, or until an operation accesses something that they
read or write. In that case the update runs at once and is undone on a refusal, which costs one copy
of the written tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
import torch

from keras_nanguard._backends import interface
from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.shared.batches import losses_in_logs, owned, scalars, with_arrays
from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.intercept import Intercept, is_numeric
from keras_nanguard._backends.torch.judging import (
    NO_VERDICT,
    Carried,
    Decision,
    Judged,
    Parts,
    Ran,
    judge,
    read_update,
)
from keras_nanguard._backends.torch.modules import local
from keras_nanguard._backends.torch.undo_log import UndoLog
from keras_nanguard._backends.torch.updates import Update, UpdateQueue, Watch
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._keras import (
    attributes as keras_attributes,
    optimizers as keras_optimizers,
    variables as keras_variables,
)

FRESH = 2
"""Number of first steps in which the train state is read each time and everything is kept, to find
the tensors that a step writes.

The second step shows whether the loop adds to existing gradients, as one that accumulates over
steps does.
"""

REFRESH = 100
"""Steps between two later readings of the train state."""


class Given:
    """The arguments of one step, kept until later steps need them.

    A tensor that shares its memory with a NumPy array, or with another process, is copied, because
    its owner may overwrite it unnoticed. So is a tensor of `torch.inference_mode`, which counts no
    writes. Any other tensor counts the writes to it, so changes are detected.

    Attributes:
        tensors: the arguments as they are now.
    """

    __slots__ = ("_versions", "tensors")

    def __init__(self, args: Any):
        self._versions: list[tuple[Any, int]] = []
        self.tensors = with_arrays(self._held, args)

    def _held(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return owned(value)
        if value.is_inference() or not value.untyped_storage().resizable():
            return value.detach().clone()
        self._versions.append((value, value._version))
        return value

    @property
    def args(self) -> Any:
        """The arguments, or `None` if one of them was written since."""
        unchanged = all(value._version == version for value, version in self._versions)
        return self.tensors if unchanged else None


def _as_tensors(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of a step with arrays converted to tensors."""
    converted: tuple[Any, ...] = keras.tree.map_structure(_as_tensor, tuple(args))
    return converted


def _as_tensor(value: Any) -> Any:
    has_numbers = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    return keras.ops.convert_to_tensor(value) if has_numbers else value


class Transaction(interface.Transaction):
    """Wraps the body of one train step; calling it runs the body as a transaction.

    Args:
        body: the step, `body(*args) -> outputs`.
        run: the facts of the run.
        of_trainer: whether a Keras trainer runs the step: it returns logs, and the model's
            `compute_loss` returns the loss.
        stock: whether the body is Keras' own train step, in which nothing can fail after the
            update.
        jit: whether to compile the body, once its writes are known.
        compiled: the compiled body of an earlier run, if there is one.

    Attributes:
        may_undo_update: whether an update may run before the verdict and be undone.
        learned: what the steps so far have shown.
        parts: the train state, as it was read last.
        verdict: the verdict of the last step.
    """

    learned: Carried

    def __init__(
        self,
        body: Callable[..., Any],
        run: interface.Run,
        *,
        of_trainer: bool,
        stock: bool,
        jit: bool,
        compiled: Intercept | None,
    ):
        self.body = self.replayed = body
        self.run, self.stock, self.jit, self.compiled = run, stock, jit, compiled
        self.model = run.model if of_trainer else None
        self.losses = losses_in_logs if of_trainer else scalars
        self.refuses, self.agreement = run.refuses, run.agreement
        self.may_undo_update = self.refuses and not stock
        self.learned = Carried()
        self.verdict = NO_VERDICT
        self.given: Any = None
        self.reports: list[Report] = []
        # The model's own at the last reading. Keras trains with another one as soon as it is set.
        self._optimizer = getattr(self.model, "optimizer", None)

    def __call__(self, *args: Any) -> Any:
        learned = self.learned
        replaced = getattr(self.model, "optimizer", None) is not self._optimizer
        if learned.stale or self.is_fresh or replaced or learned.steps % REFRESH == 0:
            self.compiled = None if replaced else self.compiled
            self.read_parts()
        self.given = Given(args)
        step = StepRun(self, args)
        try:
            done = step.complete()
        except BaseException:
            self.learned = replace(learned, steps=learned.steps + 1, stale=True)
            raise
        finally:
            step.seen.release()
        self.learned, self.verdict = done.carried, done.verdict
        self.reports += done.reports
        return done.outputs

    def read_parts(self) -> None:
        """Read the train state."""
        self._optimizer = getattr(self.model, "optimizer", None)
        self.parts = Parts(self.run.read_train_state())

    @property
    def is_fresh(self) -> bool:
        """Whether it is not known yet what the body writes."""
        return self.learned.steps < FRESH

    @property
    def is_shared(self) -> bool:
        """Whether several processes decide together."""
        return self.agreement.count > 1

    def intercept(self) -> Intercept:
        """Return what records the calls of a step: a new one, or that of the compiled body."""
        optimizers = self.parts.train_state.optimizers
        if not self.jit or self.is_fresh:
            return Intercept(self.model, optimizers)
        self.compiled = self.compiled or Intercept(self.model, optimizers, self.body)
        return self.compiled

    def inherit(self, other: Transaction) -> None:
        """Start with the findings of another transaction for the same body."""
        steps = min(other.learned.steps, 1)
        self.learned = replace(other.learned, steps=steps, stale=True)

    @property
    def untracked(self) -> Mapping[int, Any]:  # type: ignore[override]
        return self.learned.untracked

    @property
    def tolerated(self) -> frozenset[int]:  # type: ignore[override]
        return self.learned.tolerated

    @property
    def keeps_undo(self) -> bool:  # type: ignore[override]
        return self.learned.keeps_undo

    def batch(self, given: Given) -> Any:
        return None if given.args is None else _as_tensors(given.args)

    def take_reports(self) -> list[Report]:
        reports, self.reports = self.reports, []
        return reports

    def tolerate(self, variables: Sequence[Any]) -> None:
        tolerated = self.learned.tolerated | {id(v.value) for v in variables}
        self.learned = replace(self.learned, tolerated=tolerated)

    def release_run(self) -> None:
        self.given = None


class Done(NamedTuple):
    """The result of one run of the transaction.

    Attributes:
        outputs: what the body has returned, `None` if it raised an exception about a bad number.
        verdict: the verdict.
        reports: the report, if the step was bad.
        carried: what later steps need.
    """

    outputs: Any
    verdict: Verdict
    reports: Sequence[Report]
    carried: Carried


class StepRun:
    """One run of the transaction.

    Args:
        transaction: the transaction.
        args: the arguments of the body.

    Attributes:
        seen: the calls of optimizers and loss.
        is_compiled: whether the body is compiled, so that its writes are not recorded.
        log: what a refusal restores.
        queue: the updates, of which some wait for the verdict.
        created: the tensors of the variables that Keras has created meanwhile.
        judged: the verdict and the decision, once there is one.
    """

    def __init__(self, transaction: Transaction, args: Sequence[Any]):
        self.transaction, self.args = transaction, args
        carried, parts = transaction.learned, transaction.parts
        self.seen = transaction.intercept()
        self.is_compiled = self.seen.body is not None
        self.created: list[Any] = []
        self.judged: Judged | None = None
        adds = transaction.is_fresh or carried.adds_to_gradients
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
        carried, writes_unkept = self._carried(judged)
        if judged.decision is Decision.CHECK:
            self.queue.flush(keep=True)
            judged = self._judge(outputs, raised)
        is_bad = judged.decision is Decision.REFUSE
        reports = [self._report(judged)] if is_bad else []
        if is_bad and transaction.refuses:
            verdict = self._refuse(judged)
        else:
            verdict, carried = self._commit(judged, carried, writes_unkept)
        return Done(outputs, verdict, reports, carried)

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

    def _carried(self, judged: Judged) -> tuple[Carried, bool]:
        """Return what the body has shown for later steps, and whether it has written weights or
        slots that are not kept, so that the verdict did not see it.
        """
        before, log = self.transaction.learned, self.log
        untracked = {id(tensor): tensor for tensor in self._untracked()}
        early = self.queue.early and judged.decision is not Decision.CHECK
        adds = any(log.counted(local(grad)) for _, grad in self._gradients)
        carried = Carried(
            untracked={**before.untracked, **untracked},
            tolerated=before.tolerated | judged.constants,
            keeps_undo=before.keeps_undo or early,
            steps=before.steps + 1,
            stale=bool(self.created),
            adds_to_gradients=before.adds_to_gradients or adds,
        )
        unkept = untracked.keys() - log.old.keys()
        return carried, not self.transaction.parts.updated.isdisjoint(unkept)

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
        self, judged: Judged, carried: Carried, writes_unkept: bool
    ) -> tuple[Verdict, Carried]:
        """Run the deferred updates, and read the updated state, now or with the next step; return
        the verdict, and what later steps need.

        Args:
            judged: the verdict so far.
            carried: what later steps need so far.
            writes_unkept: whether the state is to be read also without updates, because the verdict
                did not see all that the body has written.
        """
        transaction, queue = self.transaction, self.queue
        is_read = self._is_updated and not queue.waiting
        queue.flush(keep=False)
        for tensor, value in queue.created:
            transaction.run.note_created(tensor, value)
        if queue.created:
            carried = replace(carried, stale=True)
            transaction.read_parts()
        is_due = bool(self.seen.records) and not (is_read and not queue.created)
        if not transaction.refuses or not (is_due or writes_unkept):
            return judged.verdict, carried
        verdict, unread = read_update(transaction.parts, judged.verdict, transaction.is_shared)
        return verdict, replace(carried, unread=unread)

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
            _as_tensors(self.args),
            left_by_previous=judged.left_by_previous,
        )


def _note_created(run: interface.Run, created: list[Any], variable: Any) -> None:
    """Note a variable that Keras has created, with its first value."""
    tensor = variable.value
    if not tensor.is_meta:
        created.append(tensor)
        run.note_created(tensor, keras_variables.read(variable))


def _restore_gradients(transaction: Transaction, kept: Sequence[tuple[Any, Any]]) -> None:
    """Restore the gradients of a body that accumulates them; for any other leave none."""
    for tensor in transaction.parts.holders:
        tensor.grad = None
    for tensor, grad in kept:
        tensor.grad = grad
