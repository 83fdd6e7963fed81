"""The tasks between two steps, and when they are due: reading the learning rate, measuring layers,
checks for finite faults and for divergence, and snapshots.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from keras_nanguard._backends import processes
from keras_nanguard._core.history import WINDOW, level_of
from keras_nanguard._fit.divergence import Divergence
from keras_nanguard._fit.incidents import Incidents
from keras_nanguard._fit.monitors import LayerLooks, Monitors
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.snapshots import Snapshot, size_of


class Tasks:
    """The tasks of one run.

    Args:
        run: the run.
        incidents: raises the incidents of what the checks find.
    """

    def __init__(self, run: Run, incidents: Incidents):
        self._run, self._incidents = run, incidents
        self.monitors, self.layer_looks = Monitors(run.policy), LayerLooks()
        self.divergence = Divergence(bool(run.policy.divergence.action))
        run.due.plan("checks", self.monitors.due)
        run.due.plan("divergence", self.divergence.due)
        run.due.plan("snapshot", run.policy.snapshot.every or inf)

    def begin_epoch(self) -> None:
        """Plan what is due after the first step of an epoch."""
        step = self._run.step
        self.divergence.begin_epoch(step)
        self._run.due.plan("divergence", self.divergence.due)
        self._run.due.plan("rate", step + 1)

    def run_due(self) -> None:
        """Run the tasks that are due. Layers are measured only together with another task."""
        run = self._run
        if self._incidents.replay.pending is not None:
            return  # the state is that of an earlier step
        if run.step >= self.layer_looks.next_step:
            run.due.plan("layers", run.step)
        for name, task in TASKS.items():
            if run.due.is_due(name, run.step) and not run.stopped:
                run.due.plan(name, task(self))

    def read_rate(self) -> float:
        """Record the current learning rate."""
        run = self._run
        if run.began and not run.stopped:
            with run.access.variables_readable():
                run.recording.rate()
        return inf

    def _look_at_layers(self) -> float:
        """Measure the layers."""
        return self.layer_looks.look(self._run)

    def _check(self) -> float:
        """Check for finite faults."""
        run = self._run
        with run.access.variables_readable():
            # A value that is spread is read by all processes at once.
            if run.recording.recorder.wants_rate and processes.count() == 1:
                run.recording.rate()
            findings = run.agreement.between_steps(self.monitors.look(run))
        if findings:
            self._incidents.between_steps(findings)
        return self.monitors.due

    def _look_for_divergence(self) -> float:
        """Check whether the run is lost."""
        lost = None if self._incidents.replay.rollbacks else self.divergence.look(self._run)
        if lost is not None:
            proof = {"diagnosis": lost.diagnosis, "values": lost.values}
            incident = self._incidents.between_steps(lost.findings, **proof)
            self.divergence.acted(self._run, "rollback" in incident.changes)
        return self.divergence.due

    def _promote(self) -> float:
        """Mark the snapshots that have proven good."""
        return self._run.step + self._run.ring.promote(self._run.counts.good)

    def _snapshot_due(self) -> float:
        """Take a snapshot at an interval."""
        run, step = self._run, self._run.step
        if self.take_snapshot("no snapshot", "weights"):
            run.recording.event("snapshot", step=step)
        run.due.plan("proof", self._promote())
        return step + run.policy.snapshot.every

    def take_snapshot(self, without: str, site: str) -> bool:
        """Copy the current state; return whether there is a copy. Raise an incident if the state is
        not finite.

        Args:
            without: the consequence if the copy does not fit into memory, for the printed line.
            site: the site of the incident; see `Run.scan`.
        """
        run, counts = self._run, self._run.counts
        with run.access.variables_readable():
            state = run.train_state()
            run.history.start(run.ring.snapshots, state.trainable)
            run.ring.save_changes(run.changes)
            level = level_of(run.history.last(WINDOW))
            fresh = Snapshot(counts.step, counts.good, counts.position, not counts.step, level)
            obstacle = run.ring.take(fresh, state, run.tolerated)
        if obstacle == "memory":
            run.lacks_memory(without, size_of(state.kept))
        if obstacle == "nonfinite":
            self._incidents.between_steps(run.scan(site))
        return not obstacle


TASKS: dict[str, Callable[[Tasks], float]] = {
    "rate": Tasks.read_rate,
    "layers": Tasks._look_at_layers,
    "checks": Tasks._check,
    "divergence": Tasks._look_for_divergence,
    "proof": Tasks._promote,
    "snapshot": Tasks._snapshot_due,
}
"""The tasks in their order; each returns the step at which it is due again."""
