"""The measurements of the last steps, for the diagnosis of a later incident: the level of the loss,
and the step at which the loss left this level.

Pushing is one append. All arithmetic is deferred until an incident needs it:

    level    median of the last 16 losses
    spread   1.48 times the median distance of these losses from their level: the standard deviation
             if they are normally distributed
    onset    the last step at which the cumulative sum S = max(0, S + (loss - best) / spread - 1)
             was 0, where `best` is the lowest level so far: the estimate of a change point by the
             CUSUM method (E. S. Page, Continuous inspection schemes, Biometrika 41, 1954)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice, takewhile
from statistics import median
from typing import NamedTuple

from keras_nanguard._core.verdict import gradient_norm

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
    known = (level for level in levels if not math.isnan(level.value))
    best = min(known, key=lambda level: level.value, default=levels[0])
    total, began = 0.0, best.step
    for step, loss in series:
        if step < best.step or loss != loss:
            continue
        excess = (loss - best.value) / best.spread - 1.0 if best.spread else math.inf
        total = max(0.0, total + min(excess, MOST_EXCESS))
        if total == 0.0:
            began = step + 1
    return began


BEFORE = 128
"""Number of the last steps that a diagnosis compares."""

LONG = 4096
"""Number of steps that are stored."""

START_STEPS = 5
"""Number of steps from which the initial magnitude is taken."""


class Measured(NamedTuple):
    """The measurements of one good step."""

    step: int
    loss: float
    squares: float
    scale: float

    @property
    def norm(self) -> float:
        """Global norm of the unscaled gradients."""
        return gradient_norm(self.squares, self.scale)


class History:
    """The measurements of the last good steps that no rollback has undone, and the first few.

    Attributes:
        statistics: the sum over the moving statistics in the last good step (see `Verdict`),
            whether it was undone or not.
    """

    __slots__ = ("_first", "_recent", "statistics")

    def __init__(self) -> None:
        self._first: list[Measured] = []
        self._recent: deque[Measured] = deque(maxlen=LONG)
        self.statistics = 0.0

    def push(self, step: int, loss: float, squares: float, scale: float, statistics: float) -> None:
        """Store one good step: its loss, half the sum of squares of its gradients, its loss scale,
        and its sum over the statistics. This runs in every step.
        """
        self.statistics = statistics
        measured = Measured(step, loss, squares, scale)
        self._recent.append(measured)
        if step < START_STEPS:
            self._first.append(measured)

    @property
    def scale(self) -> float:
        """Loss scale of the last good step, 0.0 if there is none."""
        return self._recent[-1].scale if self._recent else 0.0

    @property
    def series(self) -> list[tuple[int, float]]:
        """Step and loss of the last `LONG` good steps that no rollback has undone, oldest first."""
        return [measured[:2] for measured in self._recent]

    def last(self, count: int) -> list[tuple[int, float]]:
        """Return step and loss of the last good steps, at most this many."""
        return [measured[:2] for measured in islice(reversed(self._recent), count)][::-1]

    def since(self, step: int) -> list[Measured]:
        """Return the steps from this one on that no rollback has undone, oldest first."""
        later = takewhile(lambda measured: measured.step >= step, reversed(self._recent))
        return [*later][::-1]

    def undo(self, step: int) -> None:
        """Remove the steps from this one on from the series, because a rollback has undone them."""
        kept = [measured for measured in self._recent if measured.step < step]
        self._recent = deque(kept, maxlen=LONG)

    def before(self, step: int) -> list[Measured]:
        """Return the last `BEFORE` steps before this one, oldest first."""
        earlier = (measured for measured in reversed(self._recent) if measured.step < step)
        return [*islice(earlier, BEFORE)][::-1]

    def first(self, step: int) -> list[Measured]:
        """Return the first good steps before this one."""
        return [measured for measured in self._first[:START_STEPS] if measured.step < step]

    def zeros(self, step: int, count: int) -> bool:
        """Whether each of the last `count` steps had a gradient of exactly zero, and a loss."""
        entries = self.before(step)[-count:]
        return len(entries) == count and all(m.loss != 0.0 and m.squares == 0.0 for m in entries)
