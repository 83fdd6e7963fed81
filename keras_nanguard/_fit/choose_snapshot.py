"""Chooses the snapshot to restore."""

from __future__ import annotations

import math
from statistics import fmean

from keras_nanguard._backends import processes
from keras_nanguard._core.history import WINDOW, level_of
from keras_nanguard._fit.action_context import ActionContext
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.snapshots import Snapshot
from keras_nanguard._fit.steps import Rerun
from keras_nanguard._fit.trial import Trial, clearly_lower, tried


def before_onset(context: ActionContext) -> Snapshot | None:
    """Return the newest snapshot from before the onset, or an older one if the last restored one
    brought no progress; see `Ring.before_onset`. Of a proven divergence it is that of the proof.
    """
    run, incident, restored = context.run, context.incident, context.run.counts.restored
    if context.restart is not None:
        onset = context.restart.step
    else:
        onset = incident.step if incident.onset is None else int(incident.onset)
        if restored is not None and not _improved(run, restored):
            onset = min(onset, max(restored - 1, 0))
    first = min((m.loss for m in run.history.first(run.step)), default=math.inf)

    def can_replay(snapshot: Snapshot) -> bool:
        return known_since(run, snapshot, incident.step) is not None

    return run.ring.before_onset(onset, first, can_replay)


def last_good(context: ActionContext) -> tuple[bool, Snapshot | None]:
    """Return whether the current state is the last good one, and if not, the snapshot to end the
    run with.

    After a divergence it is, of those from before the onset, the one with the lowest loss on the
    last batches; the current state is good if its loss is not clearly higher. If that cannot be
    tested, the snapshot is the one that a rollback would restore.
    """
    run, incident = context.run, context.incident
    untouched = incident.refused and "state" not in incident.sites
    if not incident.diverged:
        return (True, None) if untouched else (False, run.ring.newest())
    wanted = before_onset(context)
    unknown: tuple[bool, Snapshot | None] = (False, wanted)
    batches = run.recent.last(WINDOW) if processes.count() == 1 else []
    if not untouched or wanted is None or not batches:
        return unknown
    earlier = [s for s in run.ring.snapshots if s.step <= wanted.step and s.is_whole()]

    def compared(trying: Trial) -> tuple[bool, Snapshot | None]:
        settings = trying.settings(trying.trained(trying.present, batches))
        present = trying.losses(trying.present, batches)
        losses = {s: trying.losses(trying.state_of(s, settings), batches) for s in earlier}
        best = min(reversed(earlier), key=lambda s: fmean(losses[s]))
        if clearly_lower(losses[best], present):
            return False, best
        return math.inf not in present, wanted

    return tried(run, compared, unknown)


def known_since(run: Run, snapshot: Snapshot, step: int) -> Rerun | None:
    """Return the steps from a snapshot to a step; `None` if not all of their batches are available,
    or if the steps change something that snapshots do not have.
    """
    return run.recent.rerun(snapshot, step) if run.can_replay else None


def _improved(run: Run, restored: int) -> bool:
    """Whether the loss after the last rollback, to step `restored`, was lower than ever before."""
    before = [loss for step, loss in run.history.series if step < restored]
    before += [m.loss for m in run.history.first(run.step)]
    since = [loss for step, loss in run.history.series if step >= restored]
    level = level_of([(0, loss) for loss in sorted(since)[:WINDOW]])
    return level is not None and level.value < min(before, default=math.inf)
