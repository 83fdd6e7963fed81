"""One guarded run on the host: reads the verdict of each step, counts, takes snapshots, and raises
incidents.

Everything runs on the main thread, right after the step (for JAX on accelerators after the next
step has started) and before any callback there receives the model. For a healthy step this means:
read one row of numbers, count, and every hundred steps copy the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any

from keras_nanguard._backends import current, processes
from keras_nanguard._backends.interface import StateAccess
from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._core.history import WINDOW, level_of
from keras_nanguard._core.incident import Diagnosis, Finding, Incident
from keras_nanguard._core.verdict import PERIOD, Verdict
from keras_nanguard._fit import recorded
from keras_nanguard._fit.callbacks import Logs
from keras_nanguard._fit.divergence import Divergence
from keras_nanguard._fit.guard_state import GuardState
from keras_nanguard._fit.incidents import Incidents
from keras_nanguard._fit.monitors import LayerLooks, Monitors
from keras_nanguard._fit.resume import Resumed
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.snapshots_on_disk import DiskRing
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._policy.policy import Policy
from keras_nanguard._recording.records import REFUSED

if TYPE_CHECKING:
    from keras_nanguard._diagnose.explain_step import Explainer

__all__ = ["Session"]


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
        if self.directory is not None and policy.snapshot.storage == "disk":
            self.ring = self._ring_on_disk(self.directory)
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

    def _ring_on_disk(self, directory: str) -> DiskRing:
        if current.host().is_sharded(self.model):
            remedy = 'Use storage = "memory", no resume=True, and torch.distributed.checkpoint.'
            received = 'storage = "disk" for a module that fully_shard has split'
            raise GuardError(expected("a model that one process can save", received, remedy))
        return DiskRing(self, directory)

    # For the backend

    def attach(self, access: StateAccess, transaction: Any = None) -> None:
        """Store the guarded step, and the access to the state that it trains."""
        self.access, self.transaction = access, transaction

    def sync_variables(self) -> None:
        """Write the present state into the variables."""
        self.access.sync_variables()

    def resolve_pending(self) -> None:
        """Read the verdict of the last started step, if it is pending, and act on it."""
        self.access.resolve_pending()

    def skips_batches(self, iterator: Any, batches: int) -> bool:
        """Skip the batches of one execution, if batches are to be skipped."""
        counts = self.counts
        passed, batch = counts.epoch_passed, counts.batch(counts.step)
        skipped = counts.skips_batches(iterator, batches)
        # What an earlier process has trained on is not skipped.
        for number in range(max(-passed, 0), counts.epoch_passed - passed):
            self.recorder.skip(counts.step, counts.epoch, batch + number)
        if skipped:
            self.recorder.place(counts.step, counts.epoch, counts.epoch_start)
        return skipped

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
                recorded.note_rate(self)
        return inf

    def needs_variables(self, written: bool) -> bool:
        """Whether `before` needs the state in the variables; `written`: other code may write
        them.
        """
        estimating = self.recovery.recalibration is not None
        return not self.began or estimating or (written and bool(self.recovery.rates))

    def adjustments(self) -> dict[int, Any]:
        """Return the changed numbers that a step reads and that are not variables, by `id`."""
        return self.recovery.adjustments() if self.recovery.rates else {}

    def with_adjustments(self, numbers: Mapping[int, Any]) -> AbstractContextManager[None]:
        """Return a context in which arguments of a compiled step replace these numbers."""
        return self.recovery.with_adjustments(numbers)

    @property
    def nothing_pending(self) -> bool:
        """Whether nothing is due before the next execution, as for healthy steps but the first."""
        return not self.recovery.rates and self._undisturbed

    @property
    def _undisturbed(self) -> bool:
        resumes = self.resuming is not None or self._generators is not None
        waits = self.counts.skip_batches > 0 or resumes
        return self.began and not (self.stopped or waits or self.recovery.active)

    @property
    def may_run_ahead(self) -> bool:
        """Whether a healthy next step would only have to be counted."""
        if not self.callbacks_deferred or self.counts.idle or self.checks_fully:
            return False
        return self._undisturbed and self.counts.step + 1 < self.next_due

    def logs_for_callbacks(self, logs: Any, loss: float = nan, refused: bool = False) -> Any:
        """Return the logs of the last step for callbacks; `refused` if it was refused."""
        if (self.counts.idle or refused) and isinstance(logs, dict):
            return self.logs.stand_in(logs, loss)
        return self.logs.measured(logs)

    def raised(self, error: BaseException) -> None:
        """Report an exception inside of a step if it is about the data."""
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
            earlier.guard_state.apply(self, write=False)

    def begin(self) -> None:
        """Check the state before the first step: keep a snapshot, or raise an incident."""
        continues = self.resuming is not None and self.resuming.with_state
        step = self.resuming.record.step if continues and self.resuming is not None else None
        self.began, resumed = True, self.restore()
        recorded.begun(self, step)
        train_state = self.train_state()
        tolerated = self.tolerate(train_state)
        if self.transaction is not None:
            self.transaction.tolerate(tolerated)
            old = resumed or self.transaction.reused
            if (tolerated and old) or (resumed and self.adjustments()):
                self.access.rebuild()
        kept = train_state.kept
        taken = self.ring.take(kept, 0, 0, verified=True, tolerated=self.tolerated)
        if taken.missing:
            what = "no snapshot of the state before the first step"
            self.lacks_memory(what, taken.missing)
        if taken.bad:
            self.incidents.between_steps(self.scan("state"))

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
        refused, loss, gradients, statistics, weights, slots, scale, _, _ = (
            verdict  # attributes of a record cost more than this
        )
        total = loss + gradients + statistics + weights + slots
        if (
            refused
            or self.checks_fully
            or self.agreement.news
            or not (isfinite(total) and 0.0 < scale < inf)
        ):
            if self.agreement.all_see(verdict):
                self._attend(verdict)
                return False
            return self.after(self.incidents.postponed(verdict), last=last)
        counts = self.counts
        step = counts.step
        counts.committed += 1
        counts.streak, counts.last_refused = 0, False
        self.history.push(step, loss, gradients, scale)
        self.recorder.push(step, loss, gradients, scale)
        self.recent.push(step, self.transaction.given)
        counts.step = step = step + 1
        if self.monitors.measured(statistics, weights + slots):
            self.plan("checks", step)
        if step >= self.next_due and last:
            self._run_due_tasks()
        return True

    def _attend(self, verdict: Verdict) -> None:
        """Handle a step that is the first, one of several, bad, or followed by due tasks."""
        for variable, value in self.end_trace():
            self.ring.complete(variable, value)
        self.counts.last_refused = verdict.refused
        updated = verdict.weights + verdict.slots
        if not verdict.refused and self.monitors.measured(verdict.statistics, updated):
            self.plan("checks", self.counts.step)
        if self.transaction.counted:
            self._after_many(verdict)
            return
        bad = verdict.refused or not verdict.finite
        self._judge(verdict, self.transaction.take_reports() if bad else ())
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
        for counts.step, verdict in enumerate(transaction.verdicts(first, end), first):
            if self.healed or self.stopped:  # what ran on after it ran on a state that is gone
                counts.refuse(end - counts.step)
                for step in range(counts.step, end):
                    self.recorder.push(step, nan, nan, nan, REFUSED)
                break
            if verdict.halted:
                counts.refuse()
                measured = (verdict.loss, verdict.gradients, verdict.scale)
                self.recorder.push(counts.step, *measured, REFUSED)
            else:
                own = [reports[verdict.step]] if verdict.step in reports else ()
                self._judge(verdict, own, last=counts.step == end - 1)
        counts.step = end
        if self.transaction is not transaction:  # compiled again before all steps were counted
            self.transaction.recount(end)
        self._run_due_tasks()

    def _judge(self, verdict: Verdict, reports: Sequence[Any], last: bool = True) -> None:
        """Count one step or raise its incident. Only the state of the `last` one can be read."""
        if verdict.refused:
            self.incidents.refused(verdict, reports)
        elif verdict.finite:
            self._count_committed(verdict, last)
        elif not self.policy.refuse:
            self.recorder.push(self.counts.step, verdict.loss, verdict.gradients, verdict.scale)
            self.incidents.observed(verdict, reports)
        else:
            if not self.incidents.poisoned(verdict):
                self._count_committed(verdict)
            self.transaction.resume()

    def _count_committed(self, verdict: Verdict, last: bool = True) -> None:
        step = self.counts.step
        self.counts.committed += 1
        self.history.push(step, verdict.loss, verdict.gradients, verdict.scale)
        self.recorder.push(step, verdict.loss, verdict.gradients, verdict.scale)
        self.recent.push(step, self.transaction.given)
        self.counts.streak = 0
        if last and self.recovery.active:
            self.recovery.after_good_step(self.counts.committed, self.train_state)
            recorded.returned(self)

    # Between two steps

    def _run_due_tasks(self) -> None:
        """Run the tasks that are due between two steps. A look at the layers comes with others."""
        if self.counts.step >= self.layer_looks.next_step:
            self.plan("layers", self.counts.step)
        for name, task in TASKS.items():
            if self.counts.step >= self.due.get(name, inf) and not self.stopped:
                self.plan(name, task(self))

    def _look_at_layers(self) -> float:
        """Measure the layers."""
        return self.layer_looks.look(self)

    def _check(self) -> float:
        """Check for finite faults."""
        with self.access.variables_readable():
            # A value that is spread is read by all processes at once.
            if self.recorder.wants_rate and processes.count() == 1:
                recorded.note_rate(self)
            findings = self.agreement.between_steps(self.monitors.look(self))
        if findings:
            self.incidents.between_steps(findings)
        return self.monitors.due

    def _look_for_divergence(self) -> float:
        """Check whether the run is lost."""
        lost = None if self.running_again else self.divergence.look(self)
        if lost is not None:
            proof = (lost.findings, lost.diagnosis)
            incident = self.incidents.between_steps(*proof, values=lost.values)
            done = {outcome.action for outcome in incident.outcomes if outcome.status == "done"}
            self.divergence.acted(self, "rollback" in done)
        return self.divergence.due

    def _promote(self) -> float:
        """Mark the snapshots that have proven good."""
        step, good = self.counts.step, self.counts.committed
        self.ring.promote(good)
        return step + self.ring.next_proof(good)

    def _take_snapshot(self) -> float:
        """Copy the present state, or raise an incident if it is not finite."""
        step, good = self.counts.step, self.counts.committed
        with self.access.variables_readable():
            train_state = self.train_state()
            self.history.start(self.ring.snapshots, train_state.trainable)
            level, tolerated = level_of(self.history.last(WINDOW)), self.tolerated
            taken = self.ring.take(train_state.kept, step, good, tolerated=tolerated, level=level)
            if taken.snapshot is not None:
                metrics = {id(v): keras_variables.read(v) for v in train_state.metrics}
                taken.snapshot.metrics = metrics
                self.recorder.event("snapshot", step, self.counts.epoch)
        if taken.missing:
            self.lacks_memory("no snapshot", taken.missing)
        if taken.bad:
            self.incidents.between_steps(self.scan("weights"))
        self.plan("proof", self._promote())
        return step + self.policy.snapshot.every

    def seen_outside(
        self, findings: Sequence[Finding], diagnosis: Diagnosis | None = None, act: bool = True
    ) -> None:
        """Raise an incident for findings in results, or in a state that is about to be saved."""
        self.resolve_pending()
        found = [*findings, *(f for f in self.scan("weights") if f.site != "slots" or not findings)]
        if found := self.agreement.between_steps(found) if act else found:
            self.incidents.between_steps(found, diagnosis, act)

    def release(self) -> None:
        """Release the snapshots, the remembered batches and copies of weights."""
        self.recent.restart(self.step)
        self.layer_looks.release()
        self.ring.close()

    def end(self) -> None:
        """Undo the changes to optimizers, store them for the next fit, and release."""
        self.guard_state = self.guard_state or GuardState.of(self)
        if self.agreement.has_news:  # no later step has reported it to the others
            self.incidents.between_steps(self.agreement.pick_up(), act=False)
        self.release()
        self.recovery.end()
        self.recorder.end("finished" if self.finished else "failed", self.step, self.counts.epoch)
        recorded.say_problem(self)


TASKS: dict[str, Callable[[Session], float]] = {
    "rate": Session.note_rate,
    "layers": Session._look_at_layers,
    "checks": Session._check,
    "divergence": Session._look_for_divergence,
    "proof": Session._promote,
    "snapshot": Session._take_snapshot,
}
"""What is done between two steps, in this order; each returns the step at which it is due again."""
