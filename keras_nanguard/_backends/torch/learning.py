"""What a step on PyTorch shows about its body, for later steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from keras_nanguard._backends.torch import reductions
from keras_nanguard._backends.torch.execution import Ran
from keras_nanguard._backends.torch.judging import Judged
from keras_nanguard._backends.torch.seen import Seen
from keras_nanguard._backends.torch.step_context import Learned, StepContext
from keras_nanguard._backends.torch.updates import Update


def learned_from(context: StepContext, ran: Ran, judged: Judged) -> Learned:
    """Return what a step that has run, and those before it, have shown."""
    before, gradients = context.learned, context.log.gradients
    by_hand = [*ran.before_update.written, *_not_updated(context.written(), ran.updated)]
    by_hand += _assigned(context)
    uncounted = [*ran.before_update.uncounted]
    uncounted += _not_updated(context.written_uncounted(), ran.updated)
    continues = _continues(context, ran)
    is_one_of_several = context.definition.run.agreement.count > 1
    return replace(
        before,
        untracked={**before.untracked, **{id(t): t for t in (*by_hand, *uncounted)}},
        tolerated=before.tolerated | judged.checked.constants,
        updates_first=judged.agreed.any_continues if is_one_of_several else continues.is_possible,
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
    if context.definition.stock:
        return Seen.NO
    if before is Seen.YES or not updates:
        return before
    has_several = len(context.state.train_state.optimizers) > 1 or len(updates) > 1
    has_late_losses = not noted or noted > ran.before_update.loss_count
    is_continued = has_several or updates[0].evaluates or has_late_losses or ran.continues
    return Seen.of(is_continued or _writes_after(context, ran))


def _assigned(context: StepContext) -> list[Any]:
    """Return what a step assigns to before it is compiled; a compiled one does not show it."""
    definition, state = context.definition, context.state
    if not definition.jit or context.is_compiled:
        return []
    listed = set(map(id, state.all if definition.stock else state.small_state))
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
