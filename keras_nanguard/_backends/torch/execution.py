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
from keras_nanguard._backends.torch.begun import Begun
from keras_nanguard._backends.torch.judging import (
    Judged,
    Ruling,
    judge,
    places,
    read_update,
)
from keras_nanguard._backends.torch.parts import Learned
from keras_nanguard._backends.torch.raised import is_numeric
from keras_nanguard._backends.torch.undo_log import WRITES
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
class Ran:
    """A body that has run.

    Attributes:
        outputs: its outputs, `None` if it has raised.
        raised: whether torch has raised about a bad number.
        created: the tensors that its updates have created, each with its first value.
        at_update: what it has done before its first update.
        after_update: the tensors of `Begun.versions_now` after its last update.
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


def run(begun: Begun, args: Sequence[Any]) -> Ran:
    """Run the body of a step. Its updates run, unless the verdict in the body refuses them.

    An exception that is not about a bad number is raised again. Before, the state is restored if it
    can be.
    """
    facts, log, intercept = begun.facts, begun.log, begun.intercept
    watch, keeps_undo = Watch(begun.parts.updated), begun.keeps_undo
    updates: list[Update] = []
    created: list[tuple[Any, Any]] = []
    at_update: AtUpdate | None = None
    after_update: Mapping[int, tuple[Any, int]] = {}
    judged: Judged | None = None

    def on_update(record: Update) -> None:
        nonlocal keeps_undo, at_update, after_update, judged
        record.build()  # as Keras would, so that its variables are noted
        log.note_gradients()
        if not record.evaluates:
            log.keep_gradients()
        if not (updates or facts.stock):
            at_update = AtUpdate(intercept.noted, begun.written(), begun.written_uncounted())
        if judged is None:
            keeps_undo = keeps_undo or (record.evaluates and facts.may_undo_update)
            if facts.run.refuses and not keeps_undo:
                judged = judge(begun, has_updated=bool(updates))
                keeps_undo = judged.ruling is Ruling.CHECK
        if judged is not None and judged.ruling is Ruling.REFUSE:
            watch.begin()  # the body may continue
            return
        if keeps_undo:
            log.keep_updated(record.optimizer, record.state())
        if keeps_undo or WRITES.inside()[1:]:  # or all of this step is to be undone
            watch.begin()
        updates.append(record)
        with watch.during(record):
            created.extend(record.run())
        if not (facts.stock or begun.learned.continues):
            after_update = begun.versions_now()

    def around_backward() -> contextlib.AbstractContextManager[None]:
        log.note_gradients()
        log.keep_gradients()
        return watch.around_backward()

    try:
        with contextlib.ExitStack() as stack:
            if not begun.is_compiled:
                stack.enter_context(log)
                if facts.may_undo_update:
                    watch.wait(stack)
            stack.enter_context(intercept.running(on_update, around_backward))
            outputs, raised = (intercept.compiled or facts.body)(*args), False
    except Exception as error:
        can_be_undone = facts.run.refuses and (keeps_undo or not updates)
        if not (can_be_undone and is_numeric(error)):
            if can_be_undone:
                log.give_back()
            if facts.run.agreement.count > 1:
                host.leave(error)
            updates, judged = [], None  # the exception keeps this frame
            raise
        outputs, raised = None, True
    finally:
        for pair in log.created:
            facts.run.note_created(*pair)
    return Ran(outputs, raised, updates, created, at_update, after_update, watch.continues, judged)


def commit(begun: Begun, ran: Ran, judged: Judged, learned: Learned) -> tuple[Verdict, Learned]:
    """Read the updated state, unless the verdict has, now or with the next step. Return the verdict
    and what the steps have shown.
    """
    run, parts, verdict = begun.facts.run, judged.parts, judged.verdict
    for created in ran.created:
        run.note_created(*created)
    if ran.created:
        learned, parts = replace(learned, stale=True), begun.facts.read_parts()
    # The verdict did not see what is written past Keras for the first time.
    unseen = learned.untracked.keys() - begun.log.kept.keys()
    unseen |= learned.uncounted.keys() - begun.learned.uncounted.keys()
    is_unread = judged is ran.judged or bool(ran.created)
    is_due = bool(begun.intercept.records) and is_unread
    if not (run.refuses and (is_due or not parts.updated.isdisjoint(unseen))):
        return verdict, learned
    verdict, unread = read_update(parts, verdict, run.agreement)
    return verdict, replace(learned, unread=unread)


def refuse(begun: Begun, judged: Judged) -> Verdict:
    """Undo a step; update each loss scale that it is about. Return the verdict."""
    verdict = judged.verdict._replace(refused=True)
    overflowed = _overflowed(begun) if verdict.only_gradients else []
    known = judged.parts.train_state.optimizers
    blamed = [record.optimizer for record in overflowed] if verdict.only_gradients else known
    begun.log.give_back()
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


def _overflowed(begun: Begun) -> list[Update]:
    """Return the updates with bad gradients by optimizers that scale the loss: those of another one
    keep their sums and their scale. All of them if processes train together.
    """
    scaled = [r for r in begun.intercept.records if keras_optimizers.scales_of(r.optimizer)]
    if begun.facts.run.agreement.count > 1:
        return scaled
    return [r for r in scaled if not reductions.are_finite([g for g, _ in r.pairs])]


def report(begun: Begun, judged: Judged, args: Sequence[Any]) -> Report:
    """Return the report of a bad step of this process. No argument is copied."""
    found = places(begun, judged)
    return Report(
        judged.own._replace(refused=begun.facts.run.refuses),
        tuple((site, path) for site, path, _ in found),
        reductions.counts([tensor for _, _, tensor in found]),
        tuple(args),
        left_by_previous=judged.left_by_previous,
    )
