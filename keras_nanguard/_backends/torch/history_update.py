"""Adds what a step on PyTorch shows about its body to the history of the body, for later steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from keras_nanguard._backends.torch import reductions
from keras_nanguard._backends.torch.body_history import Learned
from keras_nanguard._backends.torch.execution import BodyRun
from keras_nanguard._backends.torch.judging import Judged
from keras_nanguard._backends.torch.step_context import StepContext
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._keras.tensors import local


def learned_from(context: StepContext, ran: BodyRun, judged: Judged) -> Learned:
    """Return what a step that has run, and those before it, have shown."""
    before, by_hand, uncounted = context.learned, list[Any](), list[Any]()
    if ran.at_update is not None:
        by_hand += ran.at_update.written
        uncounted += ran.at_update.uncounted
    by_hand += [*_not_updated(context.written(), ran.updates), *_assigned(context)]
    uncounted += _not_updated(context.written_uncounted(), ran.updates)
    continues = _continues(context, ran)
    context.log.gradients.note_writes()
    adds, known = context.log.gradients.added_by_hand, context.learned.adds_by_hand
    is_one_of_several = context.definition.run.agreement.count > 1
    return replace(
        before,
        untracked={**before.untracked, **{id(t): t for t in (*by_hand, *uncounted)}},
        tolerated=before.tolerated | judged.constants,
        keeps_undo=judged.any_continues if is_one_of_several else continues is not False,
        steps=before.steps + 1,
        stale=bool(context.log.created),
        unread={},
        continues=continues,
        uncounted={**before.uncounted, **{id(t): t for t in uncounted}},
        adds_by_hand=adds if adds or known is None else known,
    )


def _continues(context: StepContext, ran: BodyRun) -> bool | None:
    """Return whether the body continues after its first update, see `Learned`."""
    before, updates, at_update = context.learned.continues, ran.updates, ran.at_update
    if context.definition.stock:
        return False
    if before or not updates or at_update is None:
        return before
    has_several = len(context.parts.train_state.optimizers) > 1 or len(updates) > 1
    has_late_losses = not context.intercept.noted or context.intercept.noted > at_update.losses
    is_continued = has_several or updates[0].evaluates or has_late_losses
    return is_continued or ran.late_writes.continues or _writes_after(context, ran)


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
