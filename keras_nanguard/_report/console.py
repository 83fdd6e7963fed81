"""Incidents in plain sentences. Pure: takes records, returns text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from keras_nanguard._core.incident import Incident

__all__ = ["Lines", "epoch_line", "incident_line", "kinds", "markdown", "summary"]

SHOWN = 3
"""Incidents of one kind about which nothing is changed that get a line of their own; the others are counted."""


class Lines:
    """Which lines are printed while training runs: each kind of trouble a few times, and then how often it came again.

    An incident about which something was changed always has its line.

    Args:
        every: whether each incident has its line.
    """

    def __init__(self, every: bool = False):
        self.every = every
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._counted: list[Incident] = []

    def line(self, incident: Incident) -> str:
        """Return the line of an incident, `""` where it is only counted.

        The 10th, 100th, ... of a kind has a line again, for a loop that has no epochs in which to count.
        """
        kind = _kind(incident)
        same = (*kind, incident.batch, incident.diagnosis.samples if incident.diagnosis is not None else ())
        self._seen.update((kind, same))
        often = self._seen[kind]
        round_number = often >= 10 and str(often).strip("0") == "1"
        fresh = often <= SHOWN and self._seen[same] == 1
        if fresh or round_number or self.every or incident.changes or incident.decision is None:
            return incident_line(incident) + (f" The {often}th of its kind." if round_number and not self.every else "")
        self._counted.append(incident)
        return ""

    def counted(self) -> str:
        """Return which incidents were only counted since this was last asked, `""` where there were none."""
        groups, self._counted = _groups(self._counted), []
        again = "; ".join(f"{len(group)} x {_why(group[0])}" for group in groups)
        return f"As reported before: {again}." if again else ""


def incident_line(incident: Incident) -> str:
    """Return the one line that is printed for an incident."""
    return f"NanGuard: {incident}"


def epoch_line(epoch: int, refused: int, committed: int, counted: str = "", unmeasured: Sequence[str] = ()) -> str:
    """Return the line at the end of an epoch, `""` where there is nothing to say.

    Args:
        epoch: the epoch.
        refused, committed: how many steps of it were refused, and how many not.
        counted: what `Lines.counted` says.
        unmeasured: names of logs that no step of this fit has measured.
    """
    means = f"the means are over the other {committed}."
    if not committed and unmeasured:
        means = (
            f"there is nothing to take a mean over. In the logs 3.4e+38 (-3.4e+38 for what is to grow) stands for {', '.join(unmeasured)}; "
            f"callbacks that look for the best value pass over it."
        )
    elif not committed:
        means = "the logs are those of the last step that was not."
    told = [f"{refused} of {refused + committed} steps were left out; {means}" if refused else "", counted]
    return f"NanGuard: epoch {epoch + 1}: {' '.join(filter(None, told))}" if any(told) else ""


def summary(incidents: Sequence[Incident], steps: int | None, refused: int, overflows: int) -> str:
    """Return a few lines: how many steps (if known) and left out, how many incidents of which cause, what was done."""
    counted = "" if steps is None else f"{steps} steps, "
    lines = [f"NanGuard: {counted}{refused} left out, {len(incidents)} incidents."]
    if overflows:
        lines.append(f"  {overflows} of those were ordinary float16 overflows, which loss scaling dealt with.")
    causes = Counter(_why(i) for i in incidents if i.diagnosis is not None)
    lines += [f"  {n} x {why}" for why, n in causes.most_common()]
    actions = Counter(o.action for i in incidents for o in i.outcomes if o.status == "done")
    lines += [f"  {n} x {action}" for action, n in actions.most_common()]
    return "\n".join(lines)


def kinds(incidents: Iterable[Incident]) -> list[str]:
    """Return one line for each kind of trouble, the most frequent first: how often, what was done about it, and the first."""
    lines = []
    for group in _groups(incidents):
        done = " and ".join(group[0].changes) or ("left out" if group[0].refused else "reported")
        lines.append(f"{len(group)} x {_why(group[0])}: {done}; the first at {group[0].moment}, {group[0].first}")
    return lines


def _groups(incidents: Iterable[Incident]) -> list[list[Incident]]:
    """Return incidents by their kind, the most frequent first."""
    groups: dict[tuple[Any, ...], list[Incident]] = {}
    for incident in incidents:
        groups.setdefault(_kind(incident), []).append(incident)
    return sorted(groups.values(), key=len, reverse=True)


def _kind(incident: Incident) -> tuple[Any, ...]:
    """Return what two incidents of the same kind have in common."""
    first = incident.first
    place = (first.site, first.kind, first.path) if first is not None else ()
    return (incident.refused, _why(incident), place, incident.changes)


def _why(incident: Incident) -> str:
    """Return cause and place, or what was found where there is no diagnosis."""
    if incident.diagnosis is None:
        return f"{incident.first.kind} {incident.first.site}" if incident.first is not None else "trouble"
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
