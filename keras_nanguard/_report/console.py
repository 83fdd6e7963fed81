"""Incidents as text. Pure functions from records to strings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from keras_nanguard._core.incident import Incident
from keras_nanguard._core.plain_text import markdown_text
from keras_nanguard._policy.actions import ACTIONS
from keras_nanguard._recording.records import BadSample
from keras_nanguard._report.brief import brief_line

__all__ = [
    *("Lines", "closing_line", "incident_line", "kinds", "markdown", "printable"),
    *("summary", "times", "why"),
]

CHANGING = frozenset(name for name, action in ACTIONS.items() if action.changes or action.terminal)
"""Actions that change the run. Every incident with one of them is printed."""


class Lines:
    """Selects the lines to print during training: the first incident of each kind, then the 10th,
    the 100th, ...

    An incident with a change of the model, the optimizer or the training is always printed.

    Args:
        every: whether every incident is printed.
    """

    def __init__(self, every: bool = False):
        self.every = every
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._most_printed = 0

    def line(self, incident: Incident, samples: Sequence[BadSample] = (), details: str = "") -> str:
        """Return the line of an incident, or `""` if it is only counted. See `brief_line`."""
        kind = _kind(incident)
        self._seen[kind] += 1
        count = self._seen[kind]
        round_number = count >= 10 and str(count).strip("0") == "1"
        new = count == 1 or incident.decision is None or not CHANGING.isdisjoint(incident.changes)
        if self.every:
            return incident_line(incident)
        repeats = count if round_number and not new else 0
        if not new and not round_number:
            return ""
        return printable(brief_line(incident, samples, details, repeats))

    def epoch(
        self,
        epoch: int,
        refused: int,
        committed: int,
        unmeasured: Sequence[str] = (),
        committed_before: bool = True,
    ) -> str:
        """Return the line at the end of an epoch, or `""` if it would repeat an earlier one.

        A line is printed for the first epoch with refused steps, for an epoch with at least twice
        as many as the last printed one, and for an epoch without committed steps.

        Args:
            epoch: the epoch.
            refused, committed: numbers of its refused and committed steps.
            unmeasured: names of logs that no committed step of this fit has measured.
            committed_before: whether any step of this fit has committed.
        """
        if not (refused and (refused >= 2 * self._most_printed or not committed or self.every)):
            return ""
        self._most_printed = max(refused, self._most_printed)
        head = f"NanGuard: epoch {epoch + 1}"
        if committed:
            total = refused + committed
            return f"{head} metrics exclude {times(refused, 'skipped step')} of {total}."
        head = f"{head}: all {times(refused, 'step')} skipped"
        if unmeasured:
            return f"{head}; +-3.4e+38 in the logs means not measured, and never counts as best."
        if committed_before:
            return f"{head}; the logs are those of the last good step."
        return f"{head}; the logs have the loss of the last skipped step."


def incident_line(incident: Incident) -> str:
    """Return the full line of an incident."""
    return printable(f"NanGuard: {incident}")


def printable(text: str) -> str:
    """Return a text without control characters, which could control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def times(count: int, word: str) -> str:
    """Return a count with its word: `1 step`, `2 steps`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def closing_line(steps: int, refused: int, run_again: int, incidents: int, details: str) -> str:
    """Return the line at the end of a run with incidents."""
    counted = f"skipped {refused} of {steps} steps" if refused else times(steps, "step")
    found = f"{counted}{_replayed(run_again)}, {times(incidents, 'incident')}"
    return f"NanGuard: {found}. Details: {details}"


def summary(
    incidents: Sequence[Incident],
    steps: int | None,
    refused: int,
    overflows: int,
    run_again: int = 0,
) -> str:
    """Return the numbers of steps (if known), skipped steps, incidents by cause, and actions.

    The action `warn`, which changes nothing, is not counted.
    """
    counted = "" if steps is None else f"{steps} steps, "
    found = times(len(incidents), "incident")
    lines = [f"NanGuard: {counted}{refused} skipped{_replayed(run_again)}, {found}."]
    if overflows:
        ordinary = "of those were ordinary float16 overflows, which loss scaling handled."
        lines.append(f"  {overflows} {ordinary}")
    causes = Counter(why(i) for i in incidents if i.diagnosis is not None)
    lines += [f"  {n} x {why}" for why, n in causes.most_common()]
    done = (o.action for i in incidents for o in i.outcomes if o.status == "done")
    actions = Counter(action for action in done if action != "warn")
    lines += [f"  {n} x {action}" for action, n in actions.most_common()]
    return printable("\n".join(lines))


def _replayed(run_again: int) -> str:
    return f", {times(run_again, 'step')} replayed after a rollback" if run_again else ""


def kinds(incidents: Iterable[Incident]) -> list[list[Incident]]:
    """Return incidents by cause and place, the most frequent first."""
    groups: dict[tuple[Any, ...], list[Incident]] = {}
    for incident in incidents:
        groups.setdefault(_kind(incident)[:2], []).append(incident)
    return sorted(groups.values(), key=len, reverse=True)


def _kind(incident: Incident) -> tuple[Any, ...]:
    """Return the key that incidents of the same kind share."""
    return (incident.refused, why(incident), incident.changes)


def why(incident: Incident) -> str:
    """Return cause and place, or the first finding if there is no diagnosis."""
    if incident.diagnosis is not None:
        return incident.diagnosis.place
    first = incident.first
    if first is None:
        return "incident"
    return " ".join(filter(None, (first.kind, first.site, first.path and f"of {first.path!r}")))


def markdown(incidents: Iterable[Incident], head: str) -> str:
    """Return all incidents as a Markdown text. No name in it becomes HTML or a link."""
    parts = ["# NanGuard report", "", "```", head.replace("```", "'''"), "```", ""]
    for incident in incidents:
        moment = incident.moment
        parts += [f"## {moment[0].upper()}{moment[1:]}", ""]
        parts += [f"- {markdown_text(finding)}" for finding in incident.findings]
        diagnosis = incident.diagnosis
        if diagnosis is not None:
            parts += ["", markdown_text(diagnosis.headline), ""]
            parts += [f"- seen: {markdown_text(text)}" for text in diagnosis.evidence]
            parts += [f"- do: {markdown_text(text)}" for text in diagnosis.advice]
        outcomes = (str(o) for o in incident.outcomes if str(o) != "warn")
        parts += ["", *(f"- {markdown_text(outcome)}" for outcome in outcomes), ""]
    return "\n".join(parts)
