"""Incidents in plain sentences. Pure: takes records, returns text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from keras_nanguard._incident import Finding, Incident

__all__ = ["epoch_line", "finding_words", "incident_line", "markdown", "summary"]


def finding_words(finding: Finding) -> str:
    """Return one finding in words: `gradients of dense/kernel: 96 of 96 NaN`."""
    where = f"{finding.site} of {finding.path}" if finding.path else finding.site
    counts = [f"{count} {name}" for count, name in ((finding.nan, "NaN"), (finding.inf, "Inf")) if count]
    if counts and finding.size and finding.size > 1:
        return f"{where}: {' and '.join(counts)} of {finding.size}"
    if counts:
        return f"{where}: {counts[0].split()[1]}"
    value = "" if finding.value is None else f" ({finding.value:.4g})"
    return f"{where}: {finding.kind}{value}"


def incident_line(incident: Incident) -> str:
    """Return the one line that is printed for an incident."""
    first = incident.first
    more = len(incident.findings) - 1
    what = finding_words(first) if first is not None else "trouble"
    also = f" (+{more} more)" if more > 0 else ""
    state = "refused" if incident.refused else "seen"
    where = f"step {incident.step} (epoch {incident.epoch + 1}, batch {incident.batch}{_replicas(incident)})"
    parts = [f"NanGuard: {where} {state}: {what}{also}."]
    if incident.diagnosis is not None:
        parts.append(_cause(incident))
    done = [f"{o.action}: {o.detail}" if o.detail else o.action for o in incident.outcomes if o.status == "done"]
    skipped = [f"{o.action} not done: {o.detail}" for o in incident.outcomes if o.status == "skipped"]
    parts += [f"-> {text}." for text in (*done, *skipped) if text != "warn"]
    return " ".join(parts)


def _replicas(incident: Incident) -> str:
    numbers = ", ".join(str(number) for number in incident.replicas)
    return f", replica{'s' if len(incident.replicas) > 1 else ''} {numbers}" if numbers else ""


def _cause(incident: Incident) -> str:
    diagnosis = incident.diagnosis
    assert diagnosis is not None
    words = f"Cause: {diagnosis.cause}"
    words += f" in {diagnosis.culprit!r}" if diagnosis.culprit else ""
    if diagnosis.samples:
        shown = ", ".join(str(s) for s in diagnosis.samples[:5])
        words += f", rows {shown}{', ...' if len(diagnosis.samples) > 5 else ''} of the batch"
    ends = incident.decision is not None and incident.decision.terminal
    advice = f" {' '.join(diagnosis.advice)}" if ends and diagnosis.advice else ""
    return f"{words}.{advice}"


def epoch_line(epoch: int, refused: int, steps: int) -> str:
    """Return the line at the end of an epoch in which steps were left out."""
    left = steps - refused
    means = f"the means are over the other {left}" if left else "there is no step to take the means over"
    return f"NanGuard: epoch {epoch + 1}: {refused} of {steps} steps were left out; {means}."


def summary(incidents: Sequence[Incident], steps: int | None, refused: int, overflows: int) -> str:
    """Return a few lines: how many steps (if known) and left out, how many incidents of which cause, what was done."""
    counted = "" if steps is None else f"{steps} steps, "
    lines = [f"NanGuard: {counted}{refused} left out, {len(incidents)} incidents."]
    if overflows:
        lines.append(f"  {overflows} of those were ordinary float16 overflows, which loss scaling dealt with.")
    causes = Counter((i.diagnosis.cause, i.diagnosis.culprit) for i in incidents if i.diagnosis is not None)
    lines += [f"  {n} x {cause}{f' in {culprit!r}' if culprit else ''}" for (cause, culprit), n in causes.most_common()]
    actions = Counter(o.action for i in incidents for o in i.outcomes if o.status == "done")
    lines += [f"  {n} x {action}" for action, n in actions.most_common()]
    return "\n".join(lines)


def markdown(incidents: Iterable[Incident], head: str) -> str:
    """Return all incidents as a Markdown text."""
    parts = ["# NanGuard report", "", "```", head, "```", ""]
    for incident in incidents:
        parts += [f"## Step {incident.step} (epoch {incident.epoch + 1}, batch {incident.batch}{_replicas(incident)})", ""]
        parts += [f"- {finding_words(finding)}" for finding in incident.findings]
        diagnosis = incident.diagnosis
        if diagnosis is not None:
            parts += ["", _cause(incident), ""]
            parts += [f"- seen: {text}" for text in diagnosis.evidence]
            parts += [f"- do: {text}" for text in diagnosis.advice]
        parts += ["", *(f"- {o.action}, {o.status}: {o.detail}" for o in incident.outcomes), ""]
    return "\n".join(parts)
