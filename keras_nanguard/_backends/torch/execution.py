"""One run of the transaction on PyTorch: its body, its commit or refusal.

The verdict is computed when the body calls its update, so a refused step is never updated. If the
body continues after its update, the update runs at once, with the old values kept, and the verdict
is computed at the end of the body.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.attempt import Attempt, GuardedStep, Learned
from keras_nanguard._backends.torch.intercept import Intercept
from keras_nanguard._backends.torch.judging import Judged, Ruling, judge, read_update, report
from keras_nanguard._backends.torch.numeric_errors import is_numeric
from keras_nanguard._backends.torch.state import StateTensors
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._backends.torch.watching import RECORDED_WRITES, is_undone_as_a_whole
from keras_nanguard._core.verdict import Verdict
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables


class GuardedAttempt(Attempt):
    """Runs each update when the body calls it, unless the verdict refuses it.

    Attributes:
        judged: the verdict, if it was computed before an update.
    """

    def __init__(self, step: GuardedStep, state: StateTensors, is_compiled: bool):
        super().__init__(step, state, is_compiled)
        self.judged: Judged | None = None
        is_needed = is_compiled or self.learned.is_fresh or self.learned.updates_first
        self._keeps_old = step.may_undo_update and is_needed
        """Whether updates run at once, with the old values kept."""

    @property
    def can_be_undone(self) -> bool:
        """Whether everything that the body has done so far can be undone."""
        return self.step.run.refuses and (self._keeps_old or not self.updated)

    def watch(self, stack: contextlib.ExitStack) -> None:
        """Record what an eager body writes and calls until the stack ends."""
        stack.enter_context(RECORDED_WRITES.entered(self.log))
        if not self.step.stock:
            super().watch(stack)

    def around_backward(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a backward pass, which may add to the gradients that it finds."""
        self.log.keep_gradients()
        return super().around_backward()

    def on_update(self, update: Update) -> Any:
        """Run an update, unless the verdict refuses it; return its result."""
        update.build()  # as Keras would, so that its variables are noted
        self._note_use(update.optimizer)
        self.log.keep_gradients()
        if not (self.updated or self.step.stock):
            self.losses_before, self.by_hand_before = self.loss_count, self.written_by_hand()
        self._judge(update)
        if self.judged is not None and self.judged.ruling is Ruling.REFUSE:
            self.late_writes.begin()  # the body may continue
            return None
        return self._run(update)

    def _note_use(self, optimizer: Any) -> None:
        """Make an optimizer of a layer part of the train state before its first update."""
        is_unused = optimizer in self.state.train_state.unused
        if is_unused and keras_optimizers.note_use(self.step.run.model, optimizer):
            self.log.created += [(v.value, keras_variables.read(v)) for v in optimizer.variables]

    def _judge(self, update: Update) -> None:
        """Compute the verdict before the first update that must wait for it. One that evaluates the
        loss cannot wait.
        """
        if self.judged is not None:
            return
        self._keeps_old = self._keeps_old or (update.evaluates and self.step.may_undo_update)
        if self.step.run.refuses and not self._keeps_old:
            self.judged = judge(self)
            self._keeps_old = self.judged.ruling is Ruling.CHECK

    def _run(self, update: Update) -> Any:
        if self._keeps_old:
            self.log.keep_updated(update.optimizer, update.written())
        if self._keeps_old or is_undone_as_a_whole():
            self.late_writes.begin()
        self.updated.append(update)
        with self.late_writes.during(update):
            result, created = update.run()
        self.created += created
        if not (self.step.stock or self.learned.continues):
            self.versions_after = self.versions_now()
        return result

    def undo(self, error: BaseException) -> None:
        """Restore the state after an error, if it can be restored."""
        with contextlib.ExitStack() as ending:  # the last one first, even if it raises
            if self.step.run.agreement.count > 1 and isinstance(error, Exception):
                ending.callback(host.leave, error)
            if self.can_be_undone:
                ending.callback(self.log.give_back, halfway=True)


def complete(
    attempt: GuardedAttempt, intercept: Intercept, args: Sequence[Any]
) -> tuple[Verdict, Learned]:
    """Run a step; commit or refuse it. Return its verdict, and what the steps have shown.

    Whatever is raised until then, such as an interrupt, undoes the step if it can be undone: a step
    without old values has been updated after its verdict.
    """
    step = attempt.step
    try:
        _run_body(attempt, intercept, args)
        judged = attempt.judged or judge(attempt)
        if judged.ruling is Ruling.CHECK:  # in this process or in another one
            judged = judge(attempt)
        step.run.agreement.hear(judged.has_news)
        learned = attempt.learned_after(judged.checked.constants, judged.any_continues)
        if judged.ruling is Ruling.REFUSE:
            with contextlib.suppress(Exception):  # it is refused even without a description
                step.reports.append(report(attempt, judged, args))
            if step.run.refuses:
                return refuse(attempt, judged), learned
        return commit(attempt, judged, learned)
    except BaseException as error:
        attempt.undo(error)
        raise


def _run_body(attempt: GuardedAttempt, intercept: Intercept, args: Sequence[Any]) -> None:
    """Run the body of a step. Its updates run, unless the verdict in the body refuses them. An
    exception of torch about a bad number ends the body, if the step can be undone; all others are
    raised.
    """
    step = attempt.step
    try:
        with contextlib.ExitStack() as stack:
            if not attempt.is_compiled:
                attempt.watch(stack)
            stack.enter_context(intercept.recording(attempt))
            attempt.outputs = (intercept.compiled or step.replayed)(*args)
    except Exception as error:
        if not (attempt.can_be_undone and is_numeric(error)):
            raise
        attempt.raised = True
    finally:
        attempt.note_created()


def commit(attempt: Attempt, judged: Judged, learned: Learned) -> tuple[Verdict, Learned]:
    """Read the updated state, unless the verdict has, now or with the next step. Return the verdict
    and what the steps have shown.
    """
    run, state, verdict = attempt.step.run, judged.checked.state, judged.verdict
    for created in attempt.created:
        run.note_created(*created)
    if attempt.created:
        state = attempt.step.read_state()
    if not (run.refuses and _is_unread(attempt, judged, learned)):
        return verdict, learned
    verdict, unread = read_update(state, verdict, run.agreement)
    return verdict, replace(learned, unread=unread)


def _is_unread(attempt: Attempt, judged: Judged, learned: Learned) -> bool:
    """Whether the verdict has not seen all weights and slots as they are now: it was computed
    before the update, the update has created some, or the body has written some past Keras for the
    first time.
    """
    if attempt.created or (attempt.updates and not judged.checked.has_updated):
        return True
    unseen = learned.untracked.keys() - attempt.log.kept.keys()
    unseen |= learned.uncounted - attempt.learned.uncounted
    return not judged.checked.state.updated.isdisjoint(unseen)


def refuse(attempt: Attempt, judged: Judged) -> Verdict:
    """Undo a step; update each loss scale that it is about. Return the verdict."""
    verdict = judged.verdict._replace(refused=True)
    overflowed = _overflowed(attempt) if verdict.only_gradients else []
    known = judged.checked.state.train_state.optimizers
    blamed = [update.optimizer for update in overflowed] if verdict.only_gradients else known
    attempt.log.give_back(halfway=attempt.raised)
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


def _overflowed(attempt: Attempt) -> list[Update]:
    """Return the updates with bad gradients by optimizers that scale the loss: those of another one
    keep their sums and their scale. All of them if processes train together.
    """
    scaled = [u for u in attempt.updates if keras_optimizers.scales_of(u.optimizer)]
    if attempt.step.run.agreement.count > 1:
        return scaled
    return [u for u in scaled if not reductions.are_finite([g for g, _ in u.pairs])]
