"""From a verdict to an incident: findings, diagnosis, decision, actions and report."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from keras_nanguard._core.history import onset
from keras_nanguard._core.incident import (
    MAX_RATE,
    Decision,
    Finding,
    Incident,
    NonFiniteError,
    Outcome,
    blames_rate,
)
from keras_nanguard._core.literals import SITES
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._fit.agreement import Agreement
from keras_nanguard._fit.perform import WRITES_PARTS, perform
from keras_nanguard._fit.poles import Poles, Unusable
from keras_nanguard._fit.refusals import Refusals, findings_in_batch
from keras_nanguard._fit.rollback import ActionContext, ReplayQueue, Restored
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.snapshots import Snapshot
from keras_nanguard._keras import layers as keras_layers, optimizers as keras_optimizers
from keras_nanguard._policy.actions import Action, Ending, LowerLr, RaiseError, Rollback, Stop
from keras_nanguard._policy.decide import actions_of, decide
from keras_nanguard._recording.database import OVERFLOW, REFUSED

if TYPE_CHECKING:
    from keras_nanguard._diagnose.explainer import Explainer

UPDATED = frozenset({"state", "weights", "slots"})
"""Sites that an update writes."""


def incident_of(
    run: Run, findings: Sequence[Finding], step: int | None = None, **about: Any
) -> Incident:
    """Return an incident about a step of a run, by default the last one; `about` are further
    fields. It has committed unless they say that it was `refused`.
    """
    step = max(run.step - 1, 0) if step is None else step
    own = {"refused": False, "committed": run.counts.committed}
    return Incident(step, *run.counts.place(step), tuple(findings), **{**own, **about})


class Handled(NamedTuple):
    """An incident with its outcomes, and what that has changed.

    Attributes:
        replaced: whether the state was replaced, or a part of it.
        replays: whether the last steps were undone, and are to run again.
    """

    incident: Incident
    replaced: bool
    replays: bool


class Incidents:
    """Creates the incidents of one run, and has the decisions of the policy performed.

    A rollback leaves the steps that it has undone to `replays`: `Session` runs them again. Until
    then its incident waits, and those of the steps that run again wait for it.

    All methods raise `NonFiniteError` if the policy requires it. The incident is reported before
    that, or waits for steps that run again.

    Args:
        explain: makes the diagnosis of an incident, `None` for none.

    Attributes:
        replays: the steps that are to run again.
        refusals: why steps were refused.
    """

    def __init__(self, run: Run, explain: Explainer | None):
        self._run, self._explain, self._poles = run, explain, Poles(run)
        self.replays, self.refusals = ReplayQueue(run, self._poles), Refusals(run)
        self._waiting: list[Incident] = []
        self._observed: int | None = None  # the last bad step of a policy that refuses nothing

    # Detect

    def refused(self, verdict: Verdict, report: Report | None, arguments: Any) -> Handled | None:
        """Count a refused step, and raise its incident unless it is an ordinary overflow.

        Args:
            arguments: those of the step, as it has returned them.
        """
        run, step = self._run, self._run.step
        refusal = self.refusals.classify(verdict, report, arguments)
        status = OVERFLOW if refusal == "overflow" else REFUSED
        run.counts.refuse(overflow=status == OVERFLOW)
        run.push(step, *verdict.recorded, status)
        if refusal == "left_by_previous":
            for m in run.history.since(step - 1):  # the incident is about the step before
                verdict = verdict._replace(loss=m.loss, gradients=m.squares, scale=m.scale)
            handled = self.handle(self._incident(run.scan(), step - 1, verdict))
            self.replays.leave_out(step)
            return handled
        run.recent.push(step, arguments, refused=True)
        if refusal == "overflow":
            return None
        args, state = run.replayable(arguments), run.counts.state
        findings = self.refusals.findings(verdict, report)
        detected = self._incident(findings, step, verdict, report, refused=True)
        if "learning_rate" in detected.values:
            run.recorder.rate(detected.values["learning_rate"])
        handled = self.handle(detected, report)
        if not (self.replays.running and run.stopped):  # else no further batch follows
            self.refusals.prepare_next(handled.incident, args, state)
        return handled

    def committed_bad_state(self, verdict: Verdict, arguments: Any) -> Handled | None:
        """Raise the incident of a step after which a sum over the state is bad; `None` if no entry
        is bad.
        """
        run, findings = self._run, self._run.scan()
        if not findings:
            return None
        run.push(run.step, *verdict.recorded)
        report = Report(verdict, (), (), run.recent.as_given(arguments))
        return self.handle(self._incident(findings, run.step, verdict, report), report)

    def observed(self, verdict: Verdict, report: Report | None) -> Handled | None:
        """Report a bad step of a policy that refuses nothing, once until the next finite step."""
        run = self._run
        run.push(run.step, *verdict.recorded)
        before, self._observed = self._observed, run.step
        if run.step - 1 == before:
            return None
        reported = report.findings() if report else ()
        findings = [*findings_in_batch(report, run.model), *reported, *run.scan()]
        findings = findings or Report(verdict, (), ()).findings()
        return self.handle(self._incident(findings, run.step, verdict, report), report)

    def of_error(self, error: BaseException, args: Sequence[Any] | None) -> None:
        """Report an exception inside of a step if it is about the data; `args` if known."""
        run = self._run
        explained = self._explain.of_error(error, args) if self._explain is not None else None
        if explained is not None:
            finding, diagnosis = explained
            about = {"refused": True, "diagnosis": diagnosis}
            self._publish(incident_of(run, [finding], run.step, **about))

    def _incident(
        self,
        findings: Sequence[Finding],
        step: int,
        verdict: Verdict,
        report: Report | None = None,
        refused: bool = False,
    ) -> Incident:
        """Return an incident about a step with a verdict, with the measurements of the step."""
        optimizers = self._run.train_state().optimizers
        measured = {"loss": verdict.loss, "gradient_norm": verdict.gradient_norm}
        # A committed step is counted, so the rate of the next step may be another one.
        read = keras_optimizers.learning_rate if refused else keras_optimizers.rate_before
        for optimizer in filter(keras_optimizers.rate_is_pure, optimizers[:1]):
            rate = keras_optimizers.rate_if_known(read, optimizer)
            if rate is not None:
                measured["learning_rate"] = rate
        if any(keras_optimizers.is_loss_scaled(optimizer) for optimizer in optimizers):
            measured["loss_scale"] = verdict.scale
        replicas = report.replicas if report else ()
        about = {"refused": refused, "values": measured, "replicas": replicas}
        return incident_of(self._run, findings, step, **about)

    # Explain, decide, perform, report

    def handle(
        self,
        detected: Incident,
        report: Report | None = None,
        restart: Snapshot | None = None,
        written_outside: bool = False,
    ) -> Handled:
        """Explain an incident, decide, act, and report it.

        Args:
            detected: the incident with its findings, and with a diagnosis if that is known.
            restart: see `ActionContext`.
            written_outside: whether other code has written the bad state after the last step.
        """
        explained, poles = self._explained(detected, report, self._run.agreement)
        incident, chosen = self._decided(explained, report)
        replays = self.replays.rollbacks
        context = ActionContext(self._run, incident, report, replays, restart, written_outside)
        handled = self._apply(incident, chosen, *perform(context, chosen), poles)
        self._publish(handled.incident)
        if any(isinstance(action, RaiseError) for action in chosen):
            raise NonFiniteError(f"NanGuard: {handled.incident}", handled.incident)
        return handled

    def report(self, detected: Incident) -> None:
        """Explain an incident and report it, without an action or another process."""
        incident, _ = self._explained(detected, None, Agreement())
        self._publish(incident)

    def _decided(
        self, incident: Incident, report: Report | None
    ) -> tuple[Incident, tuple[Action, ...]]:
        """Return an incident with the decision of the policy, and its actions; `report` has the
        batch.
        """
        run = self._run
        decision, counted = decide(run.policy, run.recovery.policy_state, incident)
        if self._is_of_batch(incident, decision, report):
            incident = incident.with_(values={**incident.values, "bad_at_start": 1.0})
            decision, counted = decide(run.policy, run.recovery.policy_state, incident)
        run.recovery.count(counted)
        return incident.with_(decision=decision), actions_of(decision)

    def _is_of_batch(self, incident: Incident, decision: Decision, report: Report | None) -> bool:
        """Whether neither the rollback nor the lower rate of a decision can cure a refused step,
        because it is bad from the state before the first step, too.

        If training has diverged, the state and the rate of the later steps are to blame as well.
        """
        kinds = {type(action) for action in actions_of(decision)}
        if not incident.refused or kinds.isdisjoint((Rollback, LowerLr)):
            return False
        if incident.diverged or "state" in incident.sites or self._explain is None:
            return False
        update = LowerLr not in kinds  # else a lower rate may cure it
        bad_at_start = self._explain.is_bad_at_start(report, update)
        return self._run.agreement.any_of(bad_at_start)[0]

    def _explained(
        self, detected: Incident, report: Report | None, agreement: Agreement
    ) -> tuple[Incident, Unusable]:
        """Store the bad rows and the bundle of an incident; return it with findings and diagnosis
        as processes agree on them, and the poles of schedules that it is about.
        """
        names = keras_layers.input_names(self._run.model)
        findings = agreement.findings(detected.findings, report, names)
        ordered = tuple(sorted(findings, key=lambda f: SITES.index(f.site)))
        incident, own, evidence = detected.with_(findings=ordered), detected.diagnosis, None
        if own is None and self._explain is not None:
            own, evidence = self._explain(incident, report)
        diagnosis, ours = agreement.diagnosis(own, detected.sites, report)
        incident, poles = self._with_poles(incident.with_(diagnosis=diagnosis))
        report = report if ours else None  # else its rows are those of another process
        self._run.log.bad_rows.note(incident, report)
        if self._explain is not None:
            bundle = self._explain.write_bundle(incident, report, evidence)
            incident = incident.with_(bundle=bundle)
        return incident, poles

    def _with_poles(self, incident: Incident) -> tuple[Incident, Unusable]:
        """Return an incident with the onset of a divergence and the first pole of a schedule among
        its values, and all poles that it is about.

        If the state was bad before the step, it is about the step that left it so. A rate that is
        finite counts only if the diagnosis blames it.
        """
        values, poles = dict(incident.values), Unusable()
        if incident.refused or not UPDATED.isdisjoint(incident.sites):
            highest = MAX_RATE if blames_rate(incident.diagnosis) else inf
            ago = int(not incident.refused or "state" in incident.sites)
            poles = self._poles.find(ago, highest)
        if incident.diverged:
            values["onset"] = onset(self._run.history.series)
        if poles:
            iteration, rate = min(poles.values())
            values |= {"pole": float(iteration), "learning_rate": rate}
        return incident.with_(values=values), poles

    def _apply(
        self,
        incident: Incident,
        chosen: Sequence[Action],
        own: tuple[Outcome, ...],
        restored: Restored | None,
        poles: Unusable,
    ) -> Handled:
        """Apply what the actions of an incident have done.

        Args:
            own: the outcomes of this process.
            restored: what one of them has restored.
        """
        run = self._run
        outcomes = run.agreement.outcomes(own)
        for action in chosen:
            if isinstance(action, Ending):  # also if it failed
                run.stop(isinstance(action, Stop) and action.log_worst_metrics)
            if isinstance(action, Stop):
                run.model.stop_training = True
        run.recovery.count(run.recovery.policy_state.performed(outcomes))
        lowered = [o.detail for o in outcomes if o.action == "lower_lr" and o.status == "done"]
        run.record_factor("; ".join(lowered))
        wrote = any(o.action in WRITES_PARTS and o.status == "done" for o in outcomes)
        replaced = wrote or restored is not None
        replays = restored is not None and restored.rerun is not None
        if replaced:
            run.count_replacement()
        if restored is not None:
            self.replays.go_back(restored, poles)
        if not replays:
            self._poles.pass_over_found(poles)
            run.plan_changes()
            run.save_changes()
            if restored is not None and not run.stopped:
                run.rewrite(restored.snapshot, passed=int(incident.step == run.step))
        return Handled(incident.with_(outcomes=outcomes), replaced, replays)

    def _publish(self, incident: Incident) -> None:
        """Announce an incident, once the steps that are to run again have done so."""
        if self.replays.running:
            self._waiting.append(incident)
        else:
            self._run.log.announce(incident)

    def end_replays(self, completed: bool) -> None:
        """Continue after the replays, and announce the incidents that have waited for them, in
        order: first the one that has caused them. For `completed` see `ReplayQueue.end`.
        """
        self.replays.end(completed)
        waiting, self._waiting = self._waiting, []
        for incident in waiting:
            self._run.log.announce(incident)
