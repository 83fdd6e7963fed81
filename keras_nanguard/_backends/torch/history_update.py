"""Adds what a step on PyTorch shows about its body to the history of the body, for later steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from keras_nanguard._backends.torch import reductions
from keras_nanguard._backends.torch.body_history import Learned
from keras_nanguard._backends.torch.execution import BodyResult
from keras_nanguard._backends.torch.judging import Judged
from keras_nanguard._backends.torch.step_context import StepContext
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._keras.tensors import local


def learned_from(context: StepContext, result: BodyResult, judged: Judged) -> Learned:
    """Return what a step that has run, and those before it, have shown."""
    before, by_hand, uncounted = context.learned, list[Any](), list[Any]()
    if result.at_update is not None:
        by_hand += result.at_update.written
        uncounted += result.at_update.uncounted
    by_hand += [*_not_updated(context.written(), result.updates), *_assigned(context)]
    uncounted += _not_updated(context.written_uncounted(), result.updates)
    continues = _continues(context, result)
    context.log.note_gradients()
    adds, known = context.log.adds_by_hand, context.learned.adds_by_hand
    is_one_of_several = context.facts.run.agreement.count > 1
    return replace(
        before,
        untracked={**before.untracked, **{id(t): t for t in (*by_hand, *uncounted)}},
        tolerated=before.tolerated | judged.measured.constants,
        keeps_undo=judged.any_continues if is_one_of_several else continues is not False,
        steps=before.steps + 1,
        stale=bool(context.log.created),
        unread={},
        continues=continues,
        uncounted={**before.uncounted, **{id(t): t for t in uncounted}},
        adds_by_hand=adds if adds or known is None else known,
    )


def _continues(context: StepContext, result: BodyResult) -> bool | None:
    """Return whether the body continues after its first update, see `Learned`."""
    before, updates, at_update = context.learned.continues, result.updates, result.at_update
    if context.facts.stock:
        return False
    if before or not updates or at_update is None:
        return before
    has_several = len(context.parts.train_state.optimizers) > 1 or len(updates) > 1
    has_late_losses = not context.intercept.noted or context.intercept.noted > at_update.losses
    is_continued = has_several or updates[0].evaluates or has_late_losses or result.continues
    return is_continued or _writes_after(context, result)


def _assigned(context: StepContext) -> list[Any]:
    """Return what a step assigns to before it is compiled; a compiled one does not show it."""
    facts, parts = context.facts, context.parts
    if not facts.jit or context.is_compiled:
        return []
    listed = set(map(id, parts.all if facts.stock else parts.small_state))
    kept = context.log.kept.items()
    return [e.tensor for key, e in kept if e.writer is not None and key not in listed]


def _writes_after(context: StepContext, result: BodyResult) -> bool:
    """Whether something that is judged was written after the last update."""
    parts, log, after = context.parts, context.log, result.after_update
    written = [t for t, version in after.values() if t._version != version]
    written += [entry.tensor for key, entry in log.kept.items() if key not in after]
    if not written:
        return False
    unjudged = parts.judged_elsewhere - parts.updated
    unjudged |= {id(local(g)) for _, g in log.gradients or ()}  # the next step judges their sum
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
