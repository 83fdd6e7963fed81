"""The tasks between two steps. Each returns the step at which it is due again; `None` if it has led
to a rollback, and the last steps run again.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from keras_nanguard._backends import current, processes
from keras_nanguard._core.history import WINDOW, level_of
from keras_nanguard._fit.divergence import Divergence
from keras_nanguard._fit.incidents import Incidents, incident_of
from keras_nanguard._fit.monitors import Monitors
from keras_nanguard._fit.refusals import needs_low_scale
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.snapshots import UNKNOWN, Snapshot, size_of
from keras_nanguard._fit.state_check import bad_scales
from keras_nanguard._fit.steps import Task
from keras_nanguard._policy.actions import ACTIONS


class Tasks:
    """The tasks of one run."""

    def __init__(self, run: Run, incidents: Incidents):
        self.run, self.incidents = run, incidents
        self.monitors = Monitors()
        self.divergence = Divergence(bool(run.policy.divergence.action))
        run.due.plan("checks", self.monitors.next_look(0))
        run.due.plan("divergence", self.divergence.next_look(0))
        run.due.plan("snapshot", run.policy.snapshot.every or inf)

    def begin_epoch(self, step: int) -> None:
        """Plan the tasks of an epoch. The learning rate is read after its first step."""
        if self.divergence.has_window(step):
            self.run.due.plan("divergence", step + 1)
        self.run.due.plan("rate", step + 1)

    def read_rate(self) -> float:
        """Record the current learning rate."""
        run = self.run
        if run.began and not run.stopped:
            with run.access.variables_readable():
                run.record_rate()
        return inf

    def continue_changes(self) -> float:
        """Continue the changes of the policy that last for several steps."""
        run = self.run
        if run.counts.last_refused:
            return run.step + 1 if run.recovery.active else inf
        left = run.recovery.after_good_step(run.counts.committed, run.train_state())
        run.record_factor()
        return run.step + left

    def check(self) -> float | None:
        """Check for finite faults."""
        run, low_scale = self.run, needs_low_scale(self.run)
        with run.access.variables_readable():
            # A value that is spread is read by all processes at once.
            if run.recorder.wants_rate and processes.count() == 1:
                run.record_rate()
            findings = run.agreement.between_steps(self.monitors.look(run, low_scale))
        if findings and self.incidents.handle(incident_of(run, findings)).replays:
            return None  # the last steps run again
        return self.monitors.next_look(run.step)

    def look_for_divergence(self) -> float | None:
        """Check whether the run is lost."""
        run, divergence = self.run, self.divergence
        if self.incidents.replays.running:
            return run.due.step_of("divergence")  # once the steps have run again
        if divergence.on_probation:
            if divergence.judge(run):
                self.take_snapshot(verified=True)  # trials have trained from the restored state
            return divergence.next_look(run.step)
        lost = divergence.look(run)
        if lost is None:
            return divergence.next_look(run.step)
        handled = self.incidents.handle(lost.incident, restart=lost.restart)
        if not any(ACTIONS[name].changes for name in handled.incident.changes):
            divergence.disable()
        return None if handled.replays else divergence.acted(run)

    def after_replays(self, name: Task) -> None:
        """Plan a task that has led to a rollback, once the undone steps have run again."""
        if name == "checks":
            self.run.due.plan(name, self.monitors.next_look(self.run.step))
        elif name == "divergence":
            self.run.due.plan(name, self.divergence.acted(self.run))

    def verify_snapshots(self) -> float:
        """Mark the snapshots after which enough steps were good."""
        return self.run.step + self.run.ring.promote(self.run.counts.good)

    def snapshot_due(self) -> float | None:
        """Take a snapshot at an interval, after a good step."""
        run, step = self.run, self.run.step
        if not run.ring.has_advanced(run.counts.good):
            return step + 1
        taken = self.take_snapshot()
        if taken is None:
            return None
        if taken:
            run.record_event("snapshot")
        run.due.plan("verify_snapshots", self.verify_snapshots())
        return step + run.policy.snapshot.every

    def take_snapshot(self, once_more: bool = True, verified: bool = False) -> bool | None:
        """Copy the state, or raise an incident if it is not finite.

        Args:
            once_more: whether to copy a first state that an action of the incident has changed.
            verified: whether it counts as verified immediately, as the first one does.

        Returns:
            Whether the state is copied; `None` if the last steps are to run again.
        """
        run = self.run
        first = not run.step
        with run.access.variables_readable():
            state = run.train_state()
            run.save_changes()
            level = level_of(run.history.last(WINDOW)) or UNKNOWN
            fresh = Snapshot(
                run.counts.now,
                first or verified,
                level,
                generator=current.host().generator_state(),
                unlisted=state.unlisted_restorers() if run.can_replay else (),
            )
            obstacle = run.ring.take(fresh, state, run.state_check.accepts)
        if obstacle == "memory":
            which = " of the state before the first step" if first else ""
            run.say_lacks_memory(f"no snapshot{which}", size_of(state.kept))
        if obstacle == "nonfinite":
            bad = [*run.scan(before=first), *bad_scales(run.train_state())]
            handled = self.incidents.handle(incident_of(run, bad))
            if handled.replays:
                return None
            if first and once_more and handled.incident.changes:
                return self.take_snapshot(once_more=False)
        return not obstacle


TASKS: dict[Task, Callable[[Tasks], float | None]] = {
    "changes": Tasks.continue_changes,
    "rate": Tasks.read_rate,
    "checks": Tasks.check,
    "divergence": Tasks.look_for_divergence,
    "verify_snapshots": Tasks.verify_snapshots,
    "snapshot": Tasks.snapshot_due,
}
"""The tasks in their order."""
