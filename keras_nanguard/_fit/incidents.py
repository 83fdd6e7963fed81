"""From a verdict to an incident: findings, diagnosis, decision, actions and report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from keras_nanguard._backends import processes
from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.rules import MIN_LOSS_SCALE
from keras_nanguard._core import finiteness
from keras_nanguard._core.data import argument_path, input_names, named
from keras_nanguard._core.history import WINDOW, level_of, onset
from keras_nanguard._core.incident import (
    Decision,
    Diagnosis,
    Finding,
    Incident,
    Lowered,
    NonFiniteError,
    Outcome,
)
from keras_nanguard._core.literals import SITES, Site
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._fit.agreement import Agreement
from keras_nanguard._fit.bad_data import BadRows
from keras_nanguard._fit.perform import Response, perform
from keras_nanguard._fit.poles import Found, Poles
from keras_nanguard._fit.rollback import Replay
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.steps import Rerun
from keras_nanguard._fit.trial import Trial, tried
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._policy.decide import decide
from keras_nanguard._policy.state import is_of_data
from keras_nanguard._recording.database import OVERFLOW, REFUSED

if TYPE_CHECKING:
    from keras_nanguard._diagnose.explain_step import Explainer

MUCH_HIGHER = 2.0**10
"""Factor by which a loss scale below the floor has to be too low to be a collapse. Dynamic scaling
takes 20,000 steps for ten doublings, and the gradients of ordinary batches differ by less.
"""


def _in_batch(report: Report | None, model: Any) -> list[Finding]:
    """Return findings for the inputs and targets of a refused step, by the user's names: `x`,
    `x/age`, `y`.
    """
    if report is None or report.batch is None:
        return []
    findings, names = [], input_names(model)
    for part in batches.parts(report.batch):
        nan, inf, size = finiteness.counts(keras_variables.dense(part.value))
        if nan or inf:
            site: Site = "inputs" if part.role == "inputs" else "targets"
            place = named(argument_path(part.path), names)
            findings.append(Finding(site, "nonfinite", place, nan, inf, size))
    return findings


@dataclass(frozen=True, slots=True)
class Detected:
    """What an incident is about.

    Attributes:
        step: the step.
        findings: its findings.
        verdict: its verdict, if there is one.
        report: its stored report, if any.
        refused: whether it was refused.
        diagnosis: its diagnosis, if already known.
        values: additional measurements.
    """

    step: int
    findings: Sequence[Finding]
    verdict: Verdict | None = None
    report: Report | None = None
    refused: bool = False
    diagnosis: Diagnosis | None = None
    values: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def between_steps(cls, run: Run, findings: Sequence[Finding], **about: Any) -> Detected:
        """Return what was detected after a step; `about` are the other attributes."""
        return cls(max(run.step - 1, 0), findings, **about)


Refusal = Literal["left_by_previous", "overflow", "incident"]
"""Why a step was refused: for the state that the step before has left; for an ordinary overflow
under dynamic loss scaling; for anything else.
"""


@dataclass(frozen=True, slots=True)
class _LastSteps:
    """The last bad steps that matter for the next one, each `None` before the first.

    Attributes:
        postponed: the last step that has left NaN in the state of this process alone.
        observed: the last bad step under a policy that refuses nothing.
        unexplained: the last step that was refused with a finite batch.
        diverged: the numbers of committed steps and rollbacks at which a step was last refused for
            a divergence. As long as they are the same, the state is still bad, for any batch.
    """

    postponed: int | None = None
    observed: int | None = None
    unexplained: int | None = None
    diverged: tuple[int, int] | None = None


class Incidents:
    """Creates the incidents of one run, and has the decisions of the policy performed.

    All methods raise `NonFiniteError` if the policy requires it, after the incident was reported.

    Args:
        run: the run.
        report: called with each complete incident, and the learning rates that it has lowered, in
            order.
        explain: makes the diagnosis of an incident, `None` for none.
        bad_rows: the bad rows of the data so far.
        after: handles the verdict of a replayed step.

    Attributes:
        replay: replays the steps that a rollback has undone.
    """

    def __init__(
        self,
        run: Run,
        report: Callable[[Incident, Sequence[Lowered]], None],
        explain: Explainer | None,
        bad_rows: BadRows,
        after: Callable[[Verdict], object],
    ):
        self._run, self._report_now, self._explain = run, report, explain
        self._bad_rows, self._poles = bad_rows, Poles(run)
        self.replay = Replay(run, self._poles, after)
        self._waiting: list[tuple[Incident, Sequence[Lowered]]] = []
        self._last = _LastSteps()

    # Detect

    def refused(self, verdict: Verdict, report: Report | None) -> None:
        """Count a refused step, and raise its incident unless it is an ordinary overflow."""
        run, step = self._run, self._run.step
        run.counts.refuse()
        refusal = self._classify(verdict, report)
        run.recording.step(verdict, OVERFLOW if refusal == "overflow" else REFUSED)
        if refusal == "left_by_previous":
            self.handle(Detected(step - 1, run.scan(), verdict))
            self.replay.leave_out(step)
            return
        run.recent.push(step, run.access.transaction.given, refused=True)
        if refusal == "overflow":
            run.counts.overflow()
            return
        args, state = self._arguments(), (run.counts.committed, run.counts.rollbacks)
        findings = self._findings(verdict, report)
        incident = self.handle(Detected(step, findings, verdict, report, refused=True))
        self._after_refusal(incident, step, args, state)

    def _classify(self, verdict: Verdict, report: Report | None) -> Refusal:
        """Count the overflows in a row; return why a step was refused, in any of the processes."""
        by_previous = report is not None and report.left_by_previous
        by_previous |= self._last.postponed == self._run.step - 1
        ordinary = self._is_ordinary_overflow(verdict, report)
        by_previous, incident = self._run.agreement.any_of(by_previous, not ordinary)
        if by_previous:
            return "left_by_previous"
        return "incident" if incident else "overflow"

    def _findings(self, verdict: Verdict, report: Report | None) -> list[Finding]:
        """Return the findings of a refused step: in its batch, its state and its loss scale."""
        run, scaling = self._run, self._run.policy.loss_scale
        of_batch, of_state = _in_batch(report, run.model), run.scan(before=True)
        if of_batch:  # then finite numbers of the state explain nothing, however large they are
            of_state = [finding for finding in of_state if finding.kind == "nonfinite"]
        findings = [*of_batch, *of_state, *(report or Report(verdict, (), ())).findings()]
        scaled = verdict.scale != 1.0  # it is 1 without a loss scale
        if scaled and scaling.is_too_high(verdict.scale, run.history.scale):
            findings.append(Finding("loss_scale", "out_of_range", value=verdict.scale))
        return findings

    def _after_refusal(
        self, incident: Incident, step: int, args: Any, state: tuple[int, int]
    ) -> None:
        """Prepare for the next step after the incident of a refused one: without the random numbers
        or the batch that are to blame.

        Args:
            incident: the incident.
            step: the step.
            args: its arguments, `None` if they are gone.
            state: the numbers of committed steps and rollbacks before the incident.
        """
        run, last = self._run, self._last
        back = "rollback" in incident.changes
        if not is_of_data(incident) or "bad_at_start" in incident.values:
            again = step - 1 == last.unexplained
            # A rollback has advanced the random generators, or restored them to replay steps.
            if not back and (again or self._is_bad_by_noise(args)):
                run.advance_generators()  # else the next step draws the same noise once more
            self._last = replace(self._last, unexplained=step)
        if "divergence" in incident.causes:
            self._last = replace(self._last, diverged=state)
        elif not back and (is_of_data(incident) or last.diverged != state):
            run.recent.blame(incident.step)  # after a rollback it is gone, or good in a replay

    def _is_ordinary_overflow(self, verdict: Verdict, report: Report | None) -> bool:
        """Count the overflows in a row; return whether dynamic loss scaling handles this one: only
        its gradients are bad.

        After a streak of such steps, or if the scale would fall below the floor, the step must
        also be finite at the lowest loss scale.
        """
        run, counts, scaling = self._run, self._run.counts, self._run.policy.loss_scale
        scaled = bool(run.train_state().scales) and verdict.only_gradients
        streak = counts.count_streak(scaled)
        if not scaled or _in_batch(report, run.model):
            return False
        if streak == 1 and run.scan(before=True):
            return False
        if scaling.is_expected_overflow(streak, verdict.scale, run.history.scale):
            return True
        ordinary = not scaling.is_too_high(verdict.scale * 0.5, run.history.scale)
        ordinary = ordinary and self._is_finite_at(MIN_LOSS_SCALE)
        if ordinary:
            counts.end_streak()
        return ordinary

    def needs_low_scale(self) -> bool:
        """Return whether the loss scale is below the floor, and the last step overflows at one that
        is `MUCH_HIGHER`, and at least the floor.
        """
        run, check = self._run, self._run.policy.loss_scale
        if not check.action:
            return False  # then nobody asks
        with run.access.variables_readable():
            scales = [float(keras_variables.read(scale)) for scale, _ in run.train_state().scales]
        low = [scale for scale in scales if MIN_LOSS_SCALE <= scale < check.floor]
        return bool(low) and not self._is_finite_at(max(check.floor, MUCH_HIGHER * min(low)))

    def _is_finite_at(self, loss_scale: float) -> bool:
        """Return whether the last step is finite at another loss scale, as far as is known."""
        args = self._arguments()
        return self._holds(lambda trying, args: trying.is_finite_at(loss_scale, args), args)

    def _arguments(self) -> Any:
        """Return the arguments of this step, `None` if they are gone, or if it cannot be
        replayed.
        """
        run = self._run
        gone = processes.count() > 1 or not run.access.can_run_again
        return None if gone else run.last_arguments()

    def _is_bad_by_noise(self, args: Any) -> bool:
        """Whether the random numbers of a refused step made it bad."""
        seeds = keras_variables.seeds(self._run.train_state().other)
        return bool(seeds) and self._holds(Trial.is_bad_by_noise, args)

    def _holds(self, holds: Callable[[Trial, Any], bool], args: Any) -> bool:
        """Whether a method of `Trial` finds that something holds for a step on these arguments."""
        return args is not None and tried(self._run, lambda trying: holds(trying, args), False)

    def poisoned(self, verdict: Verdict) -> bool:
        """Handle a step after which a sum over the state is not finite. Return `False` if every
        entry is finite.
        """
        run, findings = self._run, self._run.scan()
        if findings:
            run.recording.step(verdict)
            report = Report(verdict, (), (), run.last_arguments())
            self.handle(Detected(run.step, findings, verdict, report))
        return bool(findings)

    def postponed(self, verdict: Verdict) -> Verdict:
        """Return a verdict as all other processes have it: this one alone has NaN in its state.

        It acts once the others see it, too.
        """
        self._last = replace(self._last, postponed=self._run.step)
        return verdict._replace(statistics=0.0, weights=0.0, slots=0.0)

    def observed(self, verdict: Verdict, report: Report | None) -> None:
        """Handle a bad step under a policy that changes nothing: report it once until the next
        finite step.
        """
        run = self._run
        run.recording.step(verdict)
        before, self._last = self._last.observed, replace(self._last, observed=run.step)
        if run.step - 1 == before:
            return
        reported = report.findings() if report else ()
        findings = [*_in_batch(report, run.model), *reported, *run.scan()]
        findings = findings or Report(verdict, (), ()).findings()
        self.handle(Detected(run.step, findings, verdict, report))

    def of_error(self, error: BaseException) -> None:
        """Report an exception inside of a step if it is about the data."""
        run, counts = self._run, self._run.counts
        found = self._explain.of_error(error) if self._explain is not None else None
        if found is not None:
            place = (run.step, counts.epoch, counts.batch(run.step))
            self._report(Incident(*place, (found[0],), diagnosis=found[1]))

    # Explain, decide, perform, report

    def handle(self, detected: Detected) -> Incident:
        """Explain what was detected, decide, act, report the incident, and return it."""
        run = self._run
        incident, poles = self._explain_incident(detected, run.agreement)
        decision, state = decide(run.policy, run.recovery.policy_state, incident)
        if self._is_of_batch(incident, decision, detected.report):
            incident = incident.with_(values={**incident.values, "bad_at_start": 1.0})
            decision, state = decide(run.policy, run.recovery.policy_state, incident)
        run.recovery.policy_state = state
        incident = incident.with_(decision=decision)
        response = perform(run, incident, detected.report, self.replay.rollbacks)
        incident = self._apply(response, incident, poles)
        self._report(incident, response.lowered)
        if any(outcome.action == "raise_error" for outcome in incident.outcomes):
            raise NonFiniteError(f"NanGuard: {incident}", incident)
        return incident

    def _is_of_batch(self, incident: Incident, decision: Decision, report: Report | None) -> bool:
        """Whether neither the rollback nor the lower rate of a decision can cure a refused step,
        because it is bad from the state before the first step, too.

        If training has diverged, the state and the rate of the later steps are to blame as well.
        """
        names = {action["action"] for action in decision.actions}
        if not incident.refused or names.isdisjoint(("rollback", "lower_lr")):
            return False
        if "divergence" in incident.causes or "state" in incident.sites or self._explain is None:
            return False
        update = "lower_lr" not in names  # else a lower rate may cure it
        found = self._explain.is_bad_at_start(report, update)
        return self._run.agreement.any_of(found)[0]

    def report(self, detected: Detected) -> None:
        """Explain what was detected and report it, without an action or another process."""
        self._report(self._explain_incident(detected, Agreement())[0])

    def _measured(self, detected: Detected) -> dict[str, float]:
        """Return the measurements of a step for its incident."""
        verdict, refused = detected.verdict, detected.refused
        if verdict is None:
            return {}
        optimizers = self._run.train_state().optimizers
        measured = {"loss": verdict.loss, "gradient_norm": verdict.gradient_norm}
        # A committed step is counted, so the rate of the next step may be another one.
        read = keras_optimizers.learning_rate if refused else keras_optimizers.rate_before
        for optimizer in filter(keras_optimizers.rate_is_pure, optimizers[:1]):
            rate = keras_optimizers.rate_if_known(read, optimizer)
            if rate is not None:
                measured["learning_rate"] = rate
                if refused:
                    self._run.recorder.rate(rate)
        if any(keras_optimizers.is_loss_scaled(optimizer) for optimizer in optimizers):
            measured["loss_scale"] = verdict.scale
        return measured

    def _explain_incident(self, detected: Detected, agreement: Agreement) -> tuple[Incident, Found]:
        """Return the incident without a decision, and the poles of schedules that it is about.

        Args:
            detected: what was detected.
            agreement: how processes exchange findings and diagnoses.
        """
        run, report = self._run, detected.report
        found = agreement.findings(detected.findings, report)
        incident = Incident(
            detected.step,
            *run.counts.place(detected.step),
            tuple(sorted(found, key=lambda f: SITES.index(f.site))),
            detected.refused,
            self._measured(detected) | dict(detected.values),
            replicas=report.replicas if report else (),
            committed=run.counts.committed,
        )
        diagnosis, evidence = detected.diagnosis, None
        if diagnosis is None and self._explain is not None:
            diagnosis, evidence = self._explain(incident, report)
        sites = {finding.site for finding in detected.findings}
        diagnosis, ours = agreement.diagnosis(diagnosis, sites, report)
        own = report if ours else None  # else the diagnosis is not about the batch of this process
        incident = incident.with_(diagnosis=diagnosis)
        values = dict(incident.values)
        self._bad_rows.note(incident, own)
        if "divergence" in incident.causes:
            values.setdefault("onset", onset(run.history.series))
        poles = self._poles.find(incident)
        if poles:
            iteration, rate = min(poles.values())
            values |= {"pole": float(iteration), "learning_rate": rate}
        incident = incident.with_(values=values)
        if self._explain is not None:
            incident = incident.with_(bundle=self._explain.bundle(incident, own, evidence))
        return incident, poles

    def _apply(self, response: Response, incident: Incident, poles: Found) -> Incident:
        """Apply to the run what the actions of an incident have done, and replay the undone steps;
        return the incident with the outcomes.
        """
        run = self._run
        outcomes = run.agreement.outcomes(response.outcomes)
        run.stopped |= response.stops
        run.failed |= response.log_worst_metrics
        run.recovery.policy_state = run.recovery.policy_state.performed(outcomes)
        run.recording.actions(outcomes)
        if response.rerun is not None and self.replay.rollbacks:
            self.replay.pending = response.rerun  # its steps reach the poles again
        else:
            if response.rerun is not None:
                outcomes = self._replay_undone(response.rerun, incident.with_(outcomes=outcomes))
            outcomes = self._poles.passed(poles, outcomes)
        run.state_replaced |= response.state_replaced
        run.checks_fully |= run.recovery.active
        run.ring.save_changes(run.changes)
        return incident.with_(outcomes=outcomes)

    def _replay_undone(self, rerun: Rerun, incident: Incident) -> tuple[Outcome, ...]:
        """Replay the steps that a rollback has undone; return the outcomes with the result."""
        history, result = self._run.history, ""
        before = level_of(history.undone)
        try:
            self.replay.run(rerun)
        except BaseException:
            self._report(incident)
            raise
        after = level_of(history.last(WINDOW))
        if before is not None and after is not None:
            result = f": loss {before.value:.3g} -> {after.value:.3g}"
        return tuple(
            replace(o, detail=o.detail + result) if o.action == "rollback" else o
            for o in incident.outcomes
        )

    def _report(self, incident: Incident, lowered: Sequence[Lowered] = ()) -> None:
        """Report an incident. An incident of a replayed step waits for the one that caused the
        replay.
        """
        if self.replay.rollbacks:
            self._waiting.append((incident, lowered))
            return
        waiting, self._waiting = self._waiting, []
        for one in ((incident, lowered), *waiting):
            self._report_now(*one)
