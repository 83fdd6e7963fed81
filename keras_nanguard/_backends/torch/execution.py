"""One run of the transaction on PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.intercept import Intercept
from keras_nanguard._backends.torch.judging import Judged, Observed, Ruling, judge, read_update
from keras_nanguard._backends.torch.learning import Lesson
from keras_nanguard._backends.torch.parts import Learned, Parts, StepFacts
from keras_nanguard._backends.torch.raised import is_numeric
from keras_nanguard._backends.torch.undo_log import WRITES, UndoLog
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._backends.torch.watch import Watch
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._keras import (
    attributes as keras_attributes,
    optimizers as keras_optimizers,
    variables as keras_variables,
)


class StepRun:
    """One run of the transaction, from the arguments of the body to its result.

    The verdict is computed when the body calls its update, so a refused step is never updated. If
    the body continues after its update, the update runs at once, with the old values kept, and the
    verdict is computed at the end of the body.

    Args:
        learned: what earlier steps have shown.

    Attributes:
        is_compiled: whether the body is compiled, so that its writes are not recorded.
        keeps_undo: whether it is updated at once, with the old values kept.
        log: what a refusal restores.
        updates: the updates that have run.
        judged_in_body: the verdict, if it was computed in the body.
    """

    judged_in_body: Judged | None = None

    def __init__(
        self,
        step: StepFacts,
        parts: Parts,
        learned: Learned,
        intercept: Intercept,
        args: Sequence[Any],
    ):
        self.step, self.run, self.parts, self.learned = step, step.run, parts, learned
        self.intercept, self.args = intercept, args
        self.is_compiled = intercept.compiled is not None
        keeps_undo = self.is_compiled or learned.is_fresh or learned.keeps_undo
        self.keeps_undo = step.may_undo_update and keeps_undo
        self.log = self._undo_log()
        self._lesson = Lesson(step, parts, learned, self.log, self.is_compiled)
        self._watch = Watch(parts.updated)
        self.updates: list[Update] = []
        self._created: list[tuple[Any, Any]] = []

    def _undo_log(self) -> UndoLog:
        """Return the undo log of the step, with copies of what it may write unnoticed."""
        parts, learned, undoes_updates = self.parts, self.learned, self.step.may_undo_update
        uncounted = [*parts.unlisted, *learned.uncounted.values()]
        kept = list(learned.untracked.values())
        if learned.is_fresh:
            kept += parts.other
            kept += parts.weights_and_slots if undoes_updates else ()
        if self.is_compiled:
            uncounted, kept = [*uncounted, *parts.small_state, *kept], []
        log = UndoLog(kept, uncounted, holders=parts.holders if undoes_updates else ())
        if self.is_compiled or not undoes_updates:
            log.keep_gradients()
        attributes = parts.attributes(every=learned.is_fresh)
        log.at_undo("attributes", partial(keras_attributes.give_back_tensors, attributes))
        log.at_undo("gradients", partial(log.give_back_gradients, parts.holders))
        # `Watch` keeps those of an eager step when they update.
        for optimizer in parts.loose if undoes_updates and self.is_compiled else ():
            log.at_undo(id(optimizer), optimizer.held())
        return log

    def complete(self) -> tuple[Any, Verdict, Learned, list[Report]]:
        """Run the step; commit or refuse it. Return the outputs, `None` if the body raised an
        exception about a bad number, the verdict, what the steps have shown, and the report of a
        bad one.
        """
        outputs, raised = self._run_body()
        judged = self.judged_in_body or self._judge(outputs, raised)
        if judged.ruling is Ruling.CHECK:
            judged = self._judge(outputs, raised)
        learned = self._lesson.learned(judged, self.updates, self._watch.continues)
        reports: list[Report] = []
        if judged.ruling is Ruling.REFUSE:
            with contextlib.suppress(Exception):  # the step is refused even without a description
                reports.append(self._report(judged))
        if judged.ruling is Ruling.REFUSE and self.run.refuses:
            return outputs, self._refuse(judged.verdict), learned, reports
        return outputs, *self._commit(judged, learned), reports

    def release(self) -> None:
        """Release all tensors, so that an exception that refers to this run does not keep them."""
        self.intercept.release()
        self.log.release()
        vars(self).clear()

    # In the body

    def _run_body(self) -> tuple[Any, bool]:
        """Run the body; return its outputs, and whether torch has raised about a bad number."""
        function = self.intercept.compiled or self.step.body
        try:
            with contextlib.ExitStack() as stack:
                if not self.is_compiled:
                    stack.enter_context(self.log)
                    if self.step.may_undo_update:
                        self._watch.wait(stack)
                around_backward = self._around_backward
                stack.enter_context(self.intercept.running(self._on_update, around_backward))
                return function(*self.args), False
        except Exception as error:
            if self._can_be_undone and is_numeric(error):
                return None, True
            if self._can_be_undone:
                self.log.give_back()
            if self.run.agreement.count > 1:
                host.leave(error)
            raise
        finally:
            for created in self.log.created:
                self.run.note_created(*created)

    def _around_backward(self) -> contextlib.AbstractContextManager[None]:
        self.log.keep_gradients()
        return self._watch.around_backward()

    def _on_update(self, record: Update) -> None:
        """Run the update, unless the verdict on the step refuses it."""
        record.build()  # as Keras would, so that its variables are noted
        if not record.evaluates:
            self.log.keep_gradients()
        if not self.updates:
            self._lesson.before_update(self.intercept.noted)
        if record.evaluates and self.judged_in_body is None:
            self.keeps_undo = self.step.may_undo_update
        if self.run.refuses and not self.keeps_undo and self.judged_in_body is None:
            self.judged_in_body = self._judge(None, raised=False)
            self.keeps_undo = self.judged_in_body.ruling is Ruling.CHECK
        if self.judged_in_body is None or self.judged_in_body.ruling is not Ruling.REFUSE:
            self._update(record)
        else:
            self._watch.begin()  # the body may continue

    def _update(self, record: Update) -> None:
        """Run an update."""
        if self.keeps_undo:
            self.log.keep_updated(record.optimizer, record.state())
        if self.keeps_undo or WRITES.inside()[1:]:  # or all of this step is to be undone
            self._watch.begin()
        self.updates.append(record)
        with self._watch.during(record):
            self._created += record.run()
        self._lesson.after_update()

    @property
    def _can_be_undone(self) -> bool:
        """Whether the step may still be refused: everything that it has written is kept."""
        return self.run.refuses and (self.keeps_undo or not self.updates)

    # After the body

    def _judge(self, outputs: Any, raised: bool) -> Judged:
        intercept = self.intercept
        if self.log.created:
            self.parts = self.step.read_parts()
        losses = [loss.detach() for loss in intercept.losses or self.step.losses(outputs)]
        has_gradients = not intercept.records and intercept.noted > 0
        leaves_gradients = has_gradients and not self._lesson.has_written_weights
        is_updated = bool(self.updates)
        observed = Observed(intercept, self.log, losses, raised, is_updated, leaves_gradients)
        return judge(observed, self.parts, self.learned, self.run.agreement)

    def _commit(self, judged: Judged, learned: Learned) -> tuple[Verdict, Learned]:
        """Read the updated state, unless the verdict has, now or with the next step."""
        verdict = judged.verdict
        # The verdict did not see what is written past Keras for the first time.
        unseen = learned.untracked.keys() - self.log.kept.keys()
        unseen |= learned.uncounted.keys() - self.learned.uncounted.keys()
        for created in self._created:
            self.run.note_created(*created)
        if self._created:
            learned = replace(learned, stale=True)
            self.parts = self.step.read_parts()
        is_unread = judged is self.judged_in_body or bool(self._created)
        is_due = bool(self.intercept.records) and is_unread
        is_due = is_due or not self.parts.updated.isdisjoint(unseen)
        if not (self.run.refuses and is_due):
            return verdict, learned
        verdict, unread = read_update(self.parts, verdict, self.run.agreement)
        return verdict, replace(learned, unread=unread)

    def _refuse(self, verdict: Verdict) -> Verdict:
        """Undo the step; update each loss scale that it is about. Return the verdict."""
        verdict = verdict._replace(refused=True)
        overflowed = self._overflowed() if verdict.only_gradients else []
        known = self.parts.train_state.optimizers
        blamed = [record.optimizer for record in overflowed] if verdict.only_gradients else known
        self.log.give_back()
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

    def _overflowed(self) -> list[Update]:
        """Return the updates with bad gradients by optimizers that scale the loss: those of another
        one keep their sums and their scale. All of them if processes train together.
        """
        scaled = [r for r in self.intercept.records if keras_optimizers.scales_of(r.optimizer)]
        if self.run.agreement.count > 1:
            return scaled
        return [r for r in scaled if not reductions.are_finite([g for g, _ in r.pairs])]

    def _report(self, judged: Judged) -> Report:
        """Return the report of a bad step of this process. No argument is copied."""
        places = judged.places(self.parts)
        return Report(
            judged.own._replace(refused=self.run.refuses),
            tuple((site, path) for site, path, _ in places),
            reductions.counts([tensor for _, _, tensor in places]),
            tuple(self.args),
            left_by_previous=judged.left_by_previous,
        )
