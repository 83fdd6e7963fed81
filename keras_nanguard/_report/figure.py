"""The curves of a run as a figure of matplotlib."""

from __future__ import annotations

import sys
from typing import Any

from keras_nanguard._core.errors import GuardError, expected
from keras_nanguard._recording.database import MEASURED
from keras_nanguard._recording.recording import Recording

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
    recorded = [panel for panel in series if len(panel[1])]
    figure = _new_figure(9.0, 1.0 + 1.7 * max(len(recorded), 1))
    panels = figure.subplots(max(len(recorded), 1), 1, sharex=True, squeeze=False)[:, 0]
    at = {kind: [e.step + 1 for e in recording.events if e.kind == kind] for kind, *_ in _MARKS}
    for axes, (title, step, low, high) in zip(panels, recorded):
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
    if not recorded:
        panels[0].text(0.5, 0.5, "nothing is recorded yet", ha="center")
    elif any(at.values()):
        words = {word for kind, word, *_ in _MARKS if at[kind]}
        used = [mark for mark in panels[0].collections if mark.get_label() in words]
        figure.legend(handles=used, loc="outside upper right", ncols=3, fontsize=8)
    panels[-1].set_xlabel("step")
    return figure


def _new_figure(width: float, height: float) -> Any:
    """Return an empty figure, in inches. It belongs to no window and to no state of pyplot.

    Raises:
        GuardError: if matplotlib is not installed.
    """
    try:
        if "ipykernel" in sys.modules:
            from matplotlib import pyplot

            pyplot.switch_backend(pyplot.get_backend())  # else a notebook shows no figure
        from matplotlib.figure import Figure
    except ImportError as error:
        what, remedy = "matplotlib to be installed", "Run: pip install 'keras-nanguard[plot]'"
        raise GuardError(expected(what, "no such module", remedy)) from error
    return Figure(figsize=(width, height), layout="constrained")
