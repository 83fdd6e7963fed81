"""One guarded run on the host: reads the verdict of each step, counts, takes snapshots, and raises
incidents.

Everything runs on the main thread, right after the step (for JAX on accelerators after the next
step has started) and before any callback there receives the model. For a healthy step this means:
read one row of numbers, count, and every hundred steps copy the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any

from keras_nanguard._backends import current, processes
from keras_nanguard._backends.interface import StateAccess
from keras_nanguard._core.history import WINDOW, level_of
from keras_nanguard._core.incident import Diagnosis, Finding, Incident
from keras_nanguard._core.verdict import PERIOD, Report, Verdict
from keras_nanguard._fit.callbacks import Logs
from keras_nanguard._fit.divergence import Divergence
from keras_nanguard._fit.incidents import Incidents
from keras_nanguard._fit.monitors import LayerLooks, Monitors
from keras_nanguard._fit.recovery import GuardState
from keras_nanguard._fit.resume import Resumed
from keras_nanguard._fit.run import Run
from keras_nanguard._policy.policy import Policy
from keras_nanguard._recording.records import REFUSED

if TYPE_CHECKING:
    from keras_nanguard._diagnose.explain_step import Explainer


class Session(Run):
    """The host side of the transaction: the state of a run, and the tasks on it.

    Args:
        model: the guarded model.
        policy: the policy.
        report: called with each complete incident.
        explain: makes the diagnosis of an incident, `None` for none.
        **parts: the other arguments of `Run`.

    Attributes:
        finished: whether the fit has ended normally.
        resuming: the snapshot to resume from, until its state is restored.
        guard_state: the changes of the policy at the end of the fit.
        callbacks_deferred: whether callbacks run in another thread, so that they cannot act before
            the next step.
    """

    def __init__(
        self,
        model: Any,
        policy: Policy,
        report: Callable[[Incident], None],
        explain: Explainer | None,
        **parts: Any,
    ):
        super().__init__(model, policy, **parts)
        self.monitors, self.logs = Monitors(policy), Logs(model)
        self.divergence = Divergence(bool(policy.divergence.action))
        self.layer_looks = LayerLooks()
        self.incidents = Incidents(self, report, explain, self.after)
        self.callbacks_deferred = self.finished = False
        self.resuming: Resumed | None = None
        self._generators: Any = None
        self.guard_state: GuardState | None = None
        self.plan("checks", self.monitors.due)
        self.plan("divergence", self.divergence.due)
        self.plan("snapshot", policy.snapshot.every or inf)

    # For the backend

    def attach(self, access: StateAccess, transaction: Any = None) -> None:
        """Store the guarded step, and the access to the state that it trains."""
        self.access, self.transaction = access, transaction

    def skips_batches(self, iterator: Any, batches: int) -> bool:
        """Skip the batches of one execution, if batches are to be skipped."""
        counts = self.counts
        if counts.skip_batches <= 0:
            return False
        for _ in range(batches):
            next(iterator)
            if counts.epoch_passed >= 0:  # else an earlier process has trained on it
                self.recorder.skip(counts.step, counts.epoch, counts.batch(counts.step))
            counts.skip_batch()
        self.recorder.place(counts.step, counts.epoch, counts.epoch_start)
        return True

    def begin_epoch(self, epoch: int) -> None:
        """Begin counting an epoch. The learning rate is recorded after the next step."""
        self.counts.begin_epoch(epoch)
        self.recorder.place(self.counts.step, epoch, self.counts.epoch_start)
        self.divergence.begin_epoch(self.counts.step)
        self.plan("divergence", self.divergence.due)
        self.plan("rate", self.counts.step + 1)

    def note_rate(self) -> float:
        """Record the present learning rate."""
        if self.began and not self.stopped:
            with self.access.variables_readable():
                self.record_rate()
        return inf

    def needs_variables(self, written: bool) -> bool:
        """Whether `before` needs the state in the variables; `written`: other code may write
        them.
        """
        estimating = self.recovery.recalibration is not None
        return not self.began or estimating or (written and bool(self.recovery.rates))

    @property
    def nothing_pending(self) -> bool:
        """Whether nothing is due before the next execution, as for healthy steps but the first."""
        return not self.recovery.rates and self._undisturbed

    @property
    def _undisturbed(self) -> bool:
        """Whether there is nothing to do before a step, apart from keeping a lowered rate."""
        waits = self.resuming is not None or self._generators is not None
        waits = waits or self.counts.skip_batches > 0
        return self.began and not (self.stopped or waits or self.checks_fully)

    @property
    def may_run_ahead(self) -> bool:
        """Whether a healthy next step would only have to be counted."""
        if not self.callbacks_deferred or self.counts.idle:
            return False
        return self._undisturbed and self.counts.step + 1 < self.next_due

    def logs_for_callbacks(self, logs: Any, loss: float = nan, refused: bool = False) -> Any:
        """Return the logs of the last step for callbacks; `refused` if it was refused."""
        if (self.counts.idle or refused) and isinstance(logs, dict):
            return self.logs.stand_in(logs, loss)
        return self.logs.measured(logs)

    def note_error(self, error: BaseException) -> None:
        """Report an error that has ended a step, if it is about the data."""
        self.incidents.of_error(error)

    # Before a step

    def before(self) -> None:
        """Run before each execution. It acts before the first, and after a change by the policy."""
        if self.nothing_pending:
            return
        if not self.began:
            self.begin()
        elif self._generators is not None:
            current.host().set_generator_state(self._generators)
            self._generators = None
        self.recovery.before_execution(self.counts.committed)

    def follow(self, earlier: Session) -> None:
        """Take over the state of an earlier fit of the same model."""
        self.tolerated, self.nan_markers = set(earlier.tolerated), set(earlier.nan_markers)
        if earlier.guard_state is not None:
            self.adopt(earlier.guard_state, write=False)

    def begin(self) -> None:
        """Check the state before the first step: keep a snapshot, or raise an incident."""
        continues = self.resuming is not None and self.resuming.with_state
        step = self.resuming.record.step if continues and self.resuming is not None else None
        self.began, resumed = True, self.restore()
        self.begin_recording(step)
        train_state = self.train_state()
        tolerated = self.tolerate(train_state)
        if self.transaction is not None:
            self.transaction.tolerate(tolerated)
            old = resumed or self.transaction.reused
            if (tolerated and old) or (resumed and self.recovery.adjustments()):
                self.access.rebuild()
        self._take_snapshot("no snapshot of the state before the first step", "state")

    def begin_early(self) -> None:
        """Begin before the first step of an epoch. What is drawn until then, by the data and other
        callbacks, does not change the random numbers of the step.
        """
        self.before()
        self._generators = current.host().generator_state()

    def restore(self) -> bool:
        """Restore the state to resume from, once; return whether there was one."""
        resumed, self.resuming = self.resuming, None
        if resumed is not None:
            resumed.restore(self)
        return resumed is not None

    # After a step

    def after(self, verdict: Verdict, *, last: bool = True) -> bool:
        """Read the verdict of the last step and act on it.

        Args:
            verdict: its numbers.
            last: whether no other step was started since, so that the state is the one it left.

        Returns:
            Whether the step was healthy and no task was due.

        Raises:
            NonFiniteError: if the policy raises.
        """
        refused, loss, gradients, statistics, weights, slots, scale, _, _ = verdict
        total = loss + gradients + statistics + weights + slots
        bad = refused or not (isfinite(total) and 0.0 < scale < inf)
        if bad or self.checks_fully or self.agreement.news:
            if self.agreement.all_see(verdict):
                self._attend(verdict)
                return False
            return self.after(self.incidents.postponed(verdict), last=last)
        self._count_committed(verdict)
        self.counts.last_refused = False
        self.counts.step = step = self.counts.step + 1
        if step >= self.next_due and last:
            self._run_due_tasks()
        return True

    def _attend(self, verdict: Verdict) -> None:
        """Handle a step that is the first, one of several, bad, or followed by due tasks."""
        for variable, value in self.first_values(ends=True):
            self.ring.complete(variable, value)
        self.counts.last_refused = verdict.refused
        if self.transaction.counted:
            self._after_many(verdict)
            return
        bad = verdict.refused or not verdict.finite
        reports = self.transaction.take_reports() if bad else ()
        self._judge(verdict, reports[-1] if reports else None)
        self.counts.step += 1
        if self.agreement.news:
            self.incidents.between_steps(self.agreement.pick_up())
        self.checks_fully = self.recovery.active
        self._run_due_tasks()

    def _after_many(self, last: Verdict) -> None:
        """Handle an execution of several steps; `last` is the row of the last one."""
        transaction, counts = self.transaction, self.counts
        first, end = counts.step, counts.step + (last.step + 1 - counts.step) % PERIOD
        self.healed = False
        reports = {report.verdict.step: report for report in transaction.take_reports()}
        for step, verdict in enumerate(transaction.verdicts(first, end), first):
            counts.step = step
            if self.healed or self.stopped:  # what ran on after it ran on a state that is gone
                counts.refuse(end - step)
                for refused in range(step, end):
                    self.recorder.push(refused, nan, nan, nan, REFUSED)
                break
            if verdict.halted:
                counts.refuse()
                self.record(verdict, REFUSED)
            else:
                self._judge(verdict, reports.get(verdict.step), last=step == end - 1)
        counts.step = end
        if self.transaction is not transaction:  # compiled again before all steps were counted
            self.transaction.recount(end)
        self._run_due_tasks()

    def _judge(self, verdict: Verdict, report: Report | None, last: bool = True) -> None:
        """Count one step or raise its incident. Only the state of the `last` one can be read."""
        if verdict.refused:
            self.incidents.refused(verdict, report)
        elif verdict.finite:
            self._count_committed(verdict)
            if last and self.recovery.active:
                self.recovery.after_good_step(self.counts.committed, self.train_state)
                self.record_return()
        elif not self.policy.refuse:
            self.incidents.observed(verdict, report)
        else:
            if not self.incidents.poisoned(verdict):
                self._count_committed(verdict)
            self.transaction.resume()

    def _count_committed(self, verdict: Verdict) -> None:
        """Count a committed step. This runs in every step."""
        counts, recent = self.counts, self.recent
        step, loss, gradients, scale = counts.step, verdict.loss, verdict.gradients, verdict.scale
        counts.committed += 1
        counts.good += 1
        counts.streak = 0
        self.history.push(step, loss, gradients, scale)
        self.recorder.push(step, loss, gradients, scale)
        recent.push(step, self.transaction.given)
        if self.monitors.measured(verdict.statistics, verdict.weights + verdict.slots):
            self.plan("checks", step + 1)

    # Between two steps

    def _run_due_tasks(self) -> None:
        """Run the tasks that are due between two steps. A look at the layers comes with others."""
        if self.counts.step >= self.layer_looks.next_step:
            self.plan("layers", self.counts.step)
        for name, task in TASKS.items():
            if self.counts.step >= self.due.get(name, inf) and not self.stopped:
                self.plan(name, task(self))

    def _check(self) -> float:
        """Check for finite faults."""
        with self.access.variables_readable():
            # A value that is spread is read by all processes at once.
            if self.recorder.wants_rate and processes.count() == 1:
                self.record_rate()
            findings = self.agreement.between_steps(self.monitors.look(self))
        if findings:
            self.incidents.between_steps(findings)
        return self.monitors.due

    def _look_for_divergence(self) -> float:
        """Check whether the run is lost."""
        lost = None if self.reruns else self.divergence.look(self)
        if lost is not None:
            proof = {"diagnosis": lost.diagnosis, "values": lost.values}
            incident = self.incidents.between_steps(lost.findings, **proof)
            done = {outcome.action for outcome in incident.outcomes if outcome.status == "done"}
            self.divergence.acted(self, "rollback" in done)
        return self.divergence.due

    def _promote(self) -> float:
        """Mark the snapshots that have proven good."""
        return self.counts.step + self.ring.promote(self.counts.good)

    def _snapshot_due(self) -> float:
        """Take a snapshot at an interval."""
        step = self.counts.step
        if self._take_snapshot("no snapshot", "weights"):
            self.recorder.event("snapshot", step, self.counts.epoch)
        self.plan("proof", self._promote())
        return step + self.policy.snapshot.every

    def _take_snapshot(self, without: str, site: str) -> bool:
        """Copy the present state; return whether there is a copy. Raise an incident if the state is
        not finite.

        Args:
            without: what there is not if the copy does not fit into memory, for the line.
            site: the site of the incident; see `scan`.
        """
        step, good = self.counts.step, self.counts.good
        with self.access.variables_readable():
            state = self.train_state()
            self.history.start(self.ring.snapshots, state.trainable)
            self.ring.note(self.changes)
            level = level_of(self.history.last(WINDOW))
            facts = (not step, self.tolerated, level, self.counts.position)
            taken = self.ring.take(state, step, good, *facts)
        if taken.missing:
            self.lacks_memory(without, taken.missing)
        if taken.bad:
            self.incidents.between_steps(self.scan(site))
        return not (taken.bad or taken.missing)

    def seen_outside(
        self, findings: Sequence[Finding], diagnosis: Diagnosis | None = None, act: bool = True
    ) -> None:
        """Raise an incident for findings in results, or in a state that is about to be saved."""
        self.access.resolve_pending()
        found = [*findings, *(f for f in self.scan("weights") if f.site != "slots" or not findings)]
        if found := self.agreement.between_steps(found) if act else found:
            self.incidents.between_steps(found, diagnosis=diagnosis, act=act)

    def end(self) -> None:
        """Undo the changes to optimizers, store them for the next fit, and release."""
        self.guard_state = self.guard_state or self.changes()
        if self.agreement.has_news:  # no later step has reported it to the others
            self.incidents.between_steps(self.agreement.pick_up(), act=False)
        self.recent.restart(self.step)
        self.layer_looks.release()
        self.ring.close()
        self.recovery.end()
        self.recorder.end("finished" if self.finished else "failed", self.step, self.counts.epoch)
        self.say_problem()


TASKS: dict[str, Callable[[Session], float]] = {
    "rate": Session.note_rate,
    "layers": lambda session: session.layer_looks.look(session),
    "checks": Session._check,
    "divergence": Session._look_for_divergence,
    "proof": Session._promote,
    "snapshot": Session._snapshot_due,
}
"""What is done between two steps, in this order; each returns the step at which it is due again."""
