"""One run of the transaction on PyTorch: its body, and its commit or refusal.

The verdict is computed when the body calls its update, so a refused step is never updated. If the
body continues after its update, the update runs at once, with the old values kept, and the verdict
is computed at the end of the body.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.body_history import Learned
from keras_nanguard._backends.torch.judging import (
    Judged,
    Ruling,
    judge,
    places,
    read_update,
)
from keras_nanguard._backends.torch.late_writes import LateWrites
from keras_nanguard._backends.torch.numeric_errors import is_numeric
from keras_nanguard._backends.torch.state_tensors import StateTensors
from keras_nanguard._backends.torch.step_context import StepContext
from keras_nanguard._backends.torch.undo_log import is_undone_as_a_whole
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables


@dataclass(frozen=True, eq=False)
class AtUpdate:
    """What a body has done before its first update.

    Attributes:
        losses: the number of its losses.
        written: the tensors of the train state that it has written past Keras.
        uncounted: those whose writes torch has not counted.
    """

    losses: int
    written: Sequence[Any]
    uncounted: Sequence[Any]


class BodyRun:
    """A body that runs, or has run. The calls of its updates come here.

    Attributes:
        keeps_undo: whether its updates run at once, with the old values kept.
        outputs: its outputs, `None` if it has raised.
        raised: whether torch has raised about a bad number.
        created: the tensors that its updates have created, each with its first value.
        at_update: what it has done before its first update.
        after_update: the tensors of `StepContext.versions_now` after its last update.
        late_writes: what it writes after an update.
        judged: the verdict, if it was computed in the body.
    """

    def __init__(self, context: StepContext):
        self._context, self.late_writes = context, LateWrites(context.parts.updated)
        self.keeps_undo = context.keeps_undo
        self.outputs: Any = None
        self.raised = False
        self.updates: list[Update] = []
        self.created: list[tuple[Any, Any]] = []
        self.at_update: AtUpdate | None = None
        self.after_update: Mapping[int, tuple[Any, int]] = {}
        self.judged: Judged | None = None

    @property
    def can_be_undone(self) -> bool:
        """Whether everything that the body has done so far can be undone."""
        return self._context.definition.run.refuses and (self.keeps_undo or not self.updates)

    def on_update(self, record: Update) -> None:
        """Run an update, unless the verdict refuses it."""
        record.build()  # as Keras would, so that its variables are noted
        self._keep_gradients(record)
        self._judge(record)
        if self.judged is not None and self.judged.ruling is Ruling.REFUSE:
            self.late_writes.begin()  # the body may continue
        else:
            self._update(record)

    def _keep_gradients(self, record: Update) -> None:
        """Keep what the update uses, and note what the body has done before its first one."""
        context, log = self._context, self._context.log
        log.gradients.note_writes()
        if not record.evaluates:
            log.keep_gradients()
        if not (self.updates or context.definition.stock):
            losses = context.intercept.noted
            self.at_update = AtUpdate(losses, context.written(), context.written_uncounted())

    def _judge(self, record: Update) -> None:
        """Compute the verdict before the first update that must wait for it."""
        definition = self._context.definition
        if self.judged is not None:
            return
        self.keeps_undo = self.keeps_undo or (record.evaluates and definition.may_undo_update)
        if definition.run.refuses and not self.keeps_undo:
            self.judged = judge(self._context, has_updated=bool(self.updates))
            self.keeps_undo = self.judged.ruling is Ruling.CHECK

    def _update(self, record: Update) -> None:
        context = self._context
        if self.keeps_undo:
            context.log.keep_updated(record.optimizer, record.state())
        if self.keeps_undo or is_undone_as_a_whole():
            self.late_writes.begin()
        self.updates.append(record)
        with self.late_writes.during(record):
            self.created.extend(record.run())
        if not (context.definition.stock or context.learned.continues):
            self.after_update = context.versions_now()

    def around_backward(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a backward pass, which may add to the gradients that it finds."""
        self._context.log.gradients.note_writes()
        self._context.log.keep_gradients()
        return self.late_writes.around_backward()

    def release(self) -> None:
        """Release the tensors, which an exception in an update would keep."""
        self.updates, self.judged = [], None


def run(context: StepContext, args: Sequence[Any]) -> BodyRun:
    """Run the body of a step. Its updates run, unless the verdict in the body refuses them.

    An exception that is not about a bad number is raised again. Before, the state is restored if it
    can be.
    """
    definition, log, intercept = context.definition, context.log, context.intercept
    ran = BodyRun(context)
    try:
        with contextlib.ExitStack() as stack:
            if not context.is_compiled:
                stack.enter_context(log)
                if definition.may_undo_update:
                    ran.late_writes.wait(stack)
            stack.enter_context(intercept.running(ran.on_update, ran.around_backward))
            ran.outputs = (intercept.compiled or definition.body)(*args)
    except Exception as error:
        if ran.can_be_undone and is_numeric(error):
            ran.outputs, ran.raised = None, True
            return ran
        if ran.can_be_undone:
            log.give_back()
        if definition.run.agreement.count > 1:
            host.leave(error)
        ran.release()
        raise
    finally:
        for pair in log.created:
            definition.run.note_created(*pair)
    return ran


def commit(
    context: StepContext, ran: BodyRun, judged: Judged, learned: Learned
) -> tuple[Verdict, Learned]:
    """Read the updated state, unless the verdict has, now or with the next step. Return the verdict
    and what the steps have shown.
    """
    run, parts, verdict = context.definition.run, judged.parts, judged.verdict
    for created in ran.created:
        run.note_created(*created)
    if ran.created:
        learned, parts = replace(learned, stale=True), context.definition.read_parts()
    if not (run.refuses and _update_is_unread(context, ran, judged, learned, parts)):
        return verdict, learned
    verdict, unread = read_update(parts, verdict, run.agreement)
    return verdict, replace(learned, unread=unread)


def _update_is_unread(
    context: StepContext,
    ran: BodyRun,
    judged: Judged,
    learned: Learned,
    parts: StateTensors,
) -> bool:
    """Whether the verdict has not seen all weights and slots as they are now: it was computed
    before the update, the update has created some, or the body has written some past Keras for the
    first time.
    """
    is_before_update = bool(ran.created) or not judged.has_updated
    if context.intercept.records and is_before_update:
        return True
    unseen = learned.untracked.keys() - context.log.kept.keys()
    unseen |= learned.uncounted.keys() - context.learned.uncounted.keys()
    return not parts.updated.isdisjoint(unseen)


def refuse(context: StepContext, judged: Judged) -> Verdict:
    """Undo a step; update each loss scale that it is about. Return the verdict."""
    verdict = judged.verdict._replace(refused=True)
    overflowed = _overflowed(context) if verdict.only_gradients else []
    known = judged.parts.train_state.optimizers
    blamed = [record.optimizer for record in overflowed] if verdict.only_gradients else known
    context.log.give_back()
    for record in overflowed:
        # The loop begins its next sum, as after an update that Keras skips.
        for _, variable in record.pairs:
            keras_variables.stored(variable).grad = None
    for optimizer in filter(keras_optimizers.scales_of, keras_variables.unique(blamed)):
        scale, counter = keras_optimizers.scales_of(optimizer)
        before = float(scale.value), int(counter.value), optimizer.initial_scale
        after = rules.learned_scale(rules.NUMBERS, verdict.loss, verdict.gradients, *before)
        scale.assign(after[0])
        counter.assign(after[1])
    return verdict


def _overflowed(context: StepContext) -> list[Update]:
    """Return the updates with bad gradients by optimizers that scale the loss: those of another one
    keep their sums and their scale. All of them if processes train together.
    """
    scaled = [r for r in context.intercept.records if keras_optimizers.scales_of(r.optimizer)]
    if context.definition.run.agreement.count > 1:
        return scaled
    return [r for r in scaled if not reductions.are_finite([g for g, _ in r.pairs])]


def report(context: StepContext, judged: Judged, args: Sequence[Any]) -> Report:
    """Return the report of a bad step of this process. No argument is copied."""
    found = places(context, judged)
    return Report(
        judged.own._replace(refused=context.definition.run.refuses),
        tuple((site, path) for site, path, _ in found),
        reductions.counts([tensor for _, _, tensor in found]),
        tuple(args),
        left_by_previous=judged.left_by_previous,
    )
