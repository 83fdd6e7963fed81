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
from keras_nanguard._backends.torch.numeric_errors import is_numeric
from keras_nanguard._backends.torch.state_tensors import StateTensors
from keras_nanguard._backends.torch.step_context import StepContext
from keras_nanguard._backends.torch.undo_log import is_undone_as_a_whole
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._backends.torch.watch import Watch
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


@dataclass(frozen=True, eq=False)
class BodyResult:
    """A body that has run.

    Attributes:
        outputs: its outputs, `None` if it has raised.
        raised: whether torch has raised about a bad number.
        created: the tensors that its updates have created, each with its first value.
        at_update: what it has done before its first update.
        after_update: the tensors of `StepContext.versions_now` after its last update.
        continues: whether `Watch` has shown that it continues after an update.
        judged: the verdict, if it was computed in the body.
    """

    outputs: Any
    raised: bool
    updates: Sequence[Update]
    created: Sequence[tuple[Any, Any]]
    at_update: AtUpdate | None
    after_update: Mapping[int, tuple[Any, int]]
    continues: bool
    judged: Judged | None


class Running:
    """A body while it runs. The calls of its updates come here.

    Attributes:
        keeps_undo: whether its updates run at once, with the old values kept.

    The other attributes are those of `BodyResult`.
    """

    def __init__(self, context: StepContext):
        self._context, self.watch = context, Watch(context.parts.updated)
        self.keeps_undo = context.keeps_undo
        self.updates: list[Update] = []
        self.created: list[tuple[Any, Any]] = []
        self.at_update: AtUpdate | None = None
        self.after_update: Mapping[int, tuple[Any, int]] = {}
        self.judged: Judged | None = None

    @property
    def can_be_undone(self) -> bool:
        """Whether everything that the body has done so far can be undone."""
        return self._context.facts.run.refuses and (self.keeps_undo or not self.updates)

    def on_update(self, record: Update) -> None:
        """Run an update, unless the verdict refuses it."""
        record.build()  # as Keras would, so that its variables are noted
        self._keep_gradients(record)
        self._judge(record)
        if self.judged is not None and self.judged.ruling is Ruling.REFUSE:
            self.watch.begin()  # the body may continue
        else:
            self._update(record)

    def _keep_gradients(self, record: Update) -> None:
        """Keep what the update uses, and note what the body has done before its first one."""
        context, log = self._context, self._context.log
        log.note_gradients()
        if not record.evaluates:
            log.keep_gradients()
        if not (self.updates or context.facts.stock):
            losses = context.intercept.noted
            self.at_update = AtUpdate(losses, context.written(), context.written_uncounted())

    def _judge(self, record: Update) -> None:
        """Compute the verdict before the first update that must wait for it."""
        facts = self._context.facts
        if self.judged is not None:
            return
        self.keeps_undo = self.keeps_undo or (record.evaluates and facts.may_undo_update)
        if facts.run.refuses and not self.keeps_undo:
            self.judged = judge(self._context, has_updated=bool(self.updates))
            self.keeps_undo = self.judged.ruling is Ruling.CHECK

    def _update(self, record: Update) -> None:
        context = self._context
        if self.keeps_undo:
            context.log.keep_updated(record.optimizer, record.state())
        if self.keeps_undo or is_undone_as_a_whole():
            self.watch.begin()
        self.updates.append(record)
        with self.watch.during(record):
            self.created.extend(record.run())
        if not (context.facts.stock or context.learned.continues):
            self.after_update = context.versions_now()

    def around_backward(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a backward pass, which may add to the gradients that it finds."""
        self._context.log.note_gradients()
        self._context.log.keep_gradients()
        return self.watch.around_backward()

    def release(self) -> None:
        """Release the tensors, which an exception in an update would keep."""
        self.updates, self.judged = [], None

    def ended(self, outputs: Any, raised: bool) -> BodyResult:
        """Return the body after its end."""
        seen = self.at_update, self.after_update, self.watch.continues
        return BodyResult(outputs, raised, self.updates, self.created, *seen, self.judged)


def run(context: StepContext, args: Sequence[Any]) -> BodyResult:
    """Run the body of a step. Its updates run, unless the verdict in the body refuses them.

    An exception that is not about a bad number is raised again. Before, the state is restored if it
    can be.
    """
    facts, log, intercept = context.facts, context.log, context.intercept
    running = Running(context)
    try:
        with contextlib.ExitStack() as stack:
            if not context.is_compiled:
                stack.enter_context(log)
                if facts.may_undo_update:
                    running.watch.wait(stack)
            stack.enter_context(intercept.running(running.on_update, running.around_backward))
            return running.ended((intercept.compiled or facts.body)(*args), raised=False)
    except Exception as error:
        if running.can_be_undone and is_numeric(error):
            return running.ended(None, raised=True)
        if running.can_be_undone:
            log.give_back()
        if facts.run.agreement.count > 1:
            host.leave(error)
        running.release()
        raise
    finally:
        for pair in log.created:
            facts.run.note_created(*pair)


def commit(
    context: StepContext, result: BodyResult, judged: Judged, learned: Learned
) -> tuple[Verdict, Learned]:
    """Read the updated state, unless the verdict has, now or with the next step. Return the verdict
    and what the steps have shown.
    """
    run, parts, verdict = context.facts.run, judged.measured.parts, judged.verdict
    for created in result.created:
        run.note_created(*created)
    if result.created:
        learned, parts = replace(learned, stale=True), context.facts.read_parts()
    if not (run.refuses and _update_is_unread(context, result, judged, learned, parts)):
        return verdict, learned
    verdict, unread = read_update(parts, verdict, run.agreement)
    return verdict, replace(learned, unread=unread)


def _update_is_unread(
    context: StepContext,
    result: BodyResult,
    judged: Judged,
    learned: Learned,
    parts: StateTensors,
) -> bool:
    """Whether the verdict has not seen all weights and slots as they are now: it was computed
    before the update, the update has created some, or the body has written some past Keras for the
    first time.
    """
    is_before_update = judged is result.judged or bool(result.created)
    if context.intercept.records and is_before_update:
        return True
    unseen = learned.untracked.keys() - context.log.kept.keys()
    unseen |= learned.uncounted.keys() - context.learned.uncounted.keys()
    return not parts.updated.isdisjoint(unseen)


def refuse(context: StepContext, judged: Judged) -> Verdict:
    """Undo a step; update each loss scale that it is about. Return the verdict."""
    verdict = judged.verdict._replace(refused=True)
    overflowed = _overflowed(context) if verdict.only_gradients else []
    known = judged.measured.parts.train_state.optimizers
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
    if context.facts.run.agreement.count > 1:
        return scaled
    return [r for r in scaled if not reductions.are_finite([g for g, _ in r.pairs])]


def report(context: StepContext, judged: Judged, args: Sequence[Any]) -> Report:
    """Return the report of a bad step of this process. No argument is copied."""
    found = places(context, judged)
    return Report(
        judged.own._replace(refused=context.facts.run.refuses),
        tuple((site, path) for site, path, _ in found),
        reductions.counts([tensor for _, _, tensor in found]),
        tuple(args),
        left_by_previous=judged.measured.has_bad_previous,
    )
