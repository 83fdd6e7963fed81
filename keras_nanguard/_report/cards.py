"""One card for each kind of incident of a run: finding, cause, actions, outcomes and advice."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keras_nanguard._core.incident import SITES, Incident
from keras_nanguard._recording.records import BadSample
from keras_nanguard._report import blamed_rows, console
from keras_nanguard._report.snippets import snippet

__all__ = ["MAX_CARDS", "card", "cards"]

MAX_CARDS = 200
"""Maximum number of kinds with a card. All others share one."""

_MAX_LISTED, _MAX_FINDINGS, _MAX_OUTCOMES = 40, 60, 12
_MAX_BEFORE, _MAX_LAYER_ROWS = 6, 60

Layers = Mapping[str, Mapping[str, Any]]


def cards(
    incidents: Sequence[Incident],
    directory: Path | None = None,
    samples: Sequence[BadSample] = (),
    layers: Layers | None = None,
    steps: Sequence[int] | None = None,
) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the cards in the order in which each kind first occurred, and for each incident the
    number of its card.

    Args:
        incidents: the incidents.
        directory: the directory of the run, for its bundles.
        samples: the bad rows of the data.
        layers: measurements of each layer over time, as `Recording.layers`.
        steps: the step of each incident, counted as in samples and layers; by default its own,
            counted from the beginning of a fit.
    """
    at = {id(incident): step for incident, step in zip(incidents, steps or [i.step for i in incidents])}
    labels: dict[int, list[str]] = {}
    for sample in samples:
        for step in sample.steps:
            labels.setdefault(step, []).append(sample.label)
    groups = console.kinds(incidents)
    kept = sorted(groups[:MAX_CARDS], key=lambda group: (group[0].step, group[0].epoch))
    if len(groups) > MAX_CARDS:
        kept.append([incident for group in groups[MAX_CARDS:] for incident in group])
    number = {id(incident): n for n, group in enumerate(kept) for incident in group}
    found = [card(group, directory, labels, layers, at) for group in kept]
    if len(groups) > MAX_CARDS:
        found[-1]["title"] = f"{len(groups) - MAX_CARDS} more kinds of trouble; this is the first of them"
    return found, [number[id(incident)] for incident in incidents]


def card(
    group: Sequence[Incident], directory: Path | None, labels: Mapping[int, Sequence[str]], layers: Layers | None, at: Mapping[int, int]
) -> dict[str, Any]:
    """Return one card as plain values, with plain text only.

    Args:
        group: its incidents.
        directory: the directory of the run.
        labels: names of the bad rows, by step.
        layers: measurements of each layer over time.
        at: the step of each incident by its `id`.
    """
    first = next((incident for incident in group if blamed_rows.bundle_folder(incident.bundle, directory)), group[0])
    diagnosis = first.diagnosis
    folder = blamed_rows.bundle_folder(first.bundle, directory)
    bundle = "" if folder is None and directory is not None else first.bundle or ""
    done = Counter((o.action, o.status, o.detail) for incident in group for o in incident.outcomes if str(o) != "warn")
    return {
        "title": console.why(group[0]),
        "times": len(group),
        "refused": group[0].refused,
        "moment": group[0].moment,
        "last": group[-1].moment,
        "shown": first.moment,
        "labels": list(labels.get(at[id(first)], ()))[:20],
        "headline": diagnosis.headline if diagnosis is not None else str(first.first or ""),
        "confidence": f"{diagnosis.confidence:.0%}" if diagnosis is not None and diagnosis.confidence else "",
        "evidence": diagnosis.evidence if diagnosis is not None else (),
        "advice": diagnosis.advice if diagnosis is not None else (),
        "code": snippet(diagnosis) if diagnosis is not None else "",
        "decision": first.decision.reason if first.decision is not None else "",
        "outcomes": [(*what, n) for what, n in done.most_common(_MAX_OUTCOMES)],
        "measured": [(name, f"{value:.6g}") for name, value in first.values.items()],
        "findings": [_finding(f) for f in sorted(first.findings, key=lambda f: SITES.index(f.site))[:_MAX_FINDINGS]],
        "more_findings": max(len(first.findings) - _MAX_FINDINGS, 0),
        "layers": blamed_rows.layer_table(folder),
        "samples": diagnosis.samples[:20] if diagnosis is not None else (),
        "rows": blamed_rows.shown(folder, diagnosis.samples, diagnosis.culprit) if diagnosis is not None else [],
        "bundle": bundle,
        "replay": f"keras-nanguard replay {shlex.quote(console.printable(bundle))}" if bundle else "",
        "before": _before(layers or {}, at[id(first)]),
        "listed": [i.moment for i in group[:_MAX_LISTED]],
        "more_listed": max(len(group) - _MAX_LISTED, 0),
    }


def _finding(finding: Any) -> tuple[str, ...]:
    counts = (("" if n is None else str(n)) for n in (finding.nan, finding.inf, finding.size))
    return (finding.site, finding.path, finding.kind, *counts, "" if finding.value is None else f"{finding.value:.4g}")


def _before(layers: Layers, step: int) -> list[tuple[str, str, str, bool]]:
    """Return the measurements of each layer before a step: path, column, last values, and whether
    they grew tenfold.
    """
    found = []
    for path, columns in layers.items():
        end = int(np.searchsorted(np.asarray(columns["step"]), step, side="right"))
        for name, values in columns.items():
            last = np.asarray(values, np.float64)[:end]
            last = last[~np.isnan(last)][-_MAX_BEFORE:]  # NaN is what was not measured
            if name != "step" and len(last):
                grown = bool(abs(last[-1]) > 10.0 * abs(last[0]) > 0.0)
                found.append((path, name.replace("_", " "), " → ".join(f"{v:.3g}" for v in last), grown))
    return sorted(found, key=lambda row: not row[3])[:_MAX_LAYER_ROWS]
