"""Several runs, such as the trials of a tuner: which failed, when, why, and what they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from keras_nanguard._core.plain_values import times
from keras_nanguard._recording.recording import measured
from keras_nanguard._report import console, html
from keras_nanguard._report.reported_run import ReportedRun, heights

_MAX_CAUSES = 4


def row(run: ReportedRun) -> dict[str, Any]:
    """Return the row of a run in the comparison, as text; `""` for what is unknown.

    `first` is when the first incident happened, `causes` are the most frequent ones, `rate` is the
    highest learning rate at the start, and `loss` the last finite loss.
    """
    _, loss, _ = measured(run.recording, "loss")
    rate = run.recording.series("learning_rate", 120)[2]
    return {
        "name": run.name,
        "status": str(run.recording.meta.get("status", "")),
        "steps": f"{run.totals.steps:,}" if run.totals.steps else "",
        "incidents": len(run.incidents),
        "first": run.incidents[0].moment if run.incidents else "",
        "causes": "; ".join(f"{n} x {why}" for why, n in run.causes.most_common(_MAX_CAUSES)),
        "rate": f"{rate[0]:.3g}" if len(rate) else "",
        "loss": f"{loss[-1]:.4g}" if len(loss) else "",
    }


def _spark(run: ReportedRun) -> str:
    """Return the SVG path of the losses of a run, 160 wide and 34 high, or `""` without data."""
    steps, _, values = (array.tolist() for array in run.recording.series("loss", 120))
    if len(steps) < 2:
        return ""
    across = (steps[-1] - steps[0]) or 1
    return "M" + "L".join(
        f"{(s - steps[0]) / across * 158 + 1:.1f} {32 - height * 30:.1f}"
        for s, height in zip(steps, heights(values))
    )


def common(runs: Sequence[ReportedRun]) -> list[str]:
    """Return sentences about the common properties of failed runs, and their differences from the
    others."""
    bad, good = [r for r in runs if r.incidents], [r for r in runs if not r.incidents]
    found = [f"{len(bad)} of {times(len(runs), 'run')} had incidents."]
    for why, n in Counter(why for run in bad for why in run.causes).most_common(_MAX_CAUSES):
        if n > 1 or len(bad) == 1:
            steps = ([i.step + 1 for i in run.incidents if console.why(i) == why] for run in bad)
            firsts = [of_run[0] for of_run in steps if of_run]
            low, high = min(firsts), max(firsts)
            when = f"at step {low}" if low == high else f"between step {low} and step {high}"
            found.append(f"{why}: in {n} of them, first {when}.")
    rates = [[rate for run in group if (rate := _rate(run)) is not None] for group in (bad, good)]
    if all(rates):
        theirs, others = rates
        apart = "The highest learning rate was at {} {:.3g} in these runs, at {} {:.3g} in others."
        if min(theirs) > max(others):
            found.append(apart.format("least", min(theirs), "most", max(others)))
        elif max(theirs) < min(others):
            found.append(apart.format("most", max(theirs), "least", min(others)))
    rows = Counter(s.label for run in bad for s in run.recording.samples)
    shared = [label for label, n in rows.most_common(5) if n > 1]
    if shared:
        found.append(f"Bad rows in several runs: {', '.join(shared)}.")
    return found


def _rate(run: ReportedRun) -> float | None:
    highest = run.recording.series("learning_rate", 200)[2]
    return float(highest.max()) if len(highest) else None


def text(runs: Sequence[ReportedRun]) -> str:
    """Return the comparison as lines of text."""
    lines = [*common(runs), ""]
    for run in runs:
        cells = row(run)
        steps = f"{cells['steps']} steps" if cells["steps"] else "steps unknown"
        happened = "no incident"
        if cells["incidents"]:
            counted = times(cells["incidents"], "incident")
            happened = f"{counted} (first: {cells['first']}): {cells['causes']}"
        lines.append(f"{run.name}: {' '.join(filter(None, (cells['status'], steps)))}, {happened}")
    return console.printable("\n".join(lines))


def page(runs: Sequence[ReportedRun]) -> str:
    """Return the comparison as one HTML file."""
    rows = [row(run) | {"spark": _spark(run)} for run in runs]
    title = times(len(runs), "run")
    return html.rendered("compare.html", {}, title=title, sentences=common(runs), rows=rows)
