"""Incidents as text: the printed line, of at most 120 characters, the most important part first;
the line of an epoch; the summary.

Cause code, findings and outcomes are in `str(incident)`, which `verbose=2` prints, and in the
report. The texts for each cause are in `_core/causes.toml`. Pure functions from records to strings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from keras_nanguard._core.incident import (
    Diagnosis,
    Finding,
    Incident,
    Outcome,
    between_steps,
    blames_rate,
    moment_of,
    needs_user,
    restored_at_end,
)
from keras_nanguard._core.literals import CAUSE_WORDS
from keras_nanguard._core.plain_values import printable as printable, times
from keras_nanguard._policy.actions import ACTIONS
from keras_nanguard._recording.recording import BadSample, Totals

WIDTH = 120
"""Maximum number of characters of a line."""

MAX_PLACE = 44
"""Maximum number of characters of a path in it."""

ENDS = {
    **{name: "stopped" for name, action in ACTIONS.items() if action.terminal},
    "rollback": "rolled back",
}
"""The word for a step in which an action was done, the most important one first."""

CHANGES = {
    "lower_lr": "{detail}",
    "fix_loss_scale": "loss scale reset",
    "clip": "gradients clipped",
    "repair": "values repaired",
    "reset_batchnorm": "BatchNormalization reset",
    "recalibrate_batchnorm": "BatchNormalization recalibrated",
    "reset_slots": "optimizer state reset",
    "call": "function called",
    "warn": "{detail}",
}
"""The change of an action in words, or its detail."""

NOT_DONE = {"rollback": "no rollback"}
"""The words for an action that was not done."""


def brief_line(
    incident: Incident, samples: Sequence[BadSample], details: str, repeats: int = 0
) -> str:
    """Return the line of an incident.

    Args:
        details: how to see all details; omitted if the line would become too long.
        repeats: a number that the line mentions if it is not 0.
    """
    diagnosis, changes = incident.diagnosis, _changes(incident)
    text = f"NanGuard: {_head(incident)}: {_reason(incident, samples)}{changes}."
    advice = ""
    if diagnosis is not None:
        words = CAUSE_WORDS[diagnosis.cause].get("brief", "")
        advice = words.format(data=_quoted(diagnosis.culprit_shown))
        if diagnosis.cause == "input_scale" and diagnosis.samples:  # not all of the data
            advice = "Check it." if len(diagnosis.samples) == 1 else "Check them."
        if needs_user(incident) and diagnosis.advice:
            advice = diagnosis.advice[0]
    nth = f"{repeats}th incident of this kind." if repeats else ""
    for more in (nth, advice, details and f"Details: {details}"):
        if more and len(text) + 1 + len(more) <= WIDTH:
            text = f"{text} {more}"
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 4]} ..."


def shortened(place: str, width: int = MAX_PLACE) -> str:
    """Return a path that fits into the width, without its beginning if necessary:
    `.../dense/kernel`."""
    if len(place) <= width:
        return place
    end = place[-(width - 4) :]
    return f".../{end.partition('/')[2] or end}"


def _head(incident: Incident) -> str:
    """Return the action and the step: `skipped step 30 (epoch 1)`."""
    moment = moment_of(incident)
    for word in (ENDS[action] for action in ENDS if action in incident.changes):
        return f"{word} {moment}" if between_steps(incident) else f"{word} at {moment}"
    if incident.refused and incident.decision is None:
        return f"error in {moment}"
    return f"skipped {moment}" if incident.refused else moment


def _reason(incident: Incident, samples: Sequence[BadSample]) -> str:
    diagnosis, first, pole = incident.diagnosis, incident.first, incident.pole
    if blames_rate(diagnosis) or pole is not None:
        at = "" if pole is None else f" at iteration {pole:.0f}"
        rate = incident.values.get("learning_rate")  # a custom function is not read
        return f"the learning rate was {'out of range' if rate is None else f'{rate:.3g}'}{at}"
    pattern = CAUSE_WORDS[diagnosis.cause].get("reason") if diagnosis is not None else None
    if diagnosis is None or pattern is None:
        return _finding(first) if first is not None else "incident"
    words = {
        "bad": next(filter(None, map(_numbers, incident.findings)), "NaN or Inf"),
        "rows": _rows(diagnosis, samples),
        "place": _quoted(diagnosis.culprit) if diagnosis.culprit else "the model",
    }
    return str(pattern.format(**words))


def _finding(finding: Finding) -> str:
    """Return a finding in words, with its path shortened: `NaN in gradients of dense/kernel`."""
    path = shortened(finding.path)
    if (bad := _numbers(finding)) and finding.kind == "nonfinite":
        of = " " if finding.site in ("inputs", "targets") else " of "
        return f"{bad} in {finding.site}{of if path else ''}{path}"
    text = str(finding)
    return text.replace(finding.path, path) if path else text


def _numbers(finding: Finding) -> str:
    """Return the bad numbers in a finding: `NaN`, `Inf`, both, or `1e+36`; `""` if unknown."""
    kinds = [name for count, name in ((finding.nan, "NaN"), (finding.inf, "Inf")) if count]
    if not kinds and finding.kind == "nonfinite" and finding.value is not None:
        kinds = ["NaN" if finding.value != finding.value else "Inf"]
    if finding.kind == "out_of_range" and finding.value is not None:
        kinds = [f"{finding.value:.3g}"]
    return " and ".join(kinds)


def _rows(diagnosis: Diagnosis, samples: Sequence[BadSample]) -> str:
    """Return the bad rows: by their index in the data if it is known, else within the batch."""
    data = diagnosis.culprit_shown or "the data"
    if samples and diagnosis.samples:
        first, others = samples[0], len(samples) - 1
        known = first.index is not None and first.label == f"x[{first.index}]"
        name = f"{shortened(data)}[{first.index}]" if known else f"{_quoted(data)} of {first.label}"
    elif diagnosis.samples:
        name = f"{_quoted(data)}, row {diagnosis.samples[0]} of the batch"
        others = len(diagnosis.samples) - 1
    else:
        return _quoted(data)
    return f"{name} and {others} more row{'s' if others > 1 else ''}" if others else name


def _changes(incident: Incident) -> str:
    """Return other changes, a rollback that failed, the user's own warning, and the last state."""
    found = map(_change, incident.outcomes)
    return "".join(f"; {text}" for text in dict.fromkeys(found) if text)


def _change(outcome: Outcome) -> str:
    """Return what an action has changed in words, `""` if the line has other words for it."""
    if outcome.status != "done":
        return NOT_DONE.get(outcome.action, "")
    if ENDS.get(outcome.action) == "stopped":
        return restored_at_end(outcome)
    return CHANGES.get(outcome.action, "").format(detail=outcome.detail)


def _quoted(place: str) -> str:
    return repr(shortened(place))


CHANGING = frozenset(name for name, action in ACTIONS.items() if action.changes or action.terminal)
"""Actions that change the run. Every incident with one of them is printed."""


def epoch_line(
    epoch: int, refused: int, committed: int, unmeasured: bool, committed_before: bool
) -> str:
    """Return the line at the end of an epoch with refused steps.

    Args:
        refused, committed: numbers of its refused and committed steps.
        unmeasured: whether no committed step of this fit has measured some of the logs.
        committed_before: whether any step of this fit has committed.
    """
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


def closing_line(totals: Totals, incidents: int, details: str, rate_factor: float) -> str:
    """Return the line at the end of a run with incidents.

    Args:
        rate_factor: the learning rate as a multiple of the configured one.
    """
    steps, refused = totals.steps or 0, totals.refused
    counted = f"skipped {refused} of {steps} steps" if refused else times(steps, "step")
    found = f"{counted}{totals.replayed}, {times(incidents, 'incident')}"
    lowered = f" The learning rate ended at {rate_factor:.3g} times the configured rate."
    rate = "" if rate_factor == 1.0 else lowered
    return f"NanGuard: {found}.{rate} Details: {details}"


def summary(incidents: Sequence[Incident], totals: Totals) -> str:
    """Return the numbers of steps (if known), skipped steps, incidents by cause, and actions."""
    counted = "" if totals.steps is None else f"{totals.steps} steps, "
    found = times(len(incidents), "incident")
    lines = [f"NanGuard: {counted}{totals.refused} skipped{totals.replayed}, {found}."]
    if totals.overflows:
        ordinary = "of those were ordinary float16 overflows, which loss scaling handled."
        lines.append(f"  {totals.overflows} {ordinary}")
    causes = Counter(why(i) for i in incidents if i.diagnosis is not None)
    lines += [f"  {n} x {why}" for why, n in causes.most_common()]
    actions = Counter(o.action for i in incidents for o in i.outcomes if o.status == "done")
    lines += [f"  {n} x {action}" for action, n in actions.most_common()]
    return printable("\n".join(lines))


class IncidentKind(NamedTuple):
    """The incidents with the same cause and place, and the step of each."""

    incidents: list[Incident]
    steps: list[int]

    def __str__(self) -> str:
        return why(self.incidents[0])

    @property
    def first(self) -> Incident:
        """The first of them."""
        return self.incidents[0]

    @property
    def outcomes(self) -> Counter[Outcome]:
        """How often each outcome occurred."""
        return Counter(outcome for incident in self.incidents for outcome in incident.outcomes)


def kinds(incidents: Sequence[Incident], steps: Sequence[int] = ()) -> list[IncidentKind]:
    """Return incidents by cause and place, the most frequent first.

    Args:
        steps: the step of each; by default as it counts them itself.
    """
    groups: dict[tuple[Any, ...], IncidentKind] = {}
    for incident, step in zip(incidents, steps or [incident.step for incident in incidents]):
        kind = groups.setdefault(kind_of(incident), IncidentKind([], []))
        kind.incidents.append(incident)
        kind.steps.append(step)
    return sorted(groups.values(), key=lambda kind: len(kind.steps), reverse=True)


def kind_of(incident: Incident) -> tuple[Any, ...]:
    """Return the key that incidents of the same kind share."""
    return (incident.refused, why(incident))


def why(incident: Incident) -> str:
    """Return cause and place, or the first finding if there is no diagnosis."""
    if incident.diagnosis is not None:
        return incident.diagnosis.place
    first = incident.first
    if first is None:
        return "incident"
    return " ".join(filter(None, (first.kind, first.site, first.path and f"of {first.path!r}")))
