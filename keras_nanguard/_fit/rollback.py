"""Restores a snapshot, and replays the steps that this has undone.

If the batch of a step is remembered, the step can run again from a snapshot with the same compiled
function, batch and seeds. It gives the same numbers unless something was changed in between, such
as the learning rate. So a rollback loses no steps.

A schedule can have a pole, as `rsqrt(step - warmup)` at the end of the warmup. No weights are
finite after a step at such a rate. So the step is skipped and the iteration counter moves past the
pole; otherwise the next step would have the same rate.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from keras_nanguard._backends import current, processes
from keras_nanguard._core.history import WINDOW, level_of
from keras_nanguard._core.incident import Incident, Outcome
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._diagnose.evidence import MAX_RATE
from keras_nanguard._fit.batchnorm import initial_statistics
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.snapshots import Snapshot
from keras_nanguard._fit.steps import Rerun
from keras_nanguard._fit.trial import Trial, clearly_lower, tried
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.optimizers import scheduled_iteration
from keras_nanguard._report.console import Lowered

MOST_RERUNS = 32
"""Maximum number of rollbacks within replays of each other."""

MAX_PASSED = 10
"""Iterations in a row that are passed over. A schedule that gives no rate for longer ends the run
by the bounds of the policy.
"""

_UPDATED = frozenset({"state", "weights", "slots"})

Found = Mapping[int, tuple[int, float]]
"""Iteration and rate of a schedule without a usable rate, by `id` of the optimizer."""


@dataclass(slots=True)
class Response:
    """The response to one incident, which its actions share.

    Attributes:
        run: the run.
        incident: the incident, with its decision.
        report: the stored report of the step, if any.
        replays: number of rollbacks since the first of the running replays began; 0 outside.
        rates: the learning rate of each optimizer before the first action, by `id`; empty unless
            an action lowers it.
        rerun: the steps to replay from the snapshot that was restored last, or `None`.
        lowered: the learning rates that an action has lowered.
    """

    run: Run
    incident: Incident
    report: Report | None
    replays: int
    rates: Mapping[int, float]
    rerun: Rerun | None = None
    lowered: Sequence[Lowered] = ()

    # Which snapshot

    def newest(self, depth: int = 1) -> Snapshot | None:
        """Return the `depth`-th newest verified snapshot."""
        self.run.ring.promote(self.run.counts.good)
        return self.run.ring.newest(depth)

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

    def last_good(self) -> tuple[bool, Snapshot | None]:
        """Return whether the current state is the last good one, and if not, the snapshot to end
        the run with.

        After a divergence it is, of those from before the onset, the one with the lowest loss on
        the last batches; the current state is good if its loss is not clearly higher. If that
        cannot be tested, the snapshot is the one that a rollback would restore.
        """
        run, incident = self.run, self.incident
        untouched = incident.refused and "state" not in incident.sites
        if "divergence" not in incident.causes:
            return (True, None) if untouched else (False, self.newest())
        wanted = self.before_onset()
        unknown: tuple[bool, Snapshot | None] = (False, wanted)
        batches = run.recent.last(WINDOW) if processes.count() == 1 else []
        if not untouched or wanted is None or not batches:
            return unknown
        earlier = [s for s in run.ring.snapshots if s.step <= wanted.step and s.at_hand]

        def found(trying: Trial) -> tuple[bool, Snapshot | None]:
            settings = trying.settings(trying.trained(trying.present, batches))
            present = trying.losses(trying.present, batches)
            losses = {s: trying.losses(trying.state_of(s, settings), batches) for s in earlier}
            best = min(reversed(earlier), key=lambda s: fmean(losses[s]))
            if clearly_lower(losses[best], present):
                return False, best
            return math.inf not in present, wanted

        return tried(run, found, unknown)

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

    def since(self, snapshot: Snapshot) -> Rerun | None:
        """Return the steps since a snapshot, to be replayed; `None` if not all processes have all
        of their batches, or if replaying them has led to this incident.
        """
        run, incident = self.run, self.incident
        ends = incident.decision is not None and incident.decision.terminal
        if self.replays and (ends or run.stopped or self.replays >= MOST_RERUNS):
            return run.agreement.rerun(None)
        bad = any(f.kind in ("nonfinite", "out_of_range") for f in incident.findings)
        if run.access.can_run_again and not incident.refused and (ends or bad):
            run.recent.blame(incident.step)  # this step was bad, and not the state that it came to
        return run.agreement.rerun(self._known_since(snapshot))

    def _known_since(self, snapshot: Snapshot) -> Rerun | None:
        """Return the steps since a snapshot; `None` if not all of their batches are available."""
        run = self.run
        if not run.access.can_run_again:
            return None
        return run.recent.rerun(snapshot, self.incident.step)

    # Restoring it

    def restore(self, snapshot: Snapshot, rerun: Rerun | None, reseed: bool = False) -> int:
        """Write a snapshot into the model, and continue to count from it; return how many committed
        steps this has undone.

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
            changed += run.moved_seeds(run.counts.rollbacks + 1, snapshot)
        snapshot.write(variables, changed)
        if rerun is not None and snapshot.generator is not None:
            current.host().set_generator_state(snapshot.generator)
        elif rerun is None and reseed:
            current.host().advance_generator()
        if estimate is not None:
            estimate.restart()
        spoilt = not self.incident.refused and self.report is not None  # committed, but not good
        spoilt = spoilt and any(f.kind == "nonfinite" for f in self.incident.findings)
        undone = run.counts.good - snapshot.good + spoilt
        run.ring.forget_after(snapshot.step)
        run.counts.restore(snapshot.step, snapshot.good if rerun is None else None)
        if rerun is None:
            run.recent.restart()
        else:
            run.recent.return_to(snapshot.step)
        run.history.undo(snapshot.step)
        batches = enumerate(rerun.batches, snapshot.step) if rerun is not None else ()
        again = frozenset(step for step, args in batches if args is not None)
        run.recorder.undo(snapshot.step, again)
        data = {"to": snapshot.step, "undone": undone, "run_again": len(again)}
        then = f"; {len(again)} steps replayed" if again else ""
        run.recording.event("rollback", f"Restored the state {snapshot.moment}{then}.", data)
        self.rerun = rerun
        return undone


class Replay:
    """The replays of one run.

    Args:
        run: the run.
        after: handles the verdict of a replayed step. This may lead to another rollback, whose
            steps are then replayed first.

    Attributes:
        rollbacks: number of rollbacks since the first of these replays began; 0 outside.
        poles: the iterations that are passed over.
        pending: the steps since the last rollback, until their replay begins.
    """

    def __init__(self, run: Run, after: Callable[[Verdict], object]):
        self._run, self.poles, self._after = run, Poles(run), after
        self._batches: deque[Any] = deque()
        self._metrics: list[tuple[Any, Any]] = []
        self.rollbacks = 0
        self.pending: Rerun | None = None

    def run(self, rerun: Rerun) -> None:
        """Replay the undone steps, with all handling after each. Afterwards the counters are the
        same as before.
        """
        run, step, stopped = self._run, self._run.step, self._run.stopped
        refused = run.counts.last_refused
        self.pending = rerun
        try:
            while self._batches or self.pending is not None:
                if self.pending is not None:
                    self._go_back()
                    continue
                self._step(self._batches.popleft())
                if run.stopped and not stopped and self.pending is None:
                    break  # in the state that the policy has restored
        finally:
            self.rollbacks, self.pending = 0, None
            run.counts.end_replay(step, refused)
            self._batches.clear()
        run.access.sync_variables()
        for variable, value in self._metrics:
            keras_variables.write(variable, value)

    def leave_out(self, step: int) -> None:
        """Remember that a step was refused for the state that the step before it has left; its
        incident is that of the step before.
        """
        if self.pending is None:
            self._run.recent.push(step, None, refused=True)
        else:  # it is passed over once the steps before it have run again
            self._batches.appendleft(None)

    def _go_back(self) -> None:
        """Continue with the pending steps, from their snapshot."""
        run, rerun, self.pending = self._run, self.pending, None
        assert rerun is not None
        self.rollbacks += 1
        self._metrics = self._metrics_from(rerun)
        at, every = rerun.snapshot.step, run.policy.snapshot.every
        run.counts.begin_replay(at, rerun.snapshot.good, rerun.refused)
        run.recovery.return_to(at, run.counts.committed)
        for task in ("checks", "proof"):  # they are due again
            run.plan(task, at + 1)
        run.plan("snapshot", at + every if every else math.inf)
        self._batches.extendleft(reversed(rerun.batches))

    def _step(self, args: Any) -> None:
        """Replay one step; without arguments it is passed over."""
        run = self._run
        if run.step == run.counts.epoch_start and not self._metrics:
            self._begin_metrics()
        self.poles.pass_over()
        if args is not None:
            self._after(run.access.run_again(args))
        else:
            run.recent.push(run.step, None, refused=True)
            run.counts.advance()

    def _metrics_from(self, rerun: Rerun) -> list[tuple[Any, Any]]:
        """Restore the metrics of a snapshot. If they are unknown, return the values to write back
        afterwards.
        """
        run, known = self._run, rerun.snapshot.metrics
        metrics = run.train_state().metrics
        if rerun.snapshot.step <= run.counts.epoch_start and hasattr(run.model, "reset_metrics"):
            self._begin_metrics()
            return []
        if not all(id(variable) in known for variable in metrics):
            return [(variable, keras_variables.read(variable)) for variable in metrics]
        for variable in metrics:
            keras_variables.write(variable, known[id(variable)])
        return []

    def _begin_metrics(self) -> None:
        """Reset the metrics, as at the start of an epoch. A torch module has none."""
        if hasattr(self._run.model, "reset_metrics"):
            self._run.access.sync_variables()
            self._run.model.reset_metrics()


class Poles:
    """The poles of the schedules of one run."""

    def __init__(self, run: Run):
        self._run = run
        self._known: dict[int, set[int]] = {}

    def find(self, incident: Incident) -> Found:
        """Return the poles that an incident is about.

        If the state was bad before the step, it is about the step that left it so. A rate that is
        finite counts only if the diagnosis blames it.
        """
        if not incident.refused and _UPDATED.isdisjoint(incident.sites):
            return {}
        culprit = incident.diagnosis.culprit if incident.diagnosis is not None else ""
        highest = MAX_RATE if culprit.endswith("/learning_rate") else math.inf
        ago = 1 if not incident.refused or "state" in incident.sites else 0
        found = {}
        for optimizer in self._run.train_state().optimizers:
            iteration = scheduled_iteration(optimizer, ago)
            rate = 0.0 if iteration is None else _rate(optimizer, iteration)
            if iteration is not None and not (math.isfinite(rate) and abs(rate) <= highest):
                found[id(optimizer)] = iteration, rate
                self._known.setdefault(id(optimizer), set()).add(iteration)
        return found

    def passed(self, found: Found, outcomes: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
        """Pass over the poles of an incident; return its outcomes, one of which reports this."""
        run = self._run
        if not found or run.stopped or not run.refuses:
            return outcomes
        last = {key: iteration for key, (iteration, _) in found.items()}
        self.pass_over(last)  # if the replay has not
        optimizers = [o for o in run.train_state().optimizers if id(o) in found]
        after = [(o, scheduled_iteration(o)) for o in optimizers]
        past = [(o, n) for o, n in after if n is not None and n > last[id(o)]]
        words = ", ".join(f"{optimizer.name} continues at iteration {n}" for optimizer, n in past)
        main = next((o for o in outcomes if o.action in ("rollback", "skip")), None)
        if not words or main is None:
            return outcomes
        told = replace(main, detail=f"{main.detail}; {words}")
        return tuple(told if o is main else o for o in outcomes)

    def pass_over(self, beyond: Mapping[int, int] | None = None) -> None:
        """Move the iteration counters of optimizers past the poles that are known.

        Args:
            beyond: the iteration that a counter has to be past, by `id` of the optimizer.
        """
        for optimizer in self._run.train_state().optimizers if self._known else ():
            known = self._known.get(id(optimizer), set())
            first = scheduled_iteration(optimizer) if known else None
            if first is None:
                continue
            # Accumulated gradients are applied at each of these.
            every = keras_optimizers.accumulation_steps(optimizer)
            last = (beyond or {}).get(id(optimizer), -1)
            iteration = first + every * max(math.ceil((last + 1 - first) / every), 0)
            poles = 0
            while poles <= MAX_PASSED and (
                iteration in known or not math.isfinite(_rate(optimizer, iteration))
            ):
                poles, iteration = poles + 1, iteration + every
            if iteration > first and poles <= MAX_PASSED:
                counter = keras_optimizers.iterations(optimizer)
                value = np.asarray(iteration, str(counter.dtype))
                keras_variables.write_all([(counter, value)])


def _rate(optimizer: Any, iteration: int) -> float:
    """Return the rate of a schedule; 0.0 if it cannot be evaluated outside of a step."""
    try:
        return keras_optimizers.scheduled_rate(optimizer, iteration)
    except Exception:  # noqa: BLE001  a custom schedule may raise anything
        return 0.0
