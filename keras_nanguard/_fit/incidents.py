"""From a verdict to an incident: findings, diagnosis, decision, actions and report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keras_nanguard._backends import processes
from keras_nanguard._core.history import WINDOW, level_of, onset
from keras_nanguard._core.incident import (
    SITES,
    Diagnosis,
    Finding,
    Incident,
    NonFiniteError,
    Outcome,
)
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._fit import perform, recorded
from keras_nanguard._fit.agreement import Agreement
from keras_nanguard._fit.rollback import draw_anew, find_poles, pass_poles, run_again
from keras_nanguard._fit.run import Run, in_batch, measurements
from keras_nanguard._fit.trial import trial
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._policy.decide import decide
from keras_nanguard._recording.records import OVERFLOW, REFUSED

if TYPE_CHECKING:
    from keras_nanguard._diagnose.explain_step import Explainer

__all__ = ["Incidents"]

Poles = Mapping[int, tuple[int, float]]
"""Iteration and rate of a schedule without a usable rate, by `id` of the optimizer."""


def _has_onset(incident: Incident) -> bool:
    """Whether an incident is a fault that began earlier than it was noticed."""
    return "divergence" in incident.causes


def _goes_back(incident: Incident) -> bool:
    """Whether a rollback has advanced the random generators, or restored them to replay steps."""
    return any(o.action == "rollback" and o.status == "done" for o in incident.outcomes)


def _of_data(incident: Incident) -> bool:
    """Whether the batch itself is bad."""
    named = not incident.causes.isdisjoint(
        ("input_nonfinite", "target_nonfinite", "target_out_of_range")
    )
    return named or any(f.site in ("inputs", "targets") for f in incident.findings)


class Incidents:
    """Creates the incidents of one run, and has the decisions of the policy performed.

    All methods raise `NonFiniteError` if the policy requires it, after the incident was reported.

    Args:
        run: the run.
        report: called with each complete incident, in order.
        explain: makes the diagnosis of an incident, `None` for none.
        after: handles the verdict of a replayed step.
    """

    def __init__(
        self,
        run: Run,
        report: Callable[[Incident], None],
        explain: Explainer | None,
        after: Callable[[Verdict], object],
    ):
        self._run, self._report_now, self._explain, self._after = run, report, explain, after
        self._waiting: list[Incident] = []
        self._postponed = -2  # the last step that has left NaN in the state of this process alone
        self._last_unexplained = -2  # the last step that was refused with a finite batch
        # The counts of steps and rollbacks at which a step was refused for a divergence.
        self._diverged: tuple[int, int] | None = None

    # Detect

    def refused(self, verdict: Verdict, reports: Sequence[Report]) -> None:
        """Count a refused step, and raise its incident unless it is an ordinary overflow."""
        run, report = self._run, reports[-1] if reports else None
        run.counts.refuse()
        left = report is not None and report.left_by_previous
        left = left or self._postponed == run.step - 1
        left, extraordinary = run.agreement.any_of(
            left, not self._is_ordinary_overflow(verdict, report)
        )
        overflow = not (left or extraordinary)
        run.recorder.push(
            run.step,
            verdict.loss,
            verdict.gradients,
            verdict.scale,
            OVERFLOW if overflow else REFUSED,
        )
        if left:
            self.raise_incident(run.step - 1, run.scan("weights"), verdict=verdict)
            return
        if overflow:
            run.counts.overflows += 1
            run.recent.push_refused(run.step, run.transaction.given)
            return
        of_batch, of_state = in_batch(report, run.model), run.scan("state")
        if of_batch:  # then finite numbers of the state explain nothing, however large they are
            of_state = [finding for finding in of_state if finding.kind == "nonfinite"]
        findings = [*of_batch, *of_state, *(report or Report(verdict, (), ())).findings()]
        if verdict.scale > run.policy.loss_scale.ceiling:
            findings.append(Finding("loss_scale", "out_of_range", value=verdict.scale))
        run.recent.push_refused(run.step, run.transaction.given)
        args = self._given()
        state = (run.counts.committed, run.counts.rollbacks)
        incident = self.raise_incident(
            run.step, findings, refused=True, report=report, verdict=verdict
        )
        if not _of_data(incident):
            again = run.step - 1 == self._last_unexplained
            if not _goes_back(incident) and (again or self._is_bad_by_noise(args)):
                draw_anew(run)  # else the next step draws the same noise once more
            self._last_unexplained = run.step
        if _has_onset(incident):
            self._diverged = state
        elif _goes_back(incident):  # its batch is gone, or was replayed and is good
            pass
        elif self._diverged != state or _of_data(incident):  # else the state is still bad
            run.recent.blame(incident.step)

    def _is_ordinary_overflow(self, verdict: Verdict, report: Report | None) -> bool:
        """Whether dynamic loss scaling handles this step: only its gradients are bad.

        After a streak of such steps the step must also be finite at a loss scale of 1.
        """
        run, counts = self._run, self._run.counts
        scaled = bool(run.train_state().scales) and verdict.only_gradients
        counts.streak = counts.streak + 1 if scaled else 0
        if not scaled or in_batch(report, run.model) or (counts.streak == 1 and run.scan("state")):
            return False
        if run.policy.loss_scale.is_expected_overflow(counts.streak, verdict.scale):
            return True
        ordinary = run.policy.loss_scale.can_fall(verdict.scale) and self._is_finite_unscaled()
        counts.streak = 0 if ordinary else counts.streak
        return ordinary

    def _given(self) -> Any:
        """Return the arguments of this step, `None` if they are gone, or if it cannot be
        replayed.
        """
        run = self._run
        gone = processes.count() > 1 or not run.access.can_run_again
        return None if gone else run.transaction.batch(run.step, run.transaction.given)

    def _is_finite_unscaled(self) -> bool:
        args = self._given()
        if args is None:
            return False
        with trial(self._run, rates=False) as trying:
            return trying is not None and trying.is_finite_unscaled(args)

    def _is_bad_by_noise(self, args: Any) -> bool:
        """Whether the random numbers of a refused step made it bad."""
        if args is None or not keras_variables.seeds(self._run.train_state().other):
            return False
        with trial(self._run, rates=False) as trying:
            return trying is not None and trying.is_bad_by_noise(args)

    def poisoned(self, verdict: Verdict) -> bool:
        """Handle a step after which a sum over the state is not finite. Return `False` if every
        entry is finite.
        """
        run, findings = self._run, self._run.scan("weights")
        if findings:
            run.recorder.push(run.step, verdict.loss, verdict.gradients, verdict.scale)
            batch = run.transaction.batch(run.step, run.transaction.given)
            report = Report(verdict, (), (), batch)
            self.raise_incident(run.step, findings, report=report, verdict=verdict)
        return bool(findings)

    def postponed(self, verdict: Verdict) -> Verdict:
        """Return a verdict as all other processes have it: this one alone has NaN in its state.

        It acts once the others see it, too.
        """
        self._postponed = self._run.step
        return verdict._replace(statistics=0.0, weights=0.0, slots=0.0)

    def observed(self, verdict: Verdict, reports: Sequence[Report]) -> None:
        """Handle a bad step under a policy that changes nothing: report it once until the next
        finite step.
        """
        run, report = self._run, reports[-1] if reports else None
        if run.counts.streak:
            return
        run.counts.streak = 1
        findings = [
            *in_batch(report, run.model),
            *(report.findings() if report else ()),
            *run.scan("weights"),
        ]
        self.raise_incident(
            run.step, findings or Report(verdict, (), ()).findings(), report=report, verdict=verdict
        )

    def between_steps(
        self,
        findings: Sequence[Finding],
        diagnosis: Diagnosis | None = None,
        act: bool = True,
        values: Mapping[str, float] | None = None,
    ) -> Incident:
        """Raise an incident for findings between two steps, and return it. It counts for the step
        before.
        """
        step = max(self._run.step - 1, 0)
        return self.raise_incident(step, findings, diagnosis=diagnosis, act=act, values=values)

    def of_error(self, error: BaseException) -> None:
        """Report an exception inside of a step if it is about the data."""
        run, counts = self._run, self._run.counts
        found = self._explain.of_error(run, error) if self._explain is not None else None
        if found is not None:
            self._report(
                Incident(
                    run.step, counts.epoch, counts.batch(run.step), (found[0],), diagnosis=found[1]
                )
            )

    # Explain, decide, perform, report

    def raise_incident(
        self,
        step: int,
        findings: Sequence[Finding],
        *,
        refused: bool = False,
        report: Report | None = None,
        verdict: Verdict | None = None,
        diagnosis: Diagnosis | None = None,
        act: bool = True,
        values: Mapping[str, float] | None = None,
    ) -> Incident:
        """Create the incident of one step, decide, act, report it, and return it.

        Args:
            step: the step.
            findings: its findings.
            refused: whether the step was refused.
            report: the stored report of the step, if any.
            verdict: the verdict, if there is one.
            diagnosis: its diagnosis, if already known.
            act: whether to act, or only to report.
            values: additional measurements for the incident.
        """
        run = self._run
        measured = self._measured(verdict, refused) | dict(values or {})
        agreement = run.agreement if act else Agreement()  # a report needs no other process
        found = sorted(agreement.findings(findings, report), key=lambda f: SITES.index(f.site))
        replicas = report.replicas if report else ()
        place = run.counts.place(step)
        incident = Incident(step, *place, tuple(found), refused, measured, replicas=replicas)
        incident = incident.with_(committed=run.counts.committed)
        incident, poles = self._explained(incident, report, diagnosis, agreement)
        if not act:
            self._report(incident)
            return incident
        decision, state = decide(run.policy, run.recovery.policy_state, incident)
        run.recovery.policy_state = state
        incident = self._performed(incident.with_(decision=decision), report, poles)
        self._report(incident)
        if any(outcome.action == "raise_error" for outcome in incident.outcomes):
            raise NonFiniteError(f"NanGuard: {incident}", incident)
        return incident

    def _measured(self, verdict: Verdict | None, refused: bool) -> dict[str, float]:
        """Return the measurements of a step for its incident."""
        if verdict is None:
            return {}
        run = self._run
        measured = measurements(verdict, run.train_state().optimizers, not refused)
        if refused and "learning_rate" in measured:
            run.recorder.rate(measured["learning_rate"])
        return measured

    def _explained(
        self,
        incident: Incident,
        report: Report | None,
        diagnosis: Diagnosis | None,
        agreement: Agreement,
    ) -> tuple[Incident, Poles]:
        """Return the incident with its diagnosis and its bundle, and the poles of schedules."""
        run = self._run
        if diagnosis is None and self._explain is not None:
            diagnosis = self._explain(run, incident, report)
        incident = agreement.diagnosis(incident.with_(diagnosis=diagnosis), report)
        own = report if agreement.is_of(incident) else None
        run.bad_rows.note(incident, own)
        values = dict(incident.values)
        if _has_onset(incident):
            values.setdefault("onset", onset(run.history.series))
        poles = find_poles(run, incident)
        if poles:
            iteration, rate = min(poles.values())
            values |= {"pole": float(iteration), "learning_rate": rate}
        incident = incident.with_(values=values)
        if self._explain is not None:
            incident = incident.with_(bundle=self._explain.bundle(run, incident, own))
        return incident, poles

    def _performed(self, incident: Incident, report: Report | None, poles: Poles) -> Incident:
        """Perform the decision; return the incident with the outcomes."""
        run = self._run
        outcomes = run.agreement.outcomes(perform.perform(run, incident, report))
        run.recovery.policy_state = run.recovery.policy_state.performed(outcomes)
        recorded.acted(run, outcomes)
        outcomes = pass_poles(run, poles, self._with_result(incident, outcomes))
        run.healed |= any(o.status == "done" and o.action in perform.HEALING for o in outcomes)
        run.checks_fully |= run.recovery.active
        run.ring.note()
        return incident.with_(outcomes=outcomes)

    def _with_result(
        self, incident: Incident, outcomes: tuple[Outcome, ...]
    ) -> tuple[Outcome, ...]:
        """Replay the steps that a rollback has undone; return the outcomes with the result."""
        run = self._run
        if run.rerun is None or run.running_again:
            return outcomes
        before = level_of(run.history.undone)
        try:
            run_again(run, self._after)
        except BaseException:
            self._report(incident.with_(outcomes=outcomes))
            raise
        after = level_of(run.history.last(WINDOW))
        result = ""
        if before is not None and after is not None:
            result = f": loss {before.value:.3g} -> {after.value:.3g}"
        return tuple(
            replace(o, detail=o.detail + result) if o.action == "rollback" else o for o in outcomes
        )

    def _report(self, incident: Incident) -> None:
        """Report an incident. An incident of a replayed step waits for the one that caused the
        replay.
        """
        if self._run.running_again:
            self._waiting.append(incident)
            return
        waiting, self._waiting = self._waiting, []
        for one in (incident, *waiting):
            self._report_now(one)
