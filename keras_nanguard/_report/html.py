"""The report of a run as one self-contained HTML file, without network, server or other files.

Text is escaped by Jinja2's autoescape. Numbers are JSON in which `<`, `>` and `&` are escaped. So
no name from a file or model becomes markup. The charts use uPlot, which is part of the file.
"""

from __future__ import annotations

import functools
import json
import math
import os
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from keras_nanguard._core.incident import Incident
from keras_nanguard._recording.recording import Recording
from keras_nanguard._recording.records import MEASURED, OVERFLOW, REFUSED
from keras_nanguard._report import recorded_incidents
from keras_nanguard._report.cards import cards

__all__ = ["page", "rendered"]

POINTS = 2000
"""Points of each curve."""

_TITLES = {"loss": "loss", "gradient_norm": "gradient norm", "learning_rate": "learning rate", "loss_scale": "loss scale"}
_LISTED = ("rollback", "learning_rate", "firewall", "resume")
_MEASURES = ("update_ratio", "weight_norm", "gradient_norm")
_MOMENT = ("step", "epoch", "batch")
_MAX_LAYERS, _LAYER_POINTS, _MAX_SAMPLES = 400, 240, 1000


@functools.cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(loader=FileSystemLoader(Path(__file__).parent / "page"), autoescape=True, undefined=StrictUndefined)


@functools.cache
def _part(name: str) -> str:
    return (Path(__file__).parent / "page" / name).read_text(encoding="utf-8")


def rendered(template: str, data: Mapping[str, Any], **values: Any) -> str:
    """Return a page.

    Args:
        template: name of the template.
        data: plain JSON values for its script.
        **values: values for the template.
    """
    from markupsafe import Markup

    escapes = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character, escape in escapes.items():
        text = text.replace(character, escape)
    parts = {"uplot": "uPlot.iife.min.js", "uplot_style": "uPlot.min.css", "style": "report.css", "script": "report.js"}
    own = {name: Markup(_part(file)) for name, file in parts.items()}  # ours, and nothing of a run
    page: str = _environment().get_template(template).render(data=Markup(text), **own, **values)
    return page


def page(recording: Recording, incidents: Sequence[Incident], summary: str, directory: str | os.PathLike[str] | None = None) -> str:
    """Return the report of one run.

    Args:
        recording: its recording, which may be empty.
        incidents: its incidents, of one fit or more.
        summary: a summary, for a page without a recording.
        directory: its directory, if it has one, for the bad rows and tables of layers in its
            bundles.
    """
    incidents, steps = _placed(recording, incidents)
    found, numbers = cards(incidents, Path(directory) if directory is not None else None, recording.samples, recording.layers, steps)
    layers, layer_rows = _layers(recording)
    meta, versions = recording.meta, recording.meta.get("versions")
    data = {
        "charts": [chart for name in MEASURED if (chart := _chart(recording, name)) is not None],
        "marks": _marks(recording, incidents, numbers, steps),
        "layers": layers,
    }
    return rendered(
        "report.html",
        data,
        title=str(meta.get("model") or "run"),
        summary=[] if len(recording) else summary.splitlines(),
        facts=_facts(recording, incidents),
        cards=found,
        healthy=_healthy(recording),
        nothing="No step has run yet." if meta else "There are no incidents.",
        charts=data["charts"],
        layer_rows=layer_rows,
        measures=[name for name in _MEASURES if any(name in row for row in layers["rows"])],
        more_layers=max(len(recording.layers) - _MAX_LAYERS, 0),
        samples=recording.samples[:_MAX_SAMPLES],
        more_samples=max(len(recording.samples) - _MAX_SAMPLES, 0),
        events=[(e.step + 1, e.kind, e.text) for e in recording.events if e.kind in _LISTED][:200],
        policy=str(meta.get("policy", "")),
        versions=sorted((str(k), str(v)) for k, v in versions.items()) if isinstance(versions, Mapping) else [],
    )


def _placed(recording: Recording, incidents: Sequence[Incident]) -> tuple[Sequence[Incident], list[int]]:
    """Return all incidents of a recording, or the given ones if they are more, each with its step
    in the recording.

    The log of a run may be ahead of its recording. Incidents that are not in the recording belong
    to the present fit.
    """
    known = [event for event in recording.events if event.kind == "incident"]
    if len(known) > len(incidents):
        found = recorded_incidents.incidents(recording, strict=False)
        return [incident for incident, _ in found], [step for _, step in found]
    at: dict[str, deque[int]] = {}
    for event in known:
        at.setdefault(repr([event.data.get(name) for name in _MOMENT]), deque()).append(event.step)
    base, steps = _whole(recording.meta.get("base"), 0), []
    for incident in incidents:
        same = at.get(repr([getattr(incident, name) for name in _MOMENT]))
        steps.append(same.popleft() if same else base + incident.step)
    return incidents, steps


def _rollbacks(recording: Recording) -> list[list[Any]]:
    """Return for each rollback its first and last undone step, and its description."""
    found, base = [], 0
    for event in recording.events:
        data = dict(event.data)
        if event.kind in ("begin", "resume"):
            base = _whole(data.get("base"), 0)
        if event.kind == "rollback":
            back = base + _whole(data.get("to"), event.step - base)
            found.append([min(max(back, 0), event.step) + 1, event.step + 1, event.text])
    return found


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) else default


def _chart(recording: Recording, name: str) -> dict[str, Any] | None:
    recording = _without_what_ran_again(recording)
    step, low, high = recording.series(name, POINTS)
    if not len(step) or (name == "loss_scale" and float(high.max()) == float(low.min()) == 1.0):
        return None
    positive = float(low.min()) > 0.0
    decades = math.log10(float(high.max())) - math.log10(float(low.min())) if positive else 0.0
    words = (
        f"{_TITLES[name]}: from {high[0]:.4g} at step {step[0] + 1} to {low[-1]:.4g} at step {step[-1] + 1}; "
        f"lowest {low.min():.4g} at step {step[low.argmin()] + 1}, highest {high.max():.4g} at step {step[high.argmax()] + 1}."
    )
    return {
        "name": name,
        "title": _TITLES[name],
        "words": words,
        "log": decades > math.log10(50.0),
        "decades": decades,
        **_courses(recording, name, step),
    }


def _without_what_ran_again(recording: Recording) -> Recording:
    """Return a recording without the refused steps that a rollback has undone."""
    steps = recording.steps
    later = np.minimum.accumulate(np.r_[steps["step"], np.iinfo(np.int64).max][:0:-1])[::-1]
    keep = steps["undone"] | (later > steps["step"])
    return replace(recording, steps={key: column[keep] for key, column in steps.items()})


def _courses(recording: Recording, name: str, at: Any) -> dict[str, Any]:
    """Return the smallest and the largest value near some steps, and separately the largest undone
    one.
    """
    steps = recording.steps
    parts = [{key: column[mask] for key, column in steps.items()} for mask in (~steps["undone"], steps["undone"])]
    kept, undone = replace(recording, steps=parts[0]).series(name, POINTS), Recording(steps=parts[1]).series(name, POINTS)

    def placed(step: Any, values: Any, pick: Any) -> Any:
        """Return values at the last of `at` before their steps, or NaN."""
        found = np.full(len(at), np.nan)
        pick.at(found, np.searchsorted(at, step, side="right") - 1, values)
        return found

    low, high = placed(kept[0], kept[1], np.fmin), placed(kept[0], kept[2], np.fmax)
    values = {"x": (at + 1).tolist(), "low": _short(low), "high": _short(high)}
    return values | ({"undone": _short(placed(undone[0], undone[2], np.fmax))} if len(undone[0]) else {})


def _short(values: Any) -> list[float | None]:
    return [float(f"{v:.6g}") if math.isfinite(v) else None for v in np.asarray(values, np.float64).tolist()]


def _marks(recording: Recording, incidents: Sequence[Incident], numbers: Sequence[int], at: Sequence[int]) -> dict[str, Any]:
    """Return the marks on the timeline. Steps count from 1, as on the console."""
    steps, bins = recording.steps, recording.bins
    thinned = bins["overflows"] > 0
    overflows = ((bins["first"] + bins["last"])[thinned] // 2 + 1).tolist() + (steps["step"][steps["status"] == OVERFLOW] + 1).tolist()
    known = set(at)
    refused = [s + 1 for s in steps["step"][steps["status"] == REFUSED].tolist() if s not in known]
    events = recording.events
    rates = [[e.step + 1, e.text] for e in events if e.kind == "learning_rate"]
    return {
        "incidents": [[step + 1 for step in at], list(numbers), [int(i.refused) for i in incidents]],
        "refused": refused,
        "overflows": overflows,
        "overflow_count": _overflows(recording),
        "rollbacks": _rollbacks(recording),
        "rates": rates,
    }


def _facts(recording: Recording, incidents: Sequence[Incident]) -> list[tuple[str, str]]:
    meta, steps, bins = recording.meta, recording.steps, recording.bins
    refused = int((steps["status"] == REFUSED).sum() + bins["refused"].sum()) if len(recording) else sum(i.refused for i in incidents)
    overflows = _overflows(recording)
    kinds = Counter(e.kind for e in recording.events)
    facts = [
        ("status", str(meta.get("status", "")) if "began" in meta else ""),
        ("steps", f"{len(recording):,}" if len(recording) else ""),
    ]
    facts += [("refused steps", f"{refused:,}")]
    facts += [("incidents", f"{len(incidents):,}"), ("rollbacks", str(kinds["rollback"])), ("bad rows", str(len(recording.samples)))]
    facts += [("float16 overflows", f"{overflows:,}")] if overflows else []
    facts += [("backend", str(meta.get("backend", ""))), ("start", _when(meta.get("began"))), ("duration", _took(meta))]
    return [(name, value) for name, value in facts if value]


def _healthy(recording: Recording) -> str:
    """Return the text for a run without incidents, or `""` before its first step."""
    if _overflows(recording):
        return "No incidents. All refused steps are ordinary float16 overflows, which loss scaling handles."
    return "No incidents: every step was finite and committed." if len(recording) else ""


def _overflows(recording: Recording) -> int:
    return int((recording.steps["status"] == OVERFLOW).sum() + recording.bins["overflows"].sum())


def _when(seconds: Any) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(float(seconds))).replace("-", "\N{NON-BREAKING HYPHEN}")
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def _took(meta: Mapping[str, Any]) -> str:
    try:
        seconds = float(meta["written"]) - float(meta["began"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return ""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _layers(recording: Recording) -> tuple[dict[str, Any], list[tuple[str, str, list[str]]]]:
    """Return the map of layers for the script, and its rows: path, measured column, and first,
    largest and last value.
    """
    found: list[dict[str, Any]] = []
    rows = []
    for path, columns in list(recording.layers.items())[:_MAX_LAYERS]:
        step = np.asarray(columns["step"])
        measures = {name: np.asarray(v, np.float64) for name, v in columns.items() if name != "step"}
        if "high" in measures:
            measures = {"range": np.maximum(np.abs(measures["low"]), np.abs(measures["high"]))}
        measures = {name: v for name, v in measures.items() if not np.isnan(v).all()}
        if not len(step) or not measures:
            continue
        pick = np.linspace(0, len(step) - 1, min(len(step), _LAYER_POINTS)).astype(int)
        found.append({"step": (step[pick] + 1).tolist(), **{name: _short(v[pick]) for name, v in measures.items()}})
        table = [f"{v[~np.isnan(v)][0]:.3g} → {v[~np.isnan(v)][-1]:.3g}" for v in measures.values()]
        rows.append((path, " / ".join(measures), table))
    return {"rows": found}, rows
