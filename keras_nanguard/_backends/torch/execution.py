"""One run of the transaction on PyTorch: its body, its commit or refusal, and what it shows for
later ones.

The verdict is computed when the body calls its update, so a refused step is never updated. If the
body continues after its update, the update runs at once, with the old values kept, and the verdict
is computed at the end of the body.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.calls import Calls, Ran, Recorder
from keras_nanguard._backends.torch.intercept import Intercept
from keras_nanguard._backends.torch.judging import Judged, Ruling, judge, read_update
from keras_nanguard._backends.torch.learned import Learned, Seen
from keras_nanguard._backends.torch.numeric_errors import is_numeric
from keras_nanguard._backends.torch.step_context import StepContext
from keras_nanguard._backends.torch.undo_log import RECORDED_WRITES, is_undone_as_a_whole
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables


class UpdateGate(Recorder):
    """Runs each update when the body calls it, unless the verdict refuses it.

    The hooks of a step write here, and in its undo log, only; `ended` returns what they have seen.

    Attributes:
        judged: the verdict, if it was computed before an update.
    """

    def __init__(self, context: StepContext):
        super().__init__(context.state.updated)
        self._context, self._ran = context, Ran()
        self.judged: Judged | None = None
        learned = context.learned
        is_needed = context.is_compiled or learned.is_fresh or learned.updates_first
        self._keeps_old = context.step.may_undo_update and is_needed
        """Whether updates run at once, with the old values kept."""

    @property
    def can_be_undone(self) -> bool:
        """Whether everything that the body has done so far can be undone."""
        return self._context.step.run.refuses and (self._keeps_old or not self._ran.updated)

    def watch(self, stack: contextlib.ExitStack) -> None:
        """Record what an eager body writes until the stack ends."""
        stack.enter_context(RECORDED_WRITES.entered(self._context.log))
        if self._context.step.may_undo_update:
            self.late_writes.wait(stack)

    def around_backward(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a backward pass, which may add to the gradients that it finds."""
        self._context.log.keep_gradients()
        return super().around_backward()

    def on_update(self, update: Update) -> Any:
        """Run an update, unless the verdict refuses it; return its result."""
        update.build()  # as Keras would, so that its variables are noted
        self._note_state_before(update)
        self._judge(update)
        if self.judged is not None and self.judged.ruling is Ruling.REFUSE:
            self.late_writes.begin()  # the body may continue
            return None
        return self._run(update)

    def _note_state_before(self, update: Update) -> None:
        """Keep the gradients that the update uses, and note what the body has done before its first
        one.
        """
        context, log = self._context, self._context.log
        if update.evaluates:
            log.gradients.note_writes()
        else:
            log.keep_gradients()
        if not (self._ran.updated or context.step.stock):
            self._ran = self._ran._replace(
                losses_before=self.calls.loss_count,
                written_before=context.written(),
                uncounted_before=context.written_uncounted(),
            )

    def _judge(self, update: Update) -> None:
        """Compute the verdict before the first update that must wait for it. One that evaluates the
        loss cannot wait.
        """
        step = self._context.step
        if self.judged is not None:
            return
        self._keeps_old = self._keeps_old or (update.evaluates and step.may_undo_update)
        if step.run.refuses and not self._keeps_old:
            self.judged = judge(self._context, Ran(self.calls))
            self._keeps_old = self.judged.ruling is Ruling.CHECK

    def _run(self, update: Update) -> Any:
        context = self._context
        if self._keeps_old:
            context.log.keep_updated(update.optimizer, update.written())
        if self._keeps_old or is_undone_as_a_whole():
            self.late_writes.begin()
        self._ran = self._ran._replace(updated=(*self._ran.updated, update))
        with self.late_writes.during(update):
            result, created = update.run()
        self._ran = self._ran._replace(created=(*self._ran.created, *created))
        if not (context.step.stock or context.learned.continues is Seen.YES):
            self._ran = self._ran._replace(versions_after=context.versions_now())
        return result

    def ended(self, outputs: Any, raised: bool = False) -> Ran:
        """Return what the body has called and done, with its outputs."""
        ran = self._ran._replace(calls=self.calls, continues=self.late_writes.continues)
        return ran._replace(outputs=outputs, raised=raised)

    def release(self) -> None:
        """Release all tensors, which an exception in an update would keep."""
        self.calls, self._ran, self.judged = Calls(), Ran(), None


def run(
    context: StepContext, intercept: Intercept, args: Sequence[Any]
) -> tuple[Ran, Judged | None]:
    """Run the body of a step. Its updates run, unless the verdict in the body refuses them. Return
    what it has done, and this verdict if there was one.

    An exception that is not about a bad number, or an interrupt, is raised again. Before, the state
    is restored if it can be.
    """
    step, gate = context.step, UpdateGate(context)
    try:
        with contextlib.ExitStack() as stack:
            if not context.is_compiled:
                gate.watch(stack)
            stack.enter_context(intercept.recording(gate))
            outputs = (intercept.compiled or step.replayed)(*args)
        return gate.ended(outputs), gate.judged
    except BaseException as error:
        if gate.can_be_undone and isinstance(error, Exception) and is_numeric(error):
            return gate.ended(None, raised=True), gate.judged
        with contextlib.ExitStack() as ending:  # the last one first, even if it raises
            ending.callback(gate.release)
            if step.run.agreement.count > 1 and isinstance(error, Exception):
                ending.callback(host.leave, error)
            if gate.can_be_undone:
                ending.callback(context.log.give_back, halfway=True)
        raise
    finally:
        for pair in context.log.created:
            step.run.note_created(*pair)


def commit(
    context: StepContext, ran: Ran, judged: Judged, learned: Learned
) -> tuple[Verdict, Learned]:
    """Read the updated state, unless the verdict has, now or with the next step. Return the verdict
    and what the steps have shown.
    """
    run, state, verdict = context.step.run, judged.checked.state, judged.verdict
    for created in ran.created:
        run.note_created(*created)
    if ran.created:
        learned, state = replace(learned, stale=True), context.step.read_state()
    if not (run.refuses and _is_unread(context, ran, judged, learned)):
        return verdict, learned
    verdict, unread = read_update(state, verdict, run.agreement)
    return verdict, replace(learned, unread=unread)


def _is_unread(context: StepContext, ran: Ran, judged: Judged, learned: Learned) -> bool:
    """Whether the verdict has not seen all weights and slots as they are now: it was computed
    before the update, the update has created some, or the body has written some past Keras for the
    first time.
    """
    if ran.created or (ran.calls.updates and not judged.checked.has_updated):
        return True
    unseen = learned.untracked.keys() - context.log.kept.keys()
    unseen |= learned.uncounted.keys() - context.learned.uncounted.keys()
    return not judged.checked.state.updated.isdisjoint(unseen)


def refuse(context: StepContext, ran: Ran, judged: Judged) -> Verdict:
    """Undo a step; update each loss scale that it is about. Return the verdict."""
    verdict = judged.verdict._replace(refused=True)
    overflowed = _overflowed(context, ran.calls) if verdict.only_gradients else []
    known = judged.checked.state.train_state.optimizers
    blamed = [update.optimizer for update in overflowed] if verdict.only_gradients else known
    context.log.give_back(halfway=ran.raised)
    for update in overflowed:
        # The loop begins its next sum, as after an update that Keras skips.
        for _, variable in update.pairs:
            keras_variables.stored(variable).grad = None
    for optimizer in filter(keras_optimizers.scales_of, keras_variables.unique(blamed)):
        scale, counter = keras_optimizers.scales_of(optimizer)
        before = float(scale.value), int(counter.value), optimizer.initial_scale
        after = rules.scale_after_refusal(rules.NUMBERS, verdict.loss, verdict.gradients, *before)
        scale.assign(after[0])
        counter.assign(after[1])
    return verdict


def _overflowed(context: StepContext, calls: Calls) -> list[Update]:
    """Return the updates with bad gradients by optimizers that scale the loss: those of another one
    keep their sums and their scale. All of them if processes train together.
    """
    scaled = [u for u in calls.updates if keras_optimizers.scales_of(u.optimizer)]
    if context.step.run.agreement.count > 1:
        return scaled
    return [u for u in scaled if not reductions.are_finite([g for g, _ in u.pairs])]


def learned_from(context: StepContext, ran: Ran, judged: Judged) -> Learned:
    """Return what a step that has run, and those before it, have shown."""
    before, gradients = context.learned, context.log.gradients
    by_hand = [*ran.written_before, *_not_updated(context.written(), ran.updated)]
    by_hand += _assigned(context)
    uncounted = _not_updated(context.written_uncounted(), ran.updated)
    uncounted += ran.uncounted_before
    continues = _continues(context, ran)
    is_one_of_several = context.step.run.agreement.count > 1
    return replace(
        before,
        untracked={**before.untracked, **{id(t): t for t in (*by_hand, *uncounted)}},
        tolerated=before.tolerated | judged.checked.constants,
        updates_first=judged.any_continues if is_one_of_several else continues.is_possible,
        steps=before.steps + 1,
        stale=bool(context.log.created),
        unread={},
        continues=continues,
        uncounted={**before.uncounted, **{id(t): t for t in uncounted}},
        adds_by_hand=before.adds_by_hand.then(gradients.note_writes()),
    )


def _continues(context: StepContext, ran: Ran) -> Seen:
    """Return whether the body continues after its first update, see `Learned`."""
    before, updates, noted = context.learned.continues, ran.updated, ran.calls.loss_count
    if context.step.stock:
        return Seen.NO
    if before is Seen.YES or not updates:
        return before
    has_several = len(context.state.train_state.optimizers) > 1 or len(updates) > 1
    has_late_losses = not noted or noted > ran.losses_before
    is_continued = has_several or updates[0].evaluates or has_late_losses or ran.continues
    return Seen.of(is_continued or _writes_after(context, ran))


def _assigned(context: StepContext) -> list[Any]:
    """Return what a step assigns to before it is compiled; a compiled one does not show it."""
    step, state = context.step, context.state
    if not step.jit or context.is_compiled:
        return []
    listed = set(map(id, state.all if step.stock else state.small_state))
    return [context.log.kept[key].tensor for key in context.log.writers if key not in listed]


def _writes_after(context: StepContext, ran: Ran) -> bool:
    """Whether something that is judged was written after the last update."""
    state, log, after = context.state, context.log, ran.versions_after
    written = [t for t, version in after.values() if t._version != version]
    written += [entry.tensor for key, entry in log.kept.items() if key not in after]
    if not written:
        return False
    # The next step judges the sum of the gradients.
    unjudged = (state.not_statistics - state.updated) | log.gradients.kept_ids
    # Of batch normalization torch counts only the writes of its integer buffer.
    buffers = set(map(id, state.unlisted))
    return any(
        id(t) not in unjudged and (reductions.is_inexact(t) or id(t) in buffers) for t in written
    )


def _not_updated(tensors: list[Any], updates: Iterable[Update]) -> list[Any]:
    """Return the tensors that none of these updates may have written."""
    if not tensors:
        return []
    updated = {id(t) for update in updates for t in update.written()}
    return [t for t in tensors if id(t) not in updated]
