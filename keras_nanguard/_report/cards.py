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

__all__ = ["MAX_CARDS", "cards"]

MAX_CARDS = 200
"""Maximum number of kinds with a card. All others share one."""

_MAX_OUTCOMES, _MAX_BEFORE, _MAX_LAYER_ROWS = 12, 6, 60

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
    at = dict(zip(map(id, incidents), steps or [incident.step for incident in incidents]))
    groups = console.kinds(incidents)
    kept = sorted(groups[:MAX_CARDS], key=lambda group: (group[0].step, group[0].epoch))
    others = groups[MAX_CARDS:]
    if others:
        kept.append([incident for group in others for incident in group])
    number = {id(incident): n for n, group in enumerate(kept) for incident in group}
    found = []
    for group in kept:
        one = _card(group, directory)
        step = at[id(one["first"])]
        labels = [sample.label for sample in samples if step in sample.steps]
        found.append({**one, "labels": labels[:20], "before": _before(layers or {}, step)})
    if others:
        found[-1]["title"] = f"{len(others)} more kinds of incidents; this is the first of them"
    return found, [number[id(incident)] for incident in incidents]


def _card(group: Sequence[Incident], directory: Path | None) -> dict[str, Any]:
    """Return one card: records and plain text, which the page escapes."""
    folders = [blamed_rows.bundle_folder(incident.bundle, directory) for incident in group]
    shown = next((n for n, folder in enumerate(folders) if folder is not None), 0)
    first, folder, diagnosis = group[shown], folders[shown], group[shown].diagnosis
    bundle = "" if folder is None and directory is not None else first.bundle or ""
    outcomes = [o for incident in group for o in incident.outcomes if str(o) != "warn"]
    done = Counter((o.action, o.status, o.detail) for o in outcomes)
    rows: Sequence[Any] = ()
    if diagnosis is not None:
        rows = blamed_rows.shown(folder, diagnosis.samples, diagnosis.culprit)
    return {
        "title": console.why(group[0]),
        "group": group,
        "first": first,
        "findings": sorted(first.findings, key=lambda finding: SITES.index(finding.site)),
        "outcomes": [(*what, n) for what, n in done.most_common(_MAX_OUTCOMES)],
        "code": snippet(diagnosis) if diagnosis is not None else "",
        "layers": blamed_rows.layer_table(folder),
        "rows": rows,
        "bundle": bundle,
        "replay": f"keras-nanguard replay {shlex.quote(console.printable(bundle))}",
    }


def _before(layers: Layers, step: int) -> list[tuple[str, str, str, bool]]:
    """Return the measurements of each layer before a step: path, column, last values, and whether
    they grew tenfold.
    """
    found = []
    for path, columns in layers.items():
        end = int(np.searchsorted(np.asarray(columns["step"]), step, side="right"))
        for name, values in columns.items():
            last = np.asarray(values, np.float64)[:end]
            last = last[~np.isnan(last)][-_MAX_BEFORE:]  # NaN means not measured
            if name != "step" and len(last):
                grown = bool(abs(last[-1]) > 10.0 * abs(last[0]) > 0.0)
                course = " → ".join(f"{value:.3g}" for value in last)
                found.append((path, name.replace("_", " "), course, grown))
    return sorted(found, key=lambda row: not row[3])[:_MAX_LAYER_ROWS]
