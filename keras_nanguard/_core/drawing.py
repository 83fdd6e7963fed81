"""Figures with matplotlib, which is imported only when one is drawn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from keras_nanguard._core.errors import GuardError, expected

__all__ = ["bad_places", "new_figure"]

_MAX_PLACES = 40


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure, in inches. It belongs to no window and to no state of pyplot.

    Raises:
        GuardError: if matplotlib is not installed.
    """
    try:
        if "ipykernel" in sys.modules:
            from matplotlib import pyplot

            pyplot.switch_backend(
                pyplot.get_backend()
            )  # loads it: a notebook shows no figure before that
        from matplotlib.figure import Figure
    except ImportError as error:
        raise GuardError(
            expected(
                "matplotlib to be installed",
                "no such module",
                "Run: pip install 'keras-nanguard[plot]'",
            )
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def bad_places(title: str, findings: Sequence[Any]) -> Any:
    """Return a figure of the share of NaN and Inf in each bad place, in causal order from the top.

    Args:
        title: the title.
        findings: the bad places (`Finding`), first cause first.
    """
    shown = findings[:_MAX_PLACES]
    figure = new_figure(8.0, 1.2 + 0.28 * max(len(shown), 1))
    axes = figure.subplots()
    names = [" ".join(filter(None, (f.site, f.path))).replace("$", r"\$") for f in shown]
    for count, colour, word in (("nan", "#c0262d", "NaN"), ("inf", "#e08a00", "Inf")):
        shares = [(getattr(f, count) or 0) / f.size if f.size else 0.0 for f in shown]
        left = [(f.nan or 0) / f.size if f.size and count == "inf" else 0.0 for f in shown]
        axes.barh(range(len(shown)), shares, left=left, color=colour, label=word)
    for place, finding in enumerate(shown):
        if not finding.nan and not finding.inf:
            value = "" if finding.value is None else f" {finding.value:.4g}"
            axes.text(0.01, place, f"{finding.kind}{value}", va="center", fontsize=8)
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.set_xlim(0.0, 1.0)
    axes.invert_yaxis()
    axes.set_xlabel("share of bad entries")
    axes.set_title(title.replace("$", r"\$"), fontsize=10, loc="left", wrap=True)
    if shown:
        axes.legend(loc="lower right", fontsize=8)
    return figure
