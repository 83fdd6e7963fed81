"""One run of the transaction on PyTorch: its body, its commit or refusal, and what it shows about
the body.

The verdict is computed when the body calls its update, so a refused step is never updated. If the
body continues after its update, the update runs at once, with the old values kept, and the verdict
is computed at the end of the body.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.judging import Judged, Ruling, judge, places, read_update
from keras_nanguard._backends.torch.late_writes import LateWrites
from keras_nanguard._backends.torch.numeric_errors import is_numeric
from keras_nanguard._backends.torch.seen import Seen
from keras_nanguard._backends.torch.state_tensors import StateTensors
from keras_nanguard._backends.torch.step_context import Learned, StepContext
from keras_nanguard._backends.torch.undo_log import is_undone_as_a_whole
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.tensors import local


class BodyRun:
    """A body that runs, or has run. The calls of its updates come here.

    Attributes:
        updates_first: whether its updates run at once, with the old values kept.
        outputs: its outputs, `None` if it has raised.
        raised: whether torch has raised about a bad number.
        created: the tensors that its updates have created, each with its first value.
        losses_before: the number of its losses before its first update.
        written_before: the tensors of the train state that it has written past Keras before that.
        uncounted_before: those whose writes torch has not counted.
        after_update: the tensors of `StepContext.versions_now` after its last update.
        late_writes: what it writes after an update.
        judged: the verdict, if it was computed in the body.
    """

    def __init__(self, context: StepContext):
        self._context, self.late_writes = context, LateWrites(context.parts.updated)
        self.updates_first = context.updates_first
        self.outputs: Any = None
        self.raised = False
        self.updates: list[Update] = []
        self.created: list[tuple[Any, Any]] = []
        self.losses_before = 0
        self.written_before: list[Any] = []
        self.uncounted_before: list[Any] = []
        self.after_update: Mapping[int, tuple[Any, int]] = {}
        self.judged: Judged | None = None

    @property
    def can_be_undone(self) -> bool:
        """Whether everything that the body has done so far can be undone."""
        return self._context.definition.run.refuses and (self.updates_first or not self.updates)

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
            self.losses_before = context.intercept.noted
            self.written_before = context.written()
            self.uncounted_before = context.written_uncounted()

    def _judge(self, record: Update) -> None:
        """Compute the verdict before the first update that must wait for it."""
        definition = self._context.definition
        if self.judged is not None:
            return
        self.updates_first = self.updates_first or (record.evaluates and definition.may_undo_update)
        if definition.run.refuses and not self.updates_first:
            self.judged = judge(self._context, has_updated=bool(self.updates))
            self.updates_first = self.judged.ruling is Ruling.CHECK

    def _update(self, record: Update) -> None:
        context = self._context
        if self.updates_first:
            context.log.keep_updated(record.optimizer, record.state())
        if self.updates_first or is_undone_as_a_whole():
            self.late_writes.begin()
        self.updates.append(record)
        with self.late_writes.during(record):
            self.created.extend(record.run())
        if not (context.definition.stock or context.learned.continues is Seen.YES):
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

    An exception that is not about a bad number, or an interrupt, is raised again. Before, the state
    is restored if it can be.
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
    except BaseException as error:
        if ran.can_be_undone and isinstance(error, Exception) and is_numeric(error):
            ran.outputs, ran.raised = None, True
            return ran
        with contextlib.ExitStack() as ending:  # the last one first, even if it raises
            ending.callback(ran.release)
            if definition.run.agreement.count > 1 and isinstance(error, Exception):
                ending.callback(host.leave, error)
            if ran.can_be_undone:
                ending.callback(log.give_back)
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


# What the step shows about its body, for later steps


def learned_from(context: StepContext, ran: BodyRun, judged: Judged) -> Learned:
    """Return what a step that has run, and those before it, have shown."""
    before, uncounted = context.learned, [*ran.uncounted_before]
    by_hand = [*ran.written_before, *_not_updated(context.written(), ran.updates)]
    by_hand += _assigned(context)
    uncounted += _not_updated(context.written_uncounted(), ran.updates)
    continues = _continues(context, ran)
    context.log.gradients.note_writes()
    is_one_of_several = context.definition.run.agreement.count > 1
    return replace(
        before,
        untracked={**before.untracked, **{id(t): t for t in (*by_hand, *uncounted)}},
        tolerated=before.tolerated | judged.constants,
        updates_first=judged.any_continues if is_one_of_several else continues.is_possible,
        steps=before.steps + 1,
        stale=bool(context.log.created),
        unread={},
        continues=continues,
        uncounted={**before.uncounted, **{id(t): t for t in uncounted}},
        adds_by_hand=before.adds_by_hand.then(context.log.gradients.added_by_hand),
    )


def _continues(context: StepContext, ran: BodyRun) -> Seen:
    """Return whether the body continues after its first update, see `Learned`."""
    before, updates = context.learned.continues, ran.updates
    if context.definition.stock:
        return Seen.NO
    if before is Seen.YES or not updates:
        return before
    has_several = len(context.parts.train_state.optimizers) > 1 or len(updates) > 1
    has_late_losses = not context.intercept.noted or context.intercept.noted > ran.losses_before
    is_continued = has_several or updates[0].evaluates or has_late_losses
    is_continued = is_continued or ran.late_writes.continues
    return Seen.of(is_continued or _writes_after(context, ran))


def _assigned(context: StepContext) -> list[Any]:
    """Return what a step assigns to before it is compiled; a compiled one does not show it."""
    definition, parts = context.definition, context.parts
    if not definition.jit or context.is_compiled:
        return []
    listed = set(map(id, parts.all if definition.stock else parts.small_state))
    kept = context.log.kept.items()
    return [e.tensor for key, e in kept if e.writer is not None and key not in listed]


def _writes_after(context: StepContext, ran: BodyRun) -> bool:
    """Whether something that is judged was written after the last update."""
    parts, log, after = context.parts, context.log, ran.after_update
    written = [t for t, version in after.values() if t._version != version]
    written += [entry.tensor for key, entry in log.kept.items() if key not in after]
    if not written:
        return False
    unjudged = parts.judged_elsewhere - parts.updated
    # The next step judges the sum of the gradients.
    unjudged |= {id(local(gradient)) for _, gradient in log.gradients.kept or ()}
    # Of batch normalization torch counts only the writes of its integer buffer.
    buffers = set(map(id, parts.unlisted))
    return any(
        id(t) not in unjudged and (reductions.is_inexact(t) or id(t) in buffers) for t in written
    )


def _not_updated(tensors: list[Any], updates: Iterable[Update]) -> list[Any]:
    """Return the tensors that none of these updates may have written."""
    if not tensors:
        return []
    updated = {id(t) for update in updates for t in update.state()}
    return [t for t in tensors if id(t) not in updated]
