"""Chooses and restores a snapshot, and replays the steps that this has undone.

If the batch of a step is remembered, the step can run again from a snapshot with the same compiled
function, batch and seeds. It gives the same numbers unless something was changed in between, such
as the learning rate. So a rollback loses no steps.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal, NamedTuple

from keras_nanguard._backends import current, processes
from keras_nanguard._backends.interface import Executed
from keras_nanguard._core.history import WINDOW, level_of
from keras_nanguard._core.incident import Incident
from keras_nanguard._core.verdict import Report
from keras_nanguard._fit.poles import Poles, Unusable
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.snapshots import Snapshot
from keras_nanguard._fit.steps import Rerun
from keras_nanguard._fit.trial import Trial, clearly_lower, tried
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._policy.decide import STATE_SITES, PolicyState, is_of_data

MOST_RERUNS = 32
"""Maximum number of rollbacks within replays of each other."""


class Restored(NamedTuple):
    """A snapshot that an action has restored, and the steps to replay from it, `None` for none."""

    snapshot: Snapshot
    rerun: Rerun | None


@dataclass(frozen=True, slots=True)
class ActionContext:
    """What the actions of one decision have in common.

    Attributes:
        replays: number of rollbacks since the first of the running replays began; 0 outside.
        restart: the snapshot from which a run that is proven to have diverged trains better, at the
            `rate_factor` of the incident; `None` for another incident.
        written_outside: whether other code has written the bad state after the last step.
        rates_before: the learning rate of each optimizer before the first action, by `id`, without
            those that raise; empty unless an action lowers it.
        restored: what an earlier action of the decision has restored, if any has.
    """

    run: Run
    incident: Incident
    report: Report | None
    replays: int
    restart: Snapshot | None = None
    written_outside: bool = False
    rates_before: Mapping[int, float] = field(default_factory=dict)
    restored: Restored | None = None


# Choosing a snapshot


def chosen(context: ActionContext, replays: bool = True, further: bool = True) -> Snapshot | None:
    """Return the snapshot that a rollback restores: after a proven divergence that of the proof,
    else see `Ring.choose`; after a divergence it is one from before the onset.

    Args:
        replays: whether the rollback replays the steps since then, if they are known.
        further: whether it goes further back than the last one, if that has brought no progress.
    """
    run, incident, restored = context.run, context.incident, context.run.counts.restored
    if context.restart is not None:
        return context.restart
    onset = math.inf if incident.onset is None else incident.onset
    if further and restored is not None and not _improved(run, restored):
        onset = min(onset, max(restored - 1, 0))
    first = min((m.loss for m in run.history.first(run.step)), default=math.inf)

    def can_replay(snapshot: Snapshot) -> bool:
        return replays and known_since(run, snapshot, incident.step) is not None

    return run.ring.choose(onset, can_replay, first if incident.diverged else None)


def last_good(context: ActionContext) -> Snapshot | Literal["present"] | None:
    """Return the snapshot to end the run with, `"present"` if the current state is the last good
    one, `None` if no good one is known.

    After a divergence it is, of those from before the onset, the one with the lowest loss on the
    last batches; the current state is good if its loss is not clearly higher. If that cannot be
    tested, the snapshot is the one that a rollback would restore.
    """
    run, incident = context.run, context.incident
    bad = _has_bad_state(incident)
    if not incident.diverged:
        return run.ring.last_undone() or (run.ring.newest() if bad else "present")
    wanted = chosen(context)
    batches = run.recent.last(WINDOW) if processes.count() == 1 else []
    if bad or not incident.refused or wanted is None or not batches:
        return wanted
    earlier = [s for s in run.ring.snapshots if s.step <= wanted.step and s.is_whole()]

    def compared(trying: Trial) -> Snapshot | Literal["present"] | None:
        settings = trying.settings(trying.trained(trying.present, batches))
        present = trying.losses(trying.present, batches)
        losses = {s: trying.losses(trying.state_of(s, settings), batches) for s in earlier}
        best = min(reversed(earlier), key=lambda s: fmean(losses[s]))
        if clearly_lower(losses[best], present):
            return best
        return wanted if math.inf in present else "present"

    return tried(run, compared, wanted)


def known_since(run: Run, snapshot: Snapshot, step: int) -> Rerun | None:
    """Return the steps from a snapshot to a step; `None` if not all of their batches are available,
    or if the steps change something that snapshots do not have.
    """
    return run.recent.rerun(snapshot.step, step) if run.can_replay else None


def _improved(run: Run, restored: int) -> bool:
    """Whether the loss after the last rollback, to step `restored`, was lower than ever before."""
    before = [loss for step, loss in run.history.series if step < restored]
    before += [m.loss for m in run.history.first(run.step)]
    since = [loss for step, loss in run.history.series if step >= restored]
    level = level_of([(0, loss) for loss in sorted(since)[:WINDOW]])
    return level is not None and level.value < min(before, default=math.inf)


# Restoring it


def _ends(context: ActionContext) -> bool:
    decision = context.incident.decision
    return decision is not None and decision.terminal


def can_rerun(context: ActionContext) -> bool:
    """Whether steps may be replayed: one has run, and the incident is no result of too many replays
    within each other.
    """
    run, replays = context.run, context.replays
    stays = replays and (_ends(context) or run.stopped or replays >= MOST_RERUNS)
    return not stays and (run.step > 0 or context.report is not None)


def plan_replay(context: ActionContext, snapshot: Snapshot) -> Rerun | None:
    """Agree with the other processes on the steps since a snapshot that are to be replayed; `None`
    if not all processes have all of their batches, or if replaying them has led to this incident.
    """
    run, incident = context.run, context.incident
    if not can_rerun(context):
        return run.agreement.rerun(None)
    if _is_to_blame(context):
        run.recent.mark_bad(incident.step)
    return run.agreement.rerun(known_since(run, snapshot, incident.step))


def _is_to_blame(context: ActionContext) -> bool:
    """Whether the step of the incident would be bad again, from the good state before it: it has
    left a bad one, or was refused for its data, or once more in a replay.
    """
    incident = context.incident
    if not incident.refused:
        return _has_bad_state(incident) and not context.written_outside
    by_state = incident.diverged or _has_bad_state(incident)
    return is_of_data(incident) or bool(context.replays and not by_state)


def _has_bad_state(incident: Incident) -> bool:
    """Whether the state itself is bad: before a step that was refused, or after another one."""
    sites = ("state",) if incident.refused else STATE_SITES
    kinds = ("nonfinite", "out_of_range", "collapse")
    return any(f.site in sites and f.kind in kinds for f in incident.findings)


def restore(
    context: ActionContext, snapshot: Snapshot, rerun: Rerun | None, reseed: bool = False
) -> int:
    """Write a snapshot into the model, and record that; return how many committed steps this has
    undone. `ReplayQueue.go_back` follows once all actions are done.

    Nothing else changes before the whole snapshot is written, and nothing at all if that fails.

    Args:
        rerun: the steps to replay afterwards. If given, loss scales and the generator are restored
            as well.
        reseed: whether the random generators advance, by another amount after each rollback.

    Raises:
        StateLostError: if neither the snapshot nor the previous state could be written completely.
        Exception: if the snapshot could not be written; the model has the previous state.
    """
    run, incident, step = context.run, context.incident, snapshot.step
    bad = any(finding.kind == "nonfinite" for finding in incident.findings)
    # A step may have committed, but not count as good.
    uncounted = not incident.refused and context.report is not None and bad
    undone = max(run.counts.good - snapshot.time.good + uncounted, 0)
    _write(run, snapshot, replays=rerun is not None, reseed=reseed)
    run.ring.go_back(snapshot.time, incident.diverged)
    batches = enumerate(rerun.batches, step) if rerun is not None else ()
    again = frozenset(number for number, args in batches if args is not None)
    data = {"to": step, "undone": undone, "run_again": len(again)}
    then = f"; {len(again)} steps replayed" if again else ""
    run.recorder.undo(step, again)
    run.record_event("rollback", f"Restored the state {snapshot.time}{then}.", data)
    return undone


def _write(run: Run, snapshot: Snapshot, replays: bool, reseed: bool) -> None:
    """Write a snapshot, and restore or advance the random generators."""
    train_state = run.train_state()
    changed: list[tuple[Any, Any]] = []
    if reseed:
        times = run.counts.rollbacks + 1
        changed = keras_variables.moved_seeds(train_state.other, times, snapshot.value)
    snapshot.write(train_state.kept if replays else train_state.restorable, changed)
    for restore_unlisted in snapshot.unlisted if replays else ():
        with contextlib.suppress(Exception):  # other code may have replaced what it restores
            restore_unlisted()
    if replays and snapshot.generator is not None:
        current.host().set_generator_state(snapshot.generator)
    elif reseed:
        current.host().advance_generator()


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The point at which replays have interrupted a run, where it continues afterwards.

    Attributes:
        stopped: whether the policy had ended training.
        refused: whether the last step was refused.
        streaks: the state of the policy with the streaks up to this step.
        poles: those that its incident is about, to be passed over.
    """

    stopped: bool
    refused: bool
    streaks: PolicyState
    poles: Unusable


class ReplayQueue:
    """The steps of one run that rollbacks have undone, and that are still to run again.

    A rollback moves the time of the run back at once, so state and counts always fit together.
    `Session` runs the steps again once everything about the incident is done.

    Args:
        poles: the poles of its schedules, which are passed over.

    Attributes:
        rollbacks: number of rollbacks since the first of the running replays began; 0 outside.
    """

    def __init__(self, run: Run, poles: Poles):
        self._run, self._poles = run, poles
        self._interrupted: Interrupted | None = None
        self._batches: deque[Any] = deque()
        self._metrics: list[tuple[Any, Any]] = []
        self.rollbacks = 0

    @property
    def running(self) -> bool:
        """Whether steps run again that a rollback has undone, or are to."""
        return self._interrupted is not None

    @property
    def goes_on(self) -> bool:
        """Whether another step is to run again. If the policy ends training in one of them, the
        state that it has restored is not trained further.
        """
        interrupted = self._interrupted
        ended = self._run.stopped and not (interrupted is not None and interrupted.stopped)
        return bool(self._batches) and not ended

    def go_back(self, restored: Restored, poles: Unusable) -> None:
        """Continue from a snapshot that was restored: remove the steps since then from counts,
        batches and measurements, and replay them if they are known.

        Args:
            poles: those that the incident is about, to be passed over after the replays.
        """
        run, counts, (snapshot, rerun) = self._run, self._run.counts, restored
        if rerun is not None and not self.running:
            seen = (run.stopped, counts.last_refused, run.recovery.policy_state)
            self._interrupted = Interrupted(*seen, poles)
        step, every = snapshot.step, run.policy.snapshot.every
        run.history.undo(step)
        counts.go_back(snapshot.time, rerun)
        if rerun is None:
            run.recent.restart()
            return
        self.rollbacks += 1
        run.recent.return_to(step)
        run.recovery.return_to(counts.committed)
        run.recovery.count(run.recovery.policy_state.without_refused(rerun.refused))
        for task in ("changes", "checks", "verify_snapshots"):  # they are due again
            run.due.plan(task, step + 1)
        run.due.plan("snapshot", step + every if every else math.inf)
        self._metrics = self._metrics_from(snapshot)
        self._batches.extendleft(reversed(rerun.batches))

    def leave_out(self, step: int) -> None:
        """Remember that a step was refused for the state that the step before it has left; its
        incident is that of the step before.
        """
        run = self._run
        if run.step == step:
            run.recent.push(step, None, refused=True)
        else:  # it is passed over once the steps before it have run again
            self._batches.insert(step - run.step, None)

    def step(self) -> Executed | None:
        """Run the next step again; return `None` if it is passed over."""
        run, args = self._run, self._batches.popleft()
        if run.step == run.counts.epoch.first and not self._metrics:
            self._begin_metrics()
        self._poles.pass_over()
        if args is not None:
            return run.access.run_again(args)
        run.recent.push(run.step, None, refused=True)
        run.counts.leave_out()
        return None

    def end(self, completed: bool) -> None:
        """Continue after the last step of the replays, as if there had been none.

        Args:
            completed: whether no exception has ended them.
        """
        run, interrupted = self._run, self._interrupted
        assert interrupted is not None
        self._interrupted, self.rollbacks = None, 0
        run.counts.end_replay(len(self._batches), interrupted.refused)
        run.recovery.count(run.recovery.policy_state.with_streaks_of(interrupted.streaks))
        self._batches.clear()
        if completed:
            run.access.sync_variables()
            for variable, value in self._metrics:
                keras_variables.write(variable, value)
            run.save_changes()
            self._poles.pass_over_found(interrupted.poles)

    def _metrics_from(self, snapshot: Snapshot) -> list[tuple[Any, Any]]:
        """Restore the metrics of a snapshot. If they are unknown, return the values to write back
        afterwards.
        """
        run, stored = self._run, snapshot.metrics
        metrics = run.train_state().metrics
        if snapshot.step <= run.counts.epoch.first and hasattr(run.model, "reset_metrics"):
            self._begin_metrics()
            return []
        if not all(id(variable) in stored for variable in metrics):
            return [(variable, keras_variables.read(variable)) for variable in metrics]
        for variable in metrics:
            keras_variables.write(variable, stored[id(variable)])
        return []

    def _begin_metrics(self) -> None:
        """Reset the metrics, as at the start of an epoch. A torch module has none."""
        if hasattr(self._run.model, "reset_metrics"):
            self._run.access.sync_variables()
            self._run.model.reset_metrics()
