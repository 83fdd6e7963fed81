"""Restores a snapshot: selects it, writes it, and sets the counters of the run back.

The steps since then are replayed if their batches are remembered (see `replay`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._core.history import WINDOW, level_of
from keras_nanguard._core.incident import Incident
from keras_nanguard._core.verdict import Report
from keras_nanguard._fit.batchnorm import initial_statistics
from keras_nanguard._fit.recent_batches import Rerun
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.snapshots import Snapshot
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._keras.variables import write_all

MOST_RERUNS = 32
"""Maximum number of rollbacks within replays of each other."""

_SEED_STEP = 7919
"""Amount by which a rollback advances each seed: a prime, so that no number of Dropout layers
aligns with it.
"""


class Restored(NamedTuple):
    """The result of a rollback.

    Attributes:
        snapshot: the restored state.
        undone: number of committed steps since then.
        rerun: the steps that are to be replayed, or `None`.
    """

    snapshot: Snapshot
    undone: int
    rerun: Rerun | None


def newest(run: Run, depth: int = 1) -> Snapshot | None:
    """Return the `depth`-th newest verified snapshot."""
    run.ring.promote(run.counts.good)
    return run.ring.newest(depth)


@dataclass(frozen=True, slots=True)
class Rollback:
    """A rollback of a run because of an incident.

    Attributes:
        run: the run.
        incident: the incident, with its decision.
        report: the stored report of the step, if any.
        replays: number of rollbacks since the first of the running replays began; 0 outside.
    """

    run: Run
    incident: Incident
    report: Report | None
    replays: int

    # Which snapshot

    def before_onset(self) -> Snapshot | None:
        """Return the newest snapshot from before the onset, or an older one if the last restored
        one brought no progress.

        If this is the state before the first step and the steps since then cannot be replayed, the
        snapshot with the lowest loss is used instead, provided that it has made most of the
        progress. So a long run does not start over.
        """
        run, values = self.run, self.incident.values
        run.ring.promote(run.counts.good)
        onset, restored = int(values.get("onset", self.incident.step)), run.counts.restored
        if restored is not None and "rate_factor" not in values and not self._improved(restored):
            onset = min(onset, max(restored - 1, 0))
        snapshot = run.ring.before(onset)
        if snapshot is not None and not snapshot.step and self._known_since(snapshot) is None:
            kept = run.ring.with_least_loss()
            first = min((m.loss for m in run.history.first(run.step)), default=math.inf)
            level = kept.level if kept is not None else None
            progress = level is not None and level.value + level.spread < first
            if kept is not None and progress and kept.at_hand:
                return kept
        whole = snapshot is not None and snapshot.at_hand
        return snapshot if whole else run.ring.newest()

    def _improved(self, restored: int) -> bool:
        """Whether the loss after the last rollback, to step `restored`, was lower than ever
        before.
        """
        history = self.run.history
        before = [loss for step, loss in history.series if step < restored]
        before += [m.loss for m in history.first(self.run.step)]
        since = [loss for step, loss in history.series if step >= restored]
        found = level_of([(0, loss) for loss in sorted(since)[:WINDOW]])
        return found is not None and found.value < min(before, default=math.inf)

    def rerun(self, snapshot: Snapshot, ends: bool = False) -> Rerun | None:
        """Return the steps since a snapshot, to be replayed; `None` if not all processes have all
        of their batches, or if replaying them has led to this incident.

        Args:
            snapshot: the snapshot.
            ends: whether training ends.
        """
        return self.run.agreement.rerun(self._rerun(snapshot, ends))

    def _rerun(self, snapshot: Snapshot, ends: bool) -> Rerun | None:
        run, incident = self.run, self.incident
        if self.replays and (ends or run.stopped or self.replays >= MOST_RERUNS):
            return None
        ends = incident.decision is not None and incident.decision.terminal
        bad = any(f.kind in ("nonfinite", "out_of_range") for f in incident.findings)
        if run.access.can_run_again and not incident.refused and (ends or bad):
            run.recent.blame(incident.step)  # this step was bad, and not the state that it came to
        return self._known_since(snapshot)

    def _known_since(self, snapshot: Snapshot) -> Rerun | None:
        """Return the steps since a snapshot; `None` if not all of their batches are available."""
        run = self.run
        if not run.access.can_run_again:
            return None
        return run.recent.rerun(snapshot, self.incident.step)

    # Restoring it

    def restore(self, snapshot: Snapshot, rerun: Rerun | None, reseed: bool = False) -> Restored:
        """Write a snapshot into the model, and continue to count from it.

        Nothing else changes before the whole snapshot is written, and nothing at all if that fails.

        Args:
            snapshot: the state to restore.
            rerun: the steps to replay afterwards. If given, loss scales and the generator are
                restored as well.
            reseed: whether the random generators advance, by another amount after each rollback.

        Raises:
            StateLostError: if neither the snapshot nor the previous state could be written
                completely.
            Exception: if the snapshot could not be written; the model has the previous state.
        """
        run, train_state = self.run, self.run.train_state()
        variables = train_state.restorable if rerun is None else train_state.kept
        estimate = run.recovery.recalibration
        changed = initial_statistics(estimate.layers) if estimate is not None else []
        if reseed:
            changed += moved_seeds(train_state.other, run.counts.rollbacks + 1, snapshot)
        snapshot.write(variables, changed)
        if rerun is not None and snapshot.generator is not None:
            current.host().set_generator_state(snapshot.generator)
        elif rerun is None and reseed:
            current.host().advance_generator()
        if estimate is not None:
            estimate.restart()
        restored = Restored(snapshot, run.counts.good - snapshot.good + self._spoilt(), rerun)
        self._count_from(restored)
        self._record(restored)
        return restored

    def _spoilt(self) -> bool:
        """Whether the step itself has committed, and is not counted as good."""
        committed_bad = not self.incident.refused and self.report is not None
        return committed_bad and any(f.kind == "nonfinite" for f in self.incident.findings)

    def _count_from(self, restored: Restored) -> None:
        """Continue from a restored snapshot: forget everything after it."""
        run, snapshot = self.run, restored.snapshot
        run.ring.forget_after(snapshot.step)
        if restored.rerun is None:
            run.counts.good = snapshot.good
            run.recent.restart(run.step + 1, snapshot)
        else:
            run.recent.return_to(snapshot.step)
        run.history.undo(snapshot.step)
        run.counts.restored = snapshot.step

    def _record(self, restored: Restored) -> None:
        """Record that a snapshot was restored."""
        run, (snapshot, undone, rerun) = self.run, restored
        batches = enumerate(rerun.batches, snapshot.step) if rerun is not None else ()
        again = frozenset(step for step, args in batches if args is not None)
        run.recorder.undo(snapshot.step, again)
        data = {"to": snapshot.step, "undone": undone, "run_again": len(again)}
        then = f"; {len(again)} steps replayed" if again else ""
        run.event("rollback", f"Restored the state {snapshot.moment}{then}.", data)


# Random generators


def advance_generators(run: Run) -> None:
    """Advance every random generator of the model, so that the next step draws other numbers."""
    write_all(moved_seeds(run.train_state().other))
    current.host().advance_generator()


def moved_seeds(
    variables: Sequence[Any], times: int = 1, snapshot: Snapshot | None = None
) -> list[tuple[Any, Any]]:
    """Return the advanced seeds among variables, each with its new value."""
    moved = []
    for seed in keras_variables.seeds(variables):
        known = snapshot.value(seed) if snapshot is not None else None
        value = keras_variables.read(seed) if known is None else np.array(known)
        value[..., -1] += np.asarray(_SEED_STEP * times, value.dtype)
        moved.append((seed, value))
    return moved
