"""One guarded run on the host: reads the verdict of each step, counts, handles incidents, and runs
the tasks that are due.

Everything runs on the main thread, right after the step (for JAX on accelerators after the next
step has started) and before any callback there receives the model. For a healthy step this means:
read one row of numbers, count, and every hundred steps copy the state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf, isfinite, nan
from typing import TYPE_CHECKING, Any

from keras_nanguard._backends import current
from keras_nanguard._backends.interface import Executed
from keras_nanguard._core.incident import Diagnosis, Finding, NonFiniteError
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._fit.fit_logs import FitLogs
from keras_nanguard._fit.incidents import Handled, Incidents, incident_of
from keras_nanguard._fit.recovery import GuardState
from keras_nanguard._fit.resume import Start
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.tasks import TASKS, Tasks
from keras_nanguard._recording.database import REFUSED

if TYPE_CHECKING:
    from keras_nanguard._diagnose.explainer import Explainer


class Session:
    """The host side of the transaction: what happens before and after each step of a run.

    Args:
        explain: makes the diagnosis of an incident, `None` for none.

    Attributes:
        tasks: the work between two steps.
        finished: whether the fit has ended normally, or the steps without a fit so far.
        start: from which state the run starts.
        guard_state: the changes of the policy at the end of the fit.
        passed: the optimizers and rates of these changes; see `_keras.optimizers.passed`.
    """

    def __init__(self, run: Run, explain: Explainer | None):
        self.run, self.logs = run, FitLogs(run.model)
        self.incidents = Incidents(run, explain)
        self.tasks = Tasks(run, self.incidents)
        self.finished = self._deferred = False
        self.start = Start(run)
        self.guard_state: GuardState | None = None
        self.passed: list[tuple[Any, Any]] = []
        self._generators: Any = None

    # Before a step

    @property
    def pending(self) -> bool:
        """Whether anything is due before the next execution. For most healthy steps nothing is."""
        return self._has_to_act or self._holds_rates

    @property
    def _has_to_act(self) -> bool:
        """Whether more is due than to keep lowered rates."""
        run = self.run
        starts = not run.began or self.start.resuming is not None or self._generators is not None
        traces = run.created is not None or run.access.transaction.counted
        return starts or traces or run.stopped or run.counts.skip_batches > 0

    @property
    def _holds_rates(self) -> bool:
        """Whether a lowered rate is to be kept before each execution."""
        return any(rate.is_held for rate in self.run.recovery.rates.values())

    @property
    def may_run_ahead(self) -> bool:
        """Whether a healthy next step would only have to be counted."""
        run = self.run
        healthy = self._deferred and not run.counts.idle
        return healthy and not self._has_to_act and run.step + 1 < run.due.next

    def skip_batches(self, iterator: Iterator[Any], most: int, whole: bool = False) -> int:
        """Take the next batches that are to be skipped; return their number; for `most` and `whole`
        see `interface.Session`.
        """
        counts, skipped = self.run.counts, 0
        due = counts.skip_batches
        for _ in islice(iterator, most if whole and due else min(most, due)):
            counts.skip_batch()
            skipped += 1
        if skipped:
            self.run.record_epoch()
        return skipped

    def before(self, written: bool = True) -> None:
        """Do what is due before an execution.

        Args:
            written: whether other code may have written the variables since the last one.
        """
        if not self.pending:
            return
        run, recovery = self.run, self.run.recovery
        reads = not run.began or (written and self._holds_rates)
        if reads:
            run.access.sync_variables()
        if not run.began:
            self._begin()
        elif self._generators is not None:
            current.host().set_generator_state(self._generators)
            self._generators = None
        if reads:
            for rate in recovery.rates.values():
                rate.hold()

    def follow(self, earlier: Session) -> None:
        """Take over the state of an earlier fit of the same model."""
        self.run.state_check.follow(earlier.run.state_check)
        if earlier.guard_state is not None:
            before, now = earlier.passed, self.run.passed_optimizers()
            if [(id(o), id(r)) for o, r in before] == [(id(o), id(r)) for o, r in now]:
                self.tasks.divergence.follow(earlier.tasks.divergence, earlier.run.step)
            self.run.adopt(earlier.guard_state.without_replaced(before, now), write=False)

    def begin_fit(self, deferred: bool) -> None:
        """Begin a fit; `deferred`: its callbacks run in another thread, so that they cannot act
        before the next step.
        """
        self._deferred = deferred

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch before other callbacks do. The learning rate is recorded after its first
        step.

        A state to resume from is restored now, if its variables exist: a snapshot between two
        epochs has the rate of the earlier one, and other callbacks may set that of the next. What
        the data and other callbacks then draw does not change the random numbers of the first step.
        """
        run = self.run
        run.counts.begin_epoch(epoch)
        run.record_epoch()
        self.tasks.begin_epoch(run.step)
        if self.start.before_epoch(epoch):
            self.before()
            self._generators = current.host().generator_state()

    def _begin(self) -> None:
        """Check the state before the first step: keep a snapshot, or raise an incident."""
        run, resumed = self.run, self.start.restore()
        run.begin(resumed.record.step if resumed and resumed.with_state else None)
        self.say_problem()
        tolerated = run.state_check.tolerate(run.train_state(), run.model)
        run.access.transaction.tolerate(tolerated)
        old = resumed or run.access.transaction.reused
        # It may be compiled already.
        if (tolerated and old) or (resumed and run.recovery.is_built_in):
            run.access.rebuild()
        self.tasks.take_snapshot()

    # After a step

    def after(self, executed: Executed, *, state_is_current: bool = True) -> bool:
        """Read the verdict of the last step and act on it.

        Args:
            state_is_current: whether the state is the one that it has left: no other step was
                started since.

        Returns:
            Whether the step was healthy.

        Raises:
            NonFiniteError: if the policy raises.
        """
        run, counts, verdict = self.run, self.run.counts, executed.verdict
        refused, loss, gradients, statistics, weights, slots, scale, _, _ = verdict
        total = loss + gradients + statistics + weights + slots
        bad = refused or not (isfinite(total) and 0.0 < scale < inf)
        news = run.agreement.news or run.created is not None
        healthy = not (bad or news or run.access.transaction.counted)
        if healthy:
            self._count_committed(verdict, executed.arguments)
            counts.advance()
        elif run.agreement.all_see(verdict):
            with self._replaying():
                self._judge_execution(executed)
        else:
            executed = executed._replace(verdict=self.incidents.refusals.postponed(verdict))
            return self.after(executed, state_is_current=state_is_current)
        if counts.step >= run.due.next and (state_is_current or not healthy):
            self._run_due()
        return healthy

    @contextlib.contextmanager
    def _replaying(self) -> Iterator[None]:
        """Return a context in which incidents may be handled. At its end the steps run again that
        rollbacks have undone, with all handling after each; each may lead to another rollback. Then
        a `NonFiniteError` is raised; any other exception is raised at once.
        """
        replays, completed, ended = self.incidents.replays, False, None
        if replays.running:  # in a step that runs again
            yield
            return
        try:
            try:
                yield
            except NonFiniteError as error:
                ended = error
            while replays.running and replays.goes_on:
                if (executed := replays.step()) is not None:
                    self.after(executed)
            completed = True
        finally:
            if replays.running:
                self.incidents.end_replays(completed)
        if ended is not None:
            raise ended

    def _judge_execution(self, executed: Executed) -> None:
        """Judge the steps of an execution that is the first of a trace, has several, or is bad, or
        after which other processes have news: count each or raise its incident.
        """
        run, counts = self.run, self.run.counts
        stopped, was_replaced = run.stopped, False
        for variable, value in run.first_values(ends=True):
            run.ring.complete(variable, value)
        for verdict, report in run.access.transaction.results(executed):
            has_ended = run.stopped and not stopped
            if was_replaced or verdict.halted or (has_ended and verdict.refused):
                # A replaced state is not the one on which this step ran.
                numbers = (nan, nan, nan) if was_replaced else verdict.recorded
                run.push(counts.step, *numbers, REFUSED)
                counts.refuse()
            elif (handled := self._judge(verdict, report, executed.arguments)) is not None:
                if handled.replays:
                    return  # the step runs again
                was_replaced = handled.replaced
            counts.advance()
        if run.agreement.news:
            self.incidents.handle(incident_of(run, run.agreement.pick_up()))

    def _judge(self, verdict: Verdict, report: Report | None, arguments: Any) -> Handled | None:
        """Count a step, or raise its incident and return what that has changed."""
        run, incidents = self.run, self.incidents
        run.counts.judge(verdict.refused)
        if verdict.refused:
            return incidents.refused(verdict, report, arguments)
        if verdict.finite:
            self._count_committed(verdict, arguments)
            return None
        if not run.refuses:
            return incidents.observed(verdict, report)
        handled = incidents.committed_bad_state(verdict, arguments)
        if handled is None:
            self._count_committed(verdict, arguments)
        return handled

    def _count_committed(self, verdict: Verdict, arguments: Any) -> None:
        """Count a committed step. This runs in every step."""
        run, counts, monitors = self.run, self.run.counts, self.tasks.monitors
        step, loss, gradients, scale = counts.step, verdict.loss, verdict.gradients, verdict.scale
        counts.commit()
        run.history.push(step, loss, gradients, scale, verdict.statistics)
        run.push(step, loss, gradients, scale)
        run.recent.push(step, arguments)
        if abs(verdict.statistics) > monitors.ceiling:
            run.due.plan("checks", step + 1)

    def logs_for_callbacks(self, logs: Any, loss: float = nan, refused: bool = False) -> Any:
        """Return the logs of the last step for callbacks; `refused` if it was refused."""
        if (self.run.counts.idle or refused) and isinstance(logs, dict):
            return self.logs.stand_in(logs, loss)
        self.logs.known = self.logs.shown = logs
        return logs

    # Between two steps

    def _run_due(self) -> None:
        """Run the tasks that are due, each once. If one leads to a rollback, the undone steps run
        again before the next task.
        """
        run = self.run
        for name, task in TASKS.items():
            if run.step < run.due.step_of(name) or run.stopped:
                continue
            runs_again = self.incidents.replays.running
            with self._replaying():
                coming = task(self.tasks)
            if coming is not None:
                run.due.plan(name, coming)
            elif runs_again:
                return  # the state is that of an earlier step
            else:
                self.tasks.after_replays(name)

    # Outside of the steps

    def check_end(self) -> None:
        """Check the state that other code may have written after the last step of a fit."""
        run = self.run
        if run.began and run.refuses and not run.stopped:
            self.seen_outside()

    def finish(self) -> None:
        """Note that the fit has ended normally, or the steps without a fit so far."""
        self.finished = True

    def note_error(self, error: BaseException, args: Sequence[Any] | None) -> None:
        """Report an error that has ended an execution, if it is about the data; `args` are those of
        the step that has raised it, if they are known.
        """
        self.finished = False
        self.incidents.of_error(error, args)

    def say_without_effect(self, whose: str) -> None:
        """Print once that a loop continues after the end of training; `whose`: what it has to ask
        whether training has `stopped`.
        """
        remedy = f"End the loop if {whose}.stopped is true."
        line = f"NanGuard: training has ended, so steps since then have no effect. {remedy}"
        self.run.say_once("steps without effect", line)

    def seen_outside(
        self,
        findings: Sequence[Finding] = (),
        diagnosis: Diagnosis | None = None,
        *,
        act: bool = True,
        left_by_step: bool = False,
    ) -> None:
        """Raise an incident for findings in results, or in the state between two steps.

        Args:
            act: whether the policy acts on it.
            left_by_step: whether the last step has left a bad state. Otherwise other code has
                written it, because the verdict of the step was good.
        """
        run = self.run
        run.access.resolve_pending()
        state = [f for f in run.scan() if f.site != "slots" or not findings]
        bad, outside = [*findings, *state], bool(state) and not left_by_step
        if bad := run.agreement.between_steps(bad) if act else bad:
            incident = incident_of(run, bad, diagnosis=diagnosis)
            if act:
                with self._replaying():
                    self.incidents.handle(incident, written_outside=outside)
            else:
                self.incidents.report(incident)

    def say_problem(self) -> None:
        """Print once that the recording is no longer written to its file, and why."""
        if problem := self.run.recorder.problem():
            self.run.log.line(f"NanGuard: {problem}")

    def end(self) -> None:
        """Undo the changes to optimizers, store them for the next fit, and release."""
        run = self.run
        with contextlib.ExitStack() as closing:  # the last one first, even if another one raises
            closing.callback(self.say_problem)
            status = "finished" if self.finished else "failed"
            closing.callback(run.recorder.end, status, run.step, run.counts.epoch.number)
            closing.callback(run.recovery.end)
            closing.callback(run.ring.close)
            closing.callback(run.recent.release)
            if self.guard_state is None:
                self.guard_state, self.passed = run.changes(), run.passed_optimizers()
            if run.agreement.has_news:  # no later step has reported it to the others
                self.incidents.report(incident_of(run, run.agreement.pick_up()))
