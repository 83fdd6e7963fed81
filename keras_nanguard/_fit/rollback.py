"""Going back to a snapshot, and what is run again from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_nanguard._core.incident import Incident
from keras_nanguard._core.verdict import Report
from keras_nanguard._fit.recent_batches import Rerun
from keras_nanguard._fit.recorded import rolled_back
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.snapshots import Snapshot
from keras_nanguard._keras import variables as keras_variables

__all__ = ["moment", "newest", "put_back", "rerun_of", "roll_back", "times"]

MOST_RERUNS = 32
"""How often one rollback may lead to the next while steps are run again."""

MOSTLY = 0.25
"""Share of all progress that may be lost again in a state that is restored in place of the one before the first step."""

_SEED_STEP = 7919
"""How far a rollback moves each seed on: a prime, so that no number of Dropout layers lines up with it."""


def newest(run: Run, depth: int = 1) -> Snapshot | None:
    """Return the verified snapshot that is `depth`-th from the newest, of those that have proven good by now."""
    run.ring.promote(run.counts.committed)
    return run.ring.newest(depth)


def _from_before_onset(run: Run, incident: Incident) -> Snapshot | None:
    """Return the newest snapshot from before the onset, an older one where the last that was restored has brought no progress.

    Where that is the state before the first step, and the steps since then are no longer at hand, the one of the lowest loss will do
    if most progress had been made there: a long run does not begin anew.
    """
    run.ring.promote(run.counts.committed)
    onset, progress = int(incident.values.get("onset", incident.step)), run.progress
    of_batches = any(f.kind == "lasting_spike" for f in incident.findings)  # shown to end well from this very snapshot
    if progress.restored is not None and not progress.improved and not of_batches:
        onset = min(onset, max(progress.restored - 1, 0))
    snapshot = run.ring.before(onset)
    if snapshot is not None and not snapshot.step and not of_batches and not _at_hand_since(run, snapshot, incident):
        kept = run.ring.with_least_loss()
        if kept is not None and kept.level is not None and progress.lost(kept.level) < MOSTLY and run.ring.restorable(kept):
            return kept
    return snapshot if snapshot is not None and run.ring.restorable(snapshot) else run.ring.newest()


def _at_hand_since(run: Run, snapshot: Snapshot, incident: Incident) -> bool:
    """Whether all steps since a snapshot can be run again."""
    known = run.recent.rerun(snapshot, incident.step, run.transaction.batch) if run.state.access.can_run_again else None
    return known is not None


def rerun_of(run: Run, snapshot: Snapshot, incident: Incident) -> Rerun | None:
    """Return the steps since a snapshot, to be run again; `None` where their batches are not all at hand."""
    if not run.state.access.can_run_again:
        return None
    if run.running_again and (run.stopped or run.reruns >= MOST_RERUNS):  # running them again has led to this
        return None
    ends = incident.decision is not None and incident.decision.terminal
    if not incident.refused and (ends or any(f.kind in ("nonfinite", "out_of_range") for f in incident.findings)):
        run.recent.blame(incident.step)  # it is this step that was bad, and not the state that it came to
    return run.recent.rerun(snapshot, incident.step, run.transaction.batch, run.progress.left_out)


def roll_back(run: Run, incident: Incident, report: Report | None, p: Mapping[str, Any]) -> tuple[str, str]:
    """Do the action `rollback` with these parameters; return whether it is done or skipped, with the detail or the reason."""
    snapshot = _from_before_onset(run, incident) if p.get("before_onset") else newest(run, p.get("depth", 1))
    if snapshot is None:
        return "skipped", "there is no verified snapshot to restore"
    rerun = rerun_of(run, snapshot, incident) if p.get("run_again") else None
    undone = put_back(run, snapshot, incident, report, rerun)
    skip = int(p.get("skip_batches", 0))
    run.counts.skip_batches += skip
    also = f"; the next {skip} batches are skipped" if skip else ""
    run.counts.rollbacks += 1
    if rerun is not None:
        without = f", {len(rerun.left_out)} of them left out" if rerun.left_out else ""
        return "done", f"back to the state {moment(snapshot)}{also}; {times(len(rerun.batches), 'step')} since then run again{without}"
    if p.get("reseed", True):
        for seed in keras_variables.seeds(run.train_state().other):
            moved = keras_variables.read(seed)
            moved[..., -1] += np.asarray(_SEED_STEP * run.counts.rollbacks, moved.dtype)
            keras_variables.write(seed, moved)
    lost = f"{times(undone, 'committed step')} undone" if undone else "no step had committed since"
    return "done", f"back to the state {moment(snapshot)}; {lost}{also}"


def moment(snapshot: Snapshot) -> str:
    """Return of when a snapshot is, in words that read the same whether steps are counted from 0 or from 1."""
    return f"after {times(snapshot.step, 'step')}" if snapshot.step else "before the first step"


def times(count: int, word: str) -> str:
    """Return a count with its word: `1 step`, `2 steps`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def put_back(run: Run, snapshot: Snapshot, incident: Incident, report: Report | None, rerun: Rerun | None = None) -> int:
    """Write a snapshot into the model; returns how many committed steps that undoes.

    With a `rerun` they are run again once every action is done: loss scales and the generator are what they were as well.
    """
    spoilt = not incident.refused and report is not None and any(f.kind == "nonfinite" for f in incident.findings)
    undone = run.recovery.pending.rolled_back_to(snapshot) + spoilt
    run.ring.forget_after(snapshot.step)
    train_state, since = run.train_state(), run.step + 1
    if rerun is None:
        run.recent.restart(since, snapshot)
        snapshot.write(train_state.restorable)
    else:
        run.rerun, since = rerun, snapshot.step
        run.recent.return_to(since)
        snapshot.write(train_state.kept)
        snapshot.draw_again()
    rolled_back(run, snapshot, undone, rerun)
    run.trend.discard_pending()
    run.history.undo(snapshot.step)
    run.progress.rolled_back(snapshot.step, since)
    run.recovery.pending.start_over()
    return undone
