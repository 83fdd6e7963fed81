"""A run as reports show it, and the figure of its curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from keras_nanguard._core.display import new_figure
from keras_nanguard._core.incident import Incident
from keras_nanguard._recording.database import MEASURED, OVERFLOW, REFUSED, SKIPPED
from keras_nanguard._recording.recording import Recording
from keras_nanguard._report.console import Totals, summary, why


@dataclass(frozen=True)
class ShownRun:
    """A run, from memory or from its files.

    Attributes:
        incidents: its incidents, of one fit or more.
        recording: its recording, which may be empty.
        directory: its directory, if it has one, for the contents of its bundles.
        name: its name among several runs.
        counted: its numbers of steps as its guard has counted them; `None` if it is from files.
        unread: a sentence for each of its files that cannot be read.
    """

    incidents: Sequence[Incident] = ()
    recording: Recording = field(default_factory=Recording)
    directory: Path | None = None
    name: str = ""
    counted: Totals | None = None
    unread: Sequence[str] = ()

    @property
    def totals(self) -> Totals:
        """The numbers of steps in the recording; without a recording the incidents are counted.

        A refused step that was replayed does not count as refused, as in the guard's own counts.
        """
        if not len(self.recording):
            return Totals(None, sum(incident.refused for incident in self.incidents))
        steps = self.recording.steps
        status, undone = steps["status"], steps["undone"]
        again = undone & np.isin(status, (REFUSED, OVERFLOW))
        ran = int(steps["step"][status != SKIPPED].max()) + 1  # steps are numbered from 0
        refused = int(((status == REFUSED) & ~again).sum())
        overflows = int(((status == OVERFLOW) & ~again).sum())
        return Totals(ran, refused + overflows, overflows, int(again.sum()))

    @property
    def summary(self) -> str:
        """The summary of the run as text."""
        found = summary(self.incidents, self.counted or self.totals)
        return "\n".join([found, *(f"  {line}" for line in self.unread)])

    @property
    def causes(self) -> Counter[str]:
        """Number of incidents by cause and place."""
        return Counter(why(incident) for incident in self.incidents)


_MARKS = (
    ("incident", "incident", "#c0262d", "-"),
    ("rollback", "rollback", "#7a3fc0", "-"),
    ("learning_rate", "learning rate changed", "#1b7a3d", "--"),
)
"""Kind of event, name, colour and line of each mark."""


def curves(recording: Recording) -> Any:
    """Return a figure with one panel for each measured column of a run, with marks for incidents,
    rollbacks and changed rates."""
    series = [(name.replace("_", " "), *recording.series(name, 1500)) for name in MEASURED]
    shown = [panel for panel in series if len(panel[1])]
    figure = new_figure(9.0, 1.0 + 1.7 * max(len(shown), 1))
    panels = figure.subplots(max(len(shown), 1), 1, sharex=True, squeeze=False)[:, 0]
    at = {kind: [e.step + 1 for e in recording.events if e.kind == kind] for kind, *_ in _MARKS}
    for axes, (title, step, low, high) in zip(panels, shown):
        axes.fill_between(step + 1, low, high, alpha=0.3, linewidth=0)
        axes.plot(step + 1, high, linewidth=1.0)
        if low.min() > 0.0 and high.max() / low.min() > 50.0:
            axes.set_yscale("log")
        across = {"transform": axes.get_xaxis_transform(), "linewidth": 1.0}
        for kind, word, colour, style in _MARKS:
            height = 0.12 if kind == "incident" else 1.0
            look = {"colors": colour, "linestyles": style, "label": word}
            axes.vlines(at[kind], 0.0, height, **look, **across)
        axes.set_ylabel(title, fontsize=9)
        axes.grid(alpha=0.25)
    if not shown:
        panels[0].text(0.5, 0.5, "nothing is recorded yet", ha="center")
    elif any(at.values()):
        words = {word for kind, word, *_ in _MARKS if at[kind]}
        used = [mark for mark in panels[0].collections if mark.get_label() in words]
        figure.legend(handles=used, loc="outside upper right", ncols=3, fontsize=8)
    panels[-1].set_xlabel("step")
    return figure
