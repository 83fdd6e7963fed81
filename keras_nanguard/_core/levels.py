"""The level of a loss, and the step at which a loss left it. Imports no backend.

Computed from the recorded losses, when an incident needs it:

    level    median of the last 16 losses
    spread   1.48 times the median distance of these losses from their level: the standard deviation
             if they are normally distributed
    onset    the last step at which the cumulative sum S = max(0, S + (loss - best) / spread - 1)
             was 0, where `best` is the lowest level so far: the estimate of a change point by the
             CUSUM method (E. S. Page, Continuous inspection schemes, Biometrika 41, 1954)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

__all__ = ["WINDOW", "Level", "level_of", "onset"]

WINDOW = 16
"""Number of losses whose median is the level."""

FEWEST = 8
"""Number of losses below which there is no level."""

NORMAL = 1.4826
"""Factor from the median absolute deviation to the standard deviation of a normal distribution."""

LEAST_SPREAD = 0.05
"""Least spread, as a share of the level: a loss that is constant for some steps still has noise."""

MOST_EXCESS = 100.0
"""Largest excess that one loss adds to the cumulative sum, in spreads."""


class Level(NamedTuple):
    """The level of the loss after a step, and the spread of the losses around it."""

    step: int
    value: float
    spread: float


def level_of(series: Sequence[tuple[int, float]]) -> Level | None:
    """Return the level at the end of a series of `(step, loss)`, `None` if it is too short."""
    losses = [loss for _, loss in series[-WINDOW:]]
    if len(losses) < FEWEST:
        return None
    value = median(losses)
    spread = NORMAL * median(abs(loss - value) for loss in losses)
    return Level(series[-1][0], value, max(spread, LEAST_SPREAD * abs(value)))


def onset(series: Sequence[tuple[int, float]]) -> int:
    """Return the first step at which the losses were no longer at their lowest level.

    Args:
        series: `(step, loss)` of committed steps, oldest first.

    Returns:
        that step; the step after the last one if the loss never left its lowest level, 0 for an
        empty series.
    """
    if not series:
        return 0
    first, loss = series[0]
    levels = [Level(first, loss, max(abs(loss) * LEAST_SPREAD, 1e-30))]
    ends = range(FEWEST, len(series) + 1, FEWEST)
    levels += [found for end in ends if (found := level_of(series[max(end - WINDOW, 0) : end]))]
    best = min(
        (level for level in levels if level.value == level.value),
        key=lambda level: level.value,
        default=levels[0],
    )
    total, began = 0.0, best.step
    for step, loss in series:
        if step < best.step or loss != loss:
            continue
        excess = (loss - best.value) / best.spread - 1.0 if best.spread else math.inf
        total = max(0.0, total + min(excess, MOST_EXCESS))
        if total == 0.0:
            began = step + 1
    return began
