"""Incidents as text. Pure functions from records to strings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from keras_nanguard._core.incident import Incident

__all__ = ["Lines", "epoch_line", "incident_line", "kinds", "markdown", "summary"]

MAX_PRINTED = 3
"""Number of incidents of a kind that are printed, if nothing is changed about them; further ones are counted."""


class Lines:
    """Selects the lines that are printed during training: a few incidents of each kind, then only how often it recurred.

    An incident with an action that changes something is always printed.

    Args:
        every: whether every incident is printed.
    """

    def __init__(self, every: bool = False):
        self.every = every
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._counted: list[Incident] = []

    def line(self, incident: Incident) -> str:
        """Return the line of an incident, `""` if it is only counted.

        The 10th, 100th, ... of a kind is printed again, for loops without epochs.
        """
        kind = _kind(incident)
        same = (*kind, incident.batch, incident.diagnosis.samples if incident.diagnosis is not None else ())
        self._seen.update((kind, same))
        count = self._seen[kind]
        round_number = count >= 10 and str(count).strip("0") == "1"
        new = count <= MAX_PRINTED and self._seen[same] == 1
        if new or round_number or self.every or incident.changes or incident.decision is None:
            return incident_line(incident) + (f" The {count}th of its kind." if round_number and not self.every else "")
        self._counted.append(incident)
        return ""

    def counted(self) -> str:
        """Return which incidents were only counted since the last call, `""` if there were none."""
        groups, self._counted = _groups(self._counted), []
        recurred = "; ".join(f"{len(group)} x {_why(group[0])}" for group in groups)
        return f"As reported before: {recurred}." if recurred else ""


def incident_line(incident: Incident) -> str:
    """Return the one line that is printed for an incident."""
    return f"NanGuard: {incident}"


def epoch_line(epoch: int, refused: int, committed: int, counted: str = "", unmeasured: Sequence[str] = ()) -> str:
    """Return the line at the end of an epoch, `""` if there is nothing to report.

    Args:
        epoch: the epoch.
        refused, committed: numbers of its steps that were refused and committed.
        counted: the text of `Lines.counted`.
        unmeasured: names of logs that no committed step of this fit has measured.
    """
    means = f"the means are over the other {committed}."
    if not committed and unmeasured:
        means = (
            "there is nothing to take a mean over. In the logs 3.4e+38 (-3.4e+38 for metrics that should grow) stands for "
            f"{', '.join(unmeasured)}; callbacks that search for the best value ignore it."
        )
    elif not committed:
        means = "the logs are those of the last step that was not."
    parts = [f"{refused} of {refused + committed} steps were refused; {means}" if refused else "", counted]
    return f"NanGuard: epoch {epoch + 1}: {' '.join(filter(None, parts))}" if any(parts) else ""


def summary(incidents: Sequence[Incident], steps: int | None, refused: int, overflows: int) -> str:
    """Return a few lines: numbers of steps (if known) and refused steps, of incidents by cause, and of actions."""
    counted = "" if steps is None else f"{steps} steps, "
    lines = [f"NanGuard: {counted}{refused} refused, {len(incidents)} incidents."]
    if overflows:
        lines.append(f"  {overflows} of those were ordinary float16 overflows, which loss scaling handled.")
    causes = Counter(_why(i) for i in incidents if i.diagnosis is not None)
    lines += [f"  {n} x {why}" for why, n in causes.most_common()]
    actions = Counter(o.action for i in incidents for o in i.outcomes if o.status == "done")
    lines += [f"  {n} x {action}" for action, n in actions.most_common()]
    return "\n".join(lines)


def kinds(incidents: Iterable[Incident]) -> list[str]:
    """Return one line per kind of incident, the most frequent first: how often, what was done, and the first one."""
    lines = []
    for group in _groups(incidents):
        done = " and ".join(group[0].changes) or ("refused" if group[0].refused else "reported")
        lines.append(f"{len(group)} x {_why(group[0])}: {done}; the first at {group[0].moment}, {group[0].first}")
    return lines


def _groups(incidents: Iterable[Incident]) -> list[list[Incident]]:
    """Return incidents by their kind, the most frequent first."""
    groups: dict[tuple[Any, ...], list[Incident]] = {}
    for incident in incidents:
        groups.setdefault(_kind(incident), []).append(incident)
    return sorted(groups.values(), key=len, reverse=True)


def _kind(incident: Incident) -> tuple[Any, ...]:
    """Return the key that incidents of the same kind share."""
    first = incident.first
    place = (first.site, first.kind, first.path) if first is not None else ()
    return (incident.refused, _why(incident), place, incident.changes)


def _why(incident: Incident) -> str:
    """Return cause and place, or the first finding if there is no diagnosis."""
    if incident.diagnosis is None:
        return f"{incident.first.kind} {incident.first.site}" if incident.first is not None else "incident"
    return incident.diagnosis.place


def markdown(incidents: Iterable[Incident], head: str) -> str:
    """Return all incidents as a Markdown text."""
    parts = ["# NanGuard report", "", "```", head, "```", ""]
    for incident in incidents:
        moment = incident.moment
        parts += [f"## {moment[0].upper()}{moment[1:]}", "", *(f"- {finding}" for finding in incident.findings)]
        diagnosis = incident.diagnosis
        if diagnosis is not None:
            parts += ["", diagnosis.headline, ""]
            parts += [f"- seen: {text}" for text in diagnosis.evidence]
            parts += [f"- do: {text}" for text in diagnosis.advice]
        parts += ["", *(f"- {o.action}, {o.status}: {o.detail}" for o in incident.outcomes), ""]
    return "\n".join(parts)
