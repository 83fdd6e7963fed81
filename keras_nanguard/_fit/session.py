"""One guarded run on the host's side: reads each step's verdict, and turns a bad one into an incident and its cure.

Everything happens on the main thread, right after the step (on accelerators of JAX when the next one has been started) and
before any callback there sees the model. In the healthy case that is: read one row of numbers, count, and every hundred
steps copy the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import inf, isfinite, nan, sqrt
from typing import Any

from keras_nanguard._core.history import History
from keras_nanguard._core.incident import Finding, Incident
from keras_nanguard._core.verdict import PERIOD, Report, Verdict
from keras_nanguard._fit.epoch_logs import Logs
from keras_nanguard._fit.guard_state import GuardState
from keras_nanguard._fit.incidents import raise_incident
from keras_nanguard._fit.learning_rates import Rate
from keras_nanguard._fit.monitors import Monitors
from keras_nanguard._fit.pending_recovery import PendingRecovery
from keras_nanguard._fit.recent_batches import Recent
from keras_nanguard._fit.sightings import bad_state, in_batch, tolerate, values
from keras_nanguard._fit.snapshots import Ring
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.policy import Ledger, Policy
from keras_nanguard._policy.trend import Trend

__all__ = ["Session"]


class Session:
    """The host's half of the transaction.

    Args:
        model: the guarded model.
        policy: what to do about incidents.
        tell: called with each complete incident.
        ledger: what the policy remembers of earlier fits.
        explain: returns the diagnosis of a refused step, given the incident and its report; `None` makes none.
        optimizers: the optimizers of a loop with no trainer; those of the model by default.

    Attributes:
        step: train steps that are complete, refused ones included.
        refused: how many of them were refused.
        overflows: how many of those were ordinary float16 overflows, which are no incident.
        epoch, epoch_start: the epoch that runs, and the step it started at.
        stopped: whether the policy has ended training.
        attentive: whether the next step is looked at more closely than a healthy one needs.
        told_later: whether callbacks are told of a step in another thread, so that none of them acts before the next step.
        tolerated, nan_markers: the `id` of each variable that may be infinite or NaN, as it was at first, and of each that may be NaN.
        healed: whether, since this was last set to `False`, another state was put in the place of the one that steps ran on.
    """

    def __init__(
        self,
        model: Any,
        policy: Policy,
        tell: Callable[[Incident], None],
        *,
        ledger: Ledger | None = None,
        explain: Callable[[Session, Incident, Report | None], Any] | None = None,
        optimizers: Any = None,
        functions: Any = None,
    ):
        self.model, self.policy, self.announce, self.explain = model, policy, tell, explain
        self.optimizers, self.functions, self.ledger = optimizers, dict(functions or {}), ledger or Ledger()
        self.trend, self.history, self.monitors = Trend(policy.checks.trend), History(), Monitors(policy.checks)
        self.ring, self.recent = Ring(policy.snapshot.keep, policy.snapshot.good_after), Recent()
        self.rates: dict[int, Rate] = {}
        self.step = self.refused = self.overflows = self.committed = self.streak = 0
        self.epoch = self.epoch_start = self.epoch_refused = self.epoch_passed = self.rollbacks = self.skip_batches = 0
        self.stopped = self.began = self.last_refused = False
        self.pending_recovery = PendingRecovery()
        self.guard_state: GuardState | None = None
        self.resuming: Any = None
        self.undo: list[tuple[Any, str, Any]] = []
        self.directory: str | None = None
        self.transaction: Any = None
        self.rebuild: Callable[[], None] = lambda: None
        self.sync_variables: Callable[[], None] = lambda: None  # makes the variables hold the state of this moment
        self.variables_readable: Callable[[], Any] = nullcontext  # in which they read as that state
        self.resolve_pending: Callable[[], None] = lambda: None  # reads the verdict on a step that was started, if it was not read yet
        self.tolerated: set[int] = set()
        self.nan_markers: set[int] = set()
        self._created: dict[int, Any] | None = {}
        self._train_state: TrainState | None = None
        self.logs = Logs(model)
        self.checks_fully, self.healed, self.callbacks_deferred = True, False, False
        self._snapshot_due = policy.snapshot.every or inf
        self._due = min(self._snapshot_due, self.monitors.due)

    def train_state(self) -> TrainState:
        """Return the anatomy of the last trace; the model's variables hold the state of this moment, or read as it."""
        self.sync_variables()
        return self._train_state or self.read_train_state()

    def read_train_state(self) -> TrainState:
        """Return the anatomy of the model as it is now."""
        train_state = TrainState.of(self.model, self.optimizers)
        self._train_state = train_state if self._created is None else None
        return train_state

    def begin(self) -> None:
        """Look at the state before the first step: keep it, or say at once that it is bad."""
        self.began, resumed = True, self.restore()
        train_state = self.train_state()
        tolerated = tolerate(self, train_state)
        if self.transaction is not None:
            self.transaction.tolerate(tolerated)
            if tolerated and (resumed or self.transaction.reused):
                self.rebuild()
        bad = self.ring.take(train_state.restorable, 0, 0, verified=True, tolerated=self.tolerated)
        if bad:
            raise_incident(self, self.step, self.scan("state"), refused=False, report=None, values={})

    def restore(self) -> bool:
        """Put the state to go on from in its place, once; returns whether there was one."""
        resumed, self.resuming = self.resuming, None
        if resumed is not None:
            resumed.restore(self)
        return resumed is not None

    def begin_epoch(self, epoch: int) -> None:
        """Count batches and refused steps from here."""
        self.epoch, self.epoch_start, self.epoch_refused, self.epoch_passed = epoch, self.step, 0, 0

    def note_created(self, native: Any, value: Any) -> None:
        """Note the first value of a variable of the backend's own that came into being while the step was traced."""
        if self._created is None:
            self._created, self.checks_fully = {}, True
        self._created[id(native)] = value

    def first_values(self) -> list[tuple[Any, Any]]:
        """Return the variables that came into being while the step was traced, each with its first value."""
        created = self._created or {}
        return [(v, created[id(v.value)]) for v in self.train_state().everything if id(v.value) in created]

    def position(self) -> tuple[int, int]:
        """Return the epoch, and how many of its batches are through or will be passed by."""
        return self.epoch, self.step - self.epoch_start + self.skip_batches

    def skips_batches(self, iterator: Any, batches: int) -> bool:
        """Leave the batches of one execution out, if there are some to be left out."""
        if self.skip_batches <= 0:
            return False
        for _ in range(batches):
            next(iterator)
            self.skip_batches = max(self.skip_batches - 1, 0)
            self.epoch_start -= 1
            self.epoch_passed += 1
        return True

    @property
    def nothing_pending(self) -> bool:
        """Whether nothing is to be done before the next execution, as in all of a healthy run but its first step."""
        return not self.rates and self._undisturbed

    @property
    def _undisturbed(self) -> bool:
        busy = self.stopped or self.skip_batches > 0 or self.resuming is not None or self.pending_recovery.active
        return self.began and not busy

    def before(self) -> None:
        """Run before each execution; does work only before the first, and after the policy has changed something."""
        if self.nothing_pending:
            return
        if not self.began:
            self.begin()
        self.pending_recovery.begin_counting(self)
        for rate in self.rates.values():
            rate.hold()

    @property
    def may_run_ahead(self) -> bool:
        """Whether nothing will be due after the next step of a fit but to count it, if it is healthy."""
        return self.callbacks_deferred and not self.idle and self._undisturbed and not self.checks_fully and self.step + 1 < self._due

    def after(self, verdict: Verdict, *, last: bool = True) -> bool:
        """Read the verdict on the last step and act on it.

        Args:
            verdict: its numbers.
            last: whether the state is the one that it left, as no other step was started since.

        Returns:
            whether it was read as that of a healthy step after which nothing has to be done.

        Raises:
            NonFiniteError: where the policy says so.
        """
        refused, loss, gradients, statistics, weights, slots, scale, _, _ = verdict  # attributes of a record cost more than this
        total = loss + gradients + statistics + weights + slots
        if refused or self.checks_fully or not (isfinite(total) and 0.0 < scale < inf):
            self._attend(verdict)
            return False
        self.committed += 1
        self.streak, self.last_refused = 0, False
        self.history.push(self.step, loss, gradients, scale)
        self.recent.push(self.step, self.transaction.given)
        findings = self.trend.push(self.step, loss, sqrt(2.0 * gradients) / scale)
        if findings:
            self._raise_committed(verdict, findings)
        self.step += 1
        if statistics > self.monitors.ceiling:
            self._due = self.monitors.due = self.step
        if self.step >= self._due and last:
            self.monitors.statistics = statistics
            self._keep()
        return True

    def _attend(self, verdict: Verdict) -> None:
        """The long way: the first step, several steps in one, something to do after each step, or trouble."""
        if self._created is not None:
            for variable, value in self.first_values():
                self.ring.complete(variable, value)
            self._created = None
        self.last_refused = verdict.refused
        self.monitors.statistics = verdict.statistics
        if self.transaction.counted:
            self._after_many(verdict)
            return
        if verdict.refused:
            self._refused(verdict, self.transaction.report_queue.take())
        elif verdict.finite:
            self._count_committed(verdict)
        else:
            self._unrefused(verdict, self.transaction.report_queue.take())
        self.step += 1
        self.checks_fully = self.pending_recovery.active
        self._keep()

    def _after_many(self, last: Verdict) -> None:
        """The same for an execution of several steps, of which `last` is the row of the last one."""
        transaction = self.transaction
        first, end = self.step, self.step + (last.step + 1 - self.step) % PERIOD
        self.healed = False
        reports = {report.verdict.step: report for report in transaction.report_queue.take()}
        for self.step, verdict in enumerate(transaction.verdicts(first, end), first):
            if self.healed or self.stopped:  # what ran on after it ran on a state that is gone
                self._left_out(end - self.step)
                break
            kept = [reports[verdict.step]] if verdict.step in reports else []
            if verdict.halted:
                self._left_out(1)
            elif verdict.refused:
                self._refused(verdict, kept)
            elif verdict.finite:
                self._count_committed(verdict, last=self.step == end - 1)
            else:
                self._unrefused(verdict, kept)
        self.step = end
        if self.transaction is not transaction:  # compiled anew in between, when not all steps were counted
            self.transaction.recount(end)
        self._keep()

    @property
    def epoch_committed(self) -> int:
        """How many steps of this epoch have committed."""
        return self.step - self.epoch_start - self.epoch_refused - self.epoch_passed

    @property
    def idle(self) -> bool:
        """Whether no step of this epoch has committed so far, so that its metrics hold nothing."""
        return self.epoch_committed <= 0

    def logs_for_callbacks(self, logs: Any, loss: float = nan, refused: bool = False) -> Any:
        """Return the logs of the last step, of this loss, as callbacks may see them; `refused` where they are what it computed."""
        if (self.idle or refused) and isinstance(logs, dict):
            return self.logs.stand_in(logs, loss)
        return self.logs.measured(logs)

    def _left_out(self, steps: int) -> None:
        self.refused += steps
        self.epoch_refused += steps

    def _count_committed(self, verdict: Verdict, last: bool = True) -> None:
        self.committed += 1
        self.history.push(self.step, verdict.loss, verdict.gradients, verdict.scale)
        self.recent.push(self.step, self.transaction.given)
        self.streak = 0
        if last:  # of its execution: the state can be seen only then
            self.pending_recovery.after_good_step(self)
        findings = self.trend.push(self.step, verdict.loss, verdict.gradient_norm)
        if findings:
            self._raise_committed(verdict, findings)

    def _raise_committed(self, verdict: Verdict, findings: Sequence[Finding]) -> None:
        """Raise the incident of a step that has committed."""
        report = Report(verdict, (), (), self.transaction.batch(self.step, self.transaction.given))
        raise_incident(self, self.step, findings, refused=False, report=report, values=self._values(verdict))

    def _refused(self, verdict: Verdict, reports: list[Report]) -> None:
        self._left_out(1)
        report = reports[-1] if reports else None
        if report is not None and report.left_by_previous:
            return raise_incident(self, self.step - 1, self.scan("weights"), refused=False, report=None, values=self._values(verdict))
        if self._is_ordinary_overflow(verdict):
            self.overflows += 1
            return
        findings = [*in_batch(report, self.model), *self.scan("state"), *(report or Report(verdict, (), ())).findings()]
        if verdict.scale > self.policy.checks.loss_scale.max_value:
            findings.append(Finding("loss_scale", "out_of_range", value=verdict.scale))
        raise_incident(self, self.step, findings, refused=True, report=report, values=self._values(verdict))

    def _is_ordinary_overflow(self, verdict: Verdict) -> bool:
        """Whether dynamic loss scaling deals with this by itself."""
        self.streak = self.streak + 1 if self.train_state().scales and verdict.only_gradients else 0
        return self.streak > 0 and self.policy.checks.loss_scale.leaves(self.streak, verdict.scale)

    def _unrefused(self, verdict: Verdict, reports: list[Report]) -> None:
        """A bad step that was committed: by an update that overflowed, or because nothing refuses here."""
        if self.policy.refuse:
            self._poisoned(verdict)
        else:
            self._observed(verdict, reports)

    def _poisoned(self, verdict: Verdict) -> None:
        """A step left a state behind whose sum is not finite; where every entry is, the sum alone overflowed."""
        findings = self.scan("weights")
        if not findings:
            self._count_committed(verdict)
            self.transaction.resume()
            return
        self._raise_committed(verdict, findings)
        self.transaction.resume()

    def _observed(self, verdict: Verdict, reports: list[Report]) -> None:
        """A bad step under a policy that changes nothing: told once, not again until a sound step has come between."""
        if self.streak:
            return
        self.streak = 1
        report = reports[-1] if reports else None
        findings = [*in_batch(report, self.model), *(report.findings() if report else ()), *self.scan("weights")]
        findings = findings or Report(verdict, (), ()).findings()
        raise_incident(self, self.step, findings, refused=False, report=report, values=self._values(verdict))

    def _values(self, verdict: Verdict) -> dict[str, float]:
        return values(verdict, self.train_state().optimizers)

    def scan(self, site: str) -> list[Finding]:
        """Read the whole state; see `_sightings.bad_state`."""
        train_state = self.train_state()
        if not self.began:
            tolerate(self, train_state)
        return bad_state(train_state, site, self.tolerated, self.nan_markers, self.policy)

    def _keep(self) -> None:
        """Do what is due between two steps: look for trouble that stays finite, and take a snapshot of a good state."""
        if self.step < self._due or self.stopped:
            return
        if self.step >= self.monitors.due:
            with self.variables_readable():
                findings = self.monitors.look(self)
            if findings:
                raise_incident(self, self.step - 1, findings, refused=False, report=None, values={})
        self.ring.promote(self.committed)
        if self.step >= self._snapshot_due and not self.stopped:
            self._snapshot_due = self.step + self.policy.snapshot.every
            self._take_snapshot()
        self._due = min(self._snapshot_due, self.monitors.due, self.step + self.ring.next_proof(self.committed))

    def _take_snapshot(self) -> None:
        with self.variables_readable() if self.ring.only_reads else nullcontext():
            train_state = self.train_state()
            self.history.start(self.ring.snapshots, train_state.trainable)
            bad = self.ring.take(train_state.restorable, self.step, self.committed, tolerated=self.tolerated)
        if bad:
            raise_incident(self, self.step - 1, self.scan("weights"), refused=False, report=None, values={})

    def raised(self, error: BaseException) -> None:
        """Tell of an exception inside of a step that is about its data, before it goes on to the user."""
        of_error = getattr(self.explain, "of_error", None)
        told = of_error(self, error) if of_error is not None else None
        if told is not None:
            finding, diagnosis = told
            self.announce(Incident(self.step, self.epoch, max(self.step - self.epoch_start, 0), (finding,), diagnosis=diagnosis))

    def seen_outside(self, findings: Sequence[Finding], diagnosis: Any = None, act: bool = True) -> None:
        """Tell of trouble that shows outside of a step: in results, or in the state as it is about to be saved."""
        self.resolve_pending()
        findings = [*findings, *(f for f in self.scan("weights") if f.site != "slots" or not findings)]
        raise_incident(self, max(self.step - 1, 0), findings, refused=False, report=None, values={}, diagnosis=diagnosis, act=act)

    def rate(self, optimizer: Any) -> Rate:
        """Return the rate of one optimizer, which remembers what the guard has done to it."""
        return self.rates.setdefault(id(optimizer), Rate(optimizer))

    def end(self) -> None:
        """Take off the optimizers what the guard has put on them, note it for the next fit, and let the batches go."""
        self.guard_state = self.guard_state or GuardState.of(self)
        self.recent.restart(self.step)
        for target, name, value in reversed(self.undo):
            setattr(target, name, value)
        self.undo.clear()
        for rate in self.rates.values():
            rate.release()
