"""From what was found to an incident: its diagnosis, what the policy decides, what is done, and who is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_nanguard._core.errors import NonFiniteError
from keras_nanguard._core.incident import SITES, Finding, Incident
from keras_nanguard._core.verdict import Report
from keras_nanguard._fit import perform
from keras_nanguard._policy.policy import decide

__all__ = ["raise_incident"]


def raise_incident(
    session: Any,
    step: int,
    findings: Sequence[Finding],
    *,
    refused: bool,
    report: Report | None,
    values: dict[str, float],
    diagnosis: Any = None,
    act: bool = True,
) -> None:
    """Make the incident of one step, let the policy decide about it, do that, and tell.

    Args:
        session: the `Session`.
        step: the step it is about.
        findings: what is bad.
        refused: whether the step was refused.
        report: what the step kept, if anything.
        values: loss, gradient norm and more.
        diagnosis: its diagnosis, where it is known already.
        act: whether to do anything about it but to tell.

    Raises:
        NonFiniteError: where the policy says so, when all is told.
    """
    ordered = tuple(sorted(findings, key=lambda f: SITES.index(f.site)))
    batch = max(step - session.epoch_start, 0)
    incident = Incident(step, session.epoch, batch, ordered, refused, values, replicas=report.replicas if report else ())
    incident = incident.with_(committed=session.committed)
    if session.explain is not None:
        incident = incident.with_(diagnosis=diagnosis or session.explain(session, incident, report))
        if session.directory is not None and hasattr(session.explain, "bundle"):
            incident = incident.with_(bundle=session.explain.bundle(session, incident, report))
    if not act:
        session.announce(incident)
        return
    decision, session.ledger = decide(session.policy, session.ledger, incident)
    incident = incident.with_(decision=decision)
    outcomes = perform.perform(session, incident, report)
    session.healed |= any(o.status == "done" and o.action in perform.HEALING for o in outcomes)
    session.checks_fully |= session.pending_recovery.active
    session.ring.note(session)
    incident = incident.with_(outcomes=outcomes)
    session.announce(incident)
    if any(outcome.action == "raise_error" for outcome in outcomes):
        raise NonFiniteError(f"NanGuard: {incident}", incident)
