"""The printed line of an incident: at most 120 characters, the most important part first.

Cause code, findings and outcomes are in `str(incident)`, which `verbose=2` prints, and in the
report. Pure functions from records to strings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from keras_nanguard._core.incident import Diagnosis, Finding, Incident
from keras_nanguard._recording.records import BadSample
from keras_nanguard._report.snippets import ADVICE, REASONS

__all__ = ["WIDTH", "brief_line", "shortened"]

WIDTH = 120
"""Maximum number of characters of a line."""

MAX_PLACE = 44
"""Maximum number of characters of a path in it."""

_RATE_OF = re.compile("learning rate of [^:]*: ")

CHANGES = {
    "fix_loss_scale": "loss scale reset",
    "clip": "gradients clipped",
    "repair": "values repaired",
    "reset_batchnorm": "BatchNormalization reset",
    "recalibrate_batchnorm": "BatchNormalization recalibrated",
    "reset_slots": "optimizer state reset",
    "quarantine": "batch saved",
    "call": "function called",
}
"""The change of an action in words."""


def brief_line(
    incident: Incident, samples: Sequence[BadSample] = (), details: str = "", repeats: int = 0
) -> str:
    """Return the line of an incident.

    Args:
        incident: the incident.
        samples: the bad rows of its step.
        details: how to see all details; omitted if the line would become too long.
        repeats: number of incidents of this kind, if the line mentions it; else 0.
    """
    diagnosis = incident.diagnosis
    text = f"NanGuard: {_head(incident)}: {_reason(incident, samples)}{_changes(incident)}."
    advice = ""
    if diagnosis is not None:
        advice = ADVICE.get(diagnosis.cause, "").format(data=_quoted(diagnosis.culprit_shown))
        if diagnosis.cause == "input_scale" and diagnosis.samples:  # not all of the data
            advice = "Check it." if len(diagnosis.samples) == 1 else "Check them."
        if _needs_user(incident) and diagnosis.advice:
            advice = diagnosis.advice[0]
    nth = f"{repeats}th incident of this kind." if repeats else ""
    for more in (nth, advice, details and f"Details: {details}"):
        if more and len(text) + 1 + len(more) <= WIDTH:
            text = f"{text} {more}"
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 4]} ..."


def shortened(place: str, width: int = MAX_PLACE) -> str:
    """Return a path that fits into the width, without its beginning if necessary:
    `.../dense/kernel`.
    """
    if len(place) <= width:
        return place
    end = place[-(width - 4) :]
    return f".../{end.partition('/')[2] or end}"


def _needs_user(incident: Incident) -> bool:
    """Whether training ends, or a result of `evaluate` or `predict` is bad."""
    terminal = incident.decision is not None and incident.decision.terminal
    return terminal or bool({"validation", "predictions"} & set(incident.sites))


def _head(incident: Incident) -> str:
    """Return the action and the step: `skipped step 30 (epoch 1)`."""
    done = {outcome.action for outcome in incident.outcomes if outcome.status == "done"}
    moment = incident.moment.replace(f", batch {incident.batch + 1}", "")
    if done & {"stop", "raise_error"}:
        return f"stopped at {moment}" if moment.startswith("step") else f"stopped {moment}"
    if "rollback" in done:
        return f"rolled back at {moment}"
    return f"skipped {moment}" if incident.refused else moment


def _reason(incident: Incident, samples: Sequence[BadSample]) -> str:
    diagnosis, first, values = incident.diagnosis, incident.first, incident.values
    blamed = diagnosis is not None and diagnosis.culprit.endswith("/learning_rate")
    if blamed or "pole" in values:
        at = f" at iteration {values['pole']:.0f}" if "pole" in values else ""
        return f"the learning rate was {values.get('learning_rate', math.nan):.3g}{at}"
    pattern = REASONS.get(diagnosis.cause) if diagnosis is not None else None
    if diagnosis is None or pattern is None:
        return _finding(first) if first is not None else "incident"
    words = {
        "bad": _bad(incident),
        "rows": _rows(diagnosis, samples),
        "place": _quoted(diagnosis.culprit) if diagnosis.culprit else "the model",
    }
    return pattern.format(**words)


def _finding(finding: Finding) -> str:
    """Return a finding in words, with its path shortened: `NaN in gradients of dense/kernel`."""
    path = shortened(finding.path)
    if (bad := _numbers(finding)) and finding.kind == "nonfinite":
        of = " " if finding.site in ("inputs", "targets") else " of "
        return f"{bad} in {finding.site}{of if path else ''}{path}"
    text = str(finding)
    return text.replace(finding.path, path) if path else text


def _bad(incident: Incident) -> str:
    """Return the bad numbers in the first finding that has any: `NaN`, `Inf`, both, or `1e+36`."""
    return next(filter(None, map(_numbers, incident.findings)), "NaN or Inf")


def _numbers(finding: Finding) -> str:
    """Return the bad numbers in a finding, or `""` if unknown."""
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
    """Return other changes, a rollback that failed, and the user's own warning."""
    found = []
    for outcome in incident.outcomes:
        if outcome.status != "done":
            found += ["no rollback"] if outcome.action == "rollback" else []
        elif outcome.action == "lower_lr":
            found.append(_RATE_OF.sub("learning rate ", outcome.detail.partition(";")[0]))
        elif outcome.action == "warn" and outcome.detail:
            found.append(outcome.detail)
        elif outcome.action in CHANGES:
            found.append(CHANGES[outcome.action])
    return "".join(f"; {text}" for text in dict.fromkeys(found))


def _quoted(place: str) -> str:
    return repr(shortened(place))
