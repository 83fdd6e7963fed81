"""The report of a run as one self-contained HTML file, without network, server or other files.

Text is escaped by Jinja2's autoescape. Numbers are JSON in which `<`, `>` and `&` are escaped. So
no name from a file or model becomes markup. The charts use uPlot, which is part of the file.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from keras_nanguard._recording.database import MEASURED, OVERFLOW, REFUSED
from keras_nanguard._recording.recording import (
    Recording,
    incidents as incidents_of,
    measured,
    thinned,
)
from keras_nanguard._report.cards import Card, cards
from keras_nanguard._report.reported_run import ReportedRun

POINTS = 2000
"""Points of each curve."""

_LISTED = ("rollback", "learning_rate", "firewall", "resume")
_MAX_ACTIONS, _MAX_SAMPLES = 200, 1000

_PAGE = Path(__file__).parent / "page"

_PARTS = {
    "uplot": "uPlot.iife.min.js",
    "uplot_style": "uPlot.min.css",
    "style": "report.css",
    "script": "report.js",
}
"""Files of this package that each page contains, by their names in the templates."""

_ESCAPES = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})


@functools.cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    loader = FileSystemLoader(_PAGE)
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    for name, file in _PARTS.items():
        found.globals[name] = Markup((_PAGE / file).read_text(encoding="utf-8"))
    return found


def rendered(template: str, data: Mapping[str, Any], **values: Any) -> str:
    """Return a page from a template, plain JSON values for its script, and values for its text."""
    from markupsafe import Markup

    text = json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)
    made: str = _environment().get_template(template).render(data=Markup(text), **values)
    return made


def page(run: ReportedRun) -> str:
    """Return the report of one run."""
    run, steps = _placed(run)
    recording = run.recording
    found = cards(run, steps)
    meta = recording.meta
    actions = [event for event in recording.events if event.kind in _LISTED]
    data = {
        "charts": [chart for name in MEASURED if (chart := _chart(recording, name)) is not None],
        "marks": _marks(run, found),
    }
    return rendered(
        "report.html",
        data,
        title=str(meta.get("model") or "run"),
        summary=[] if len(recording) else run.summary.splitlines(),
        facts=_facts(run),
        cards=found,
        healthy=_healthy(run),
        nothing="No step has run yet." if meta else "There are no incidents.",
        charts=data["charts"],
        samples=recording.samples[:_MAX_SAMPLES],
        more_samples=max(len(recording.samples) - _MAX_SAMPLES, 0),
        actions=actions[-_MAX_ACTIONS:],
        earlier_actions=max(len(actions) - _MAX_ACTIONS, 0),
        policy=str(meta.get("policy", "")),
        versions=sorted(
            (str(name), str(version)) for name, version in meta.get("versions", {}).items()
        ),
    )


def _placed(run: ReportedRun) -> tuple[ReportedRun, list[int]]:
    """Return the run, and the step of each incident as the recording counts steps.

    The incidents are those of the recording, unless more are given: a recording drops old ones.
    Those that it lacks count as of the last fit.
    """
    known = incidents_of(run.recording, strict=False)
    if len(known) >= len(run.incidents):
        return replace(run, incidents=[i for i, _ in known]), [step for _, step in known]
    base, steps = run.recording.meta.get("base") or 0, []
    for incident in reversed(run.incidents):
        is_known = known and known[-1][0].moment == incident.moment
        steps.append(known.pop()[1] if is_known else base + incident.step)
    return run, steps[::-1]


def _rollbacks(recording: Recording) -> list[list[Any]]:
    """Return for each rollback its first and last undone step, and its description."""
    found, base = [], 0
    for event in recording.events:
        if event.kind in ("begin", "resume"):
            base = _whole(event.data.get("base"), 0)
        if event.kind == "rollback":
            back = base + _whole(event.data.get("to"), event.step - base)
            found.append([min(max(back, 0), event.step) + 1, event.step + 1, event.text])
    return found


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) else default


def _chart(recording: Recording, name: str) -> dict[str, Any] | None:
    """Return a chart for the script: at most `POINTS` points, each with its extremes.

    Values that a rollback has undone are in a separate curve.
    """
    step, values, undone = measured(recording, name)
    if not len(step) or (name == "loss_scale" and values.min() == values.max() == 1.0):
        return None
    first, last, low, high = step.argmin(), step.argmax(), values.argmin(), values.argmax()
    x, group = thinned(step, POINTS)

    def curve(pick: Any, own: Any) -> Any:
        found = np.full(len(x), np.nan)
        pick.at(found, group[own], values[own])
        return [float(f"{v:.6g}") if math.isfinite(v) else None for v in found.tolist()]

    title = name.replace("_", " ")
    positive = values[low] > 0.0
    decades = math.log10(values[high]) - math.log10(values[low]) if positive else 0.0
    words = (
        f"{title}: from {values[first]:.4g} at step {step[first] + 1} "
        f"to {values[last]:.4g} at step {step[last] + 1}; "
        f"lowest {values[low]:.4g} at step {step[low] + 1}, "
        f"highest {values[high]:.4g} at step {step[high] + 1}."
    )
    return {
        "name": name,
        "title": title,
        "words": words,
        "log": decades > math.log10(50.0),
        "decades": decades,
        "x": (x + 1).tolist(),
        "low": curve(np.fmin, ~undone),
        "high": curve(np.fmax, ~undone),
        **({"undone": curve(np.fmax, undone)} if undone.any() else {}),
    }


def _marks(run: ReportedRun, found: Sequence[Card]) -> dict[str, Any]:
    """Return the marks on the timeline, those of incidents with the number of their card. Steps
    count from 1, as on the console."""
    incidents = sorted(
        (step + 1, number, int(incident.refused))
        for number, card in enumerate(found)
        for step, incident in zip(card.kind.steps, card.kind.incidents)
    )
    known, recording = {step for step, _, _ in incidents}, run.recording
    steps = recording.steps
    refused = (steps["step"][steps["status"] == REFUSED] + 1).tolist()
    overflows = steps["step"][steps["status"] == OVERFLOW] + 1
    rates = [event for event in recording.events if event.kind == "learning_rate"]
    return {
        "incidents": [*zip(*incidents)] or [[], [], []],
        "refused": [step for step in refused if step not in known],
        "overflows": overflows.tolist(),
        "overflow_count": run.totals.overflows,
        "rollbacks": _rollbacks(recording),
        "rates": [[event.step + 1, event.text] for event in rates],
    }


def _facts(run: ReportedRun) -> list[tuple[str, str]]:
    recording, totals, meta = run.recording, run.totals, run.recording.meta
    facts = [
        ("status", str(meta.get("status", "")) if "began" in meta else ""),
        ("steps", f"{totals.steps:,}" if totals.steps else ""),
        ("skipped steps", f"{totals.refused - totals.overflows:,}"),
        ("skipped and run again", f"{totals.run_again:,}" if totals.run_again else ""),
        ("incidents", f"{len(run.incidents):,}"),
        ("rollbacks", str(sum(event.kind == "rollback" for event in recording.events))),
        ("bad rows", str(len(recording.samples))),
        ("float16 overflows", f"{totals.overflows:,}" if totals.overflows else ""),
        ("backend", str(meta.get("backend", ""))),
        *_times(meta),
    ]
    return [(name, value) for name, value in facts if value]


def _healthy(run: ReportedRun) -> str:
    """Return the text for a run without incidents, or `""` before its first step."""
    if run.totals.overflows:
        overflows = "ordinary float16 overflows, which loss scaling handles"
        return f"No incidents. All skipped steps are {overflows}."
    return "No incidents: every step was finite and committed." if len(run.recording) else ""


def _times(meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return start and duration of a run, if they are known."""
    try:
        began, seconds = meta["began"], meta["written"] - meta["began"]
        start = time.strftime("%Y\u2011%m\u2011%d %H:%M", time.localtime(began))
    except (KeyError, ValueError, OverflowError, OSError):
        return []
    size, unit = (1, "s") if seconds < 120 else (60, "min") if seconds < 7200 else (3600, "h")
    return [("start", start), ("duration", f"{seconds / size:.{int(unit == 'h')}f} {unit}")]
