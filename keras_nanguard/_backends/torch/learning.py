"""What one step on PyTorch shows for later ones, see `Learned`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from keras_nanguard._backends.torch import reductions
from keras_nanguard._backends.torch.attempt import Attempt
from keras_nanguard._backends.torch.judging import Judged
from keras_nanguard._backends.torch.learned import Learned, Seen
from keras_nanguard._backends.torch.updates import Update


def learned_after(attempt: Attempt, judged: Judged) -> Learned:
    """Return what a step that has run, and those before it, have shown."""
    before, gradients = attempt.learned, attempt.log.gradients
    by_hand = [*attempt.written_before, *_not_updated(attempt.written(), attempt.updated)]
    by_hand += _assigned(attempt)
    uncounted = _not_updated(attempt.written_uncounted(), attempt.updated)
    uncounted += attempt.uncounted_before
    continues = _continues(attempt)
    is_one_of_several = attempt.step.run.agreement.count > 1
    return replace(
        before,
        untracked={**before.untracked, **{id(t): t for t in (*by_hand, *uncounted)}},
        tolerated=before.tolerated | judged.checked.constants,
        updates_first=judged.any_continues if is_one_of_several else continues.is_possible,
        steps=before.steps + 1,
        stale=bool(attempt.log.created or attempt.created),
        unread={},
        continues=continues,
        uncounted={**before.uncounted, **{id(t): t for t in uncounted}},
        adds_by_hand=before.adds_by_hand.then(gradients.note_writes()),
    )


def _continues(attempt: Attempt) -> Seen:
    """Return whether the body continues after its first update, see `Learned`."""
    before, updates, noted = attempt.learned.continues, attempt.updated, attempt.loss_count
    if attempt.step.stock:
        return Seen.NO
    if before is Seen.YES or not updates:
        return before
    has_several = len(attempt.state.train_state.optimizers) > 1 or len(updates) > 1
    has_late_losses = not noted or noted > attempt.losses_before
    is_continued = has_several or has_late_losses or attempt.late_writes.continues
    return Seen.of(is_continued or updates[0].evaluates or _writes_after(attempt))


def _assigned(attempt: Attempt) -> list[Any]:
    """Return what a step assigns to before it is compiled; a compiled one does not show it."""
    step, state = attempt.step, attempt.state
    if not step.jit or attempt.is_compiled:
        return []
    listed = set(map(id, state.all if step.stock else state.small_state))
    return [attempt.log.kept[key].tensor for key in attempt.log.writers if key not in listed]


def _writes_after(attempt: Attempt) -> bool:
    """Whether something that is judged was written after the last update."""
    state, log, after = attempt.state, attempt.log, attempt.versions_after
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
