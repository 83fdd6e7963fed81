"""How far training has come, from the losses of its committed steps: level, ground lost, onset. Imports no backend.

All of it is computed a few times in a hundred steps, from what was recorded anyway:

    level    median of the last 16 losses
    spread   1.48 times the median distance of these losses from their level, which is a standard deviation where they are normal
    start    the loss of the first step, which the untrained model has
    best     the lowest level so far, or the start
    lost     (level - best) / (start - best): the share of all progress that is lost again; 1 is back at the start
    onset    the last step at which the cumulative sum S = max(0, S + (loss - best) / spread - 1) was 0: the estimate of a change
             point by the CUSUM method (E. S. Page, Continuous inspection schemes, Biometrika 41, 1954)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

__all__ = ["Level", "Progress", "bearable_factor", "level_of", "onset"]

WINDOW = 16
"""Number of losses whose median is the level."""

SGD_BEARS = 4.0
"""How many times as large the first update of SGD may be: its updates shrink with the gradient, those of adaptive optimizers do not."""

MAX_UPDATE = 0.25
"""Relative update of an adaptive optimizer up to which a rate is bearable from the start."""

STALLED = 0.9
"""Share of an earlier level that a later one has to stay below to count as progress."""

FEWEST = 8
"""Number of losses below which there is no level."""

LONG = 500
"""Steps after a rollback from which on it is enough that the loss has come back to its lowest level."""

FALLING = 0.8
"""Share of an earlier level below which the loss is falling by itself."""

NOISE = 1.5
"""Spreads by which two levels have to differ to be distinguished."""

JUMP, RISES_BY = 20.0, 3.0
"""Spreads above the best level, and multiple of it, from which on a loss has jumped."""

LEAST_SPREAD = 0.05
"""Least spread, as a share of the level: a loss that happens to stand still for some steps is not without noise."""

LEVELS, RECENT_LEVELS = 256, 64
"""Number of levels that are kept, and of the newest of them that are never thinned."""

NORMAL = 1.4826
"""Factor from the median absolute deviation to the standard deviation of a normal distribution."""


def bearable_factor(update: float, factor: float, largest: float, least: float = 0.0) -> float:
    """Return by what to lower a rate whose first update is this large: the factor, applied again until that is at most `largest`.

    It is applied once where the update is not known, and no further once it is at most `least`.
    """
    lowered = factor
    while largest < update * lowered < math.inf and lowered > least:
        lowered *= factor
    return lowered


class Level(NamedTuple):
    """The level of the loss at one step."""

    step: int
    value: float
    spread: float


def level_of(series: Sequence[tuple[int, float]]) -> Level | None:
    """Return the level at the end of a series of `(step, loss)`, `None` where it is too short."""
    losses = [loss for _, loss in series[-WINDOW:]]
    if len(losses) < FEWEST:
        return None
    value = median(losses)
    spread = NORMAL * median(abs(loss - value) for loss in losses)
    return Level(series[-1][0], value, max(spread, LEAST_SPREAD * abs(value)))


def onset(series: Sequence[tuple[int, float]], best: Level) -> int:
    """Return the first step at which the losses were no longer those of a level, by the CUSUM method; see above.

    Args:
        series: `(step, loss)` of committed steps, oldest first.
        best: the level that was left.
    """
    total, began = 0.0, series[0][0] if series else 0
    for step, loss in series:
        excess = (loss - best.value) / best.spread - 1.0 if best.spread else math.inf
        total = max(0.0, total + min(excess, 100.0)) if loss == loss else total
        if total == 0.0:
            began = step + 1
    return began


class Progress:
    """The levels of one fit.

    Attributes:
        start: the loss of the first step, `None` before it.
        levels: the levels that were noted, oldest first; of older ones the lowest of several.
        since: the step from which on the present state has been trained: 0, or that of the last rollback.
        restored: the step that the snapshot of the last rollback was taken at, `None` before the first.
        begins_at: where the divergence that was found last began, where the levels do not show it.
        left_out: the steps whose batches are not to be run again after the rollback that comes: they have led to a lasting spike.
        notes: what has shown the last divergence, in sentences.
        shown: the factor of the learning rate at which a trial has shown the steps to go better, 1 where none has.
        update: the relative update of the first step, for a learning rate of 1; NaN where it is not known.
    """

    def __init__(self) -> None:
        self.start: float | None = None
        self.levels: list[Level] = []
        self.since = 0
        self.restored: int | None = None
        self.update = math.nan
        self.begins_at: int | None = None
        self.left_out: frozenset[int] = frozenset()
        self.notes: tuple[str, ...] = ()
        self.shown = 1.0

    def note(self, series: Sequence[tuple[int, float]]) -> Level | None:
        """Note the level at the end of a series, and return it; `None` where there are too few losses since the last rollback."""
        if self.start is None and series:
            self.start = series[0][1]
        now = level_of([entry for entry in series[-WINDOW:] if entry[0] >= self.since])
        if now is not None:
            self.levels.append(now)
        if len(self.levels) > LEVELS:  # the two of the older ones become one that are closest
            levels = self.levels
            first = min(range(LEVELS - RECENT_LEVELS), key=lambda i: levels[i + 2].step - levels[i].step)
            levels[first : first + 2] = [min(levels[first : first + 2], key=lambda level: level.value)]
        return now

    @property
    def best(self) -> Level | None:
        """The lowest level so far, the start where none is lower; `None` before the first step."""
        if self.start is None:
            return None
        start = Level(0, self.start, max(abs(self.start) * LEAST_SPREAD, 1e-30))
        return min([start, *self.levels], key=lambda level: level.value)

    @property
    def signed(self) -> bool:
        """Whether the loss has both signs, or none, so that neither ratio nor progress is defined."""
        return self.start is None or self.start <= 0 or any(level.value <= 0 for level in self.levels)

    def lost(self, now: Level) -> float:
        """Return the share of all progress that is lost again, 1 where the level is the start or above it."""
        best = self.best
        if self.start is None or best is None or now.value >= self.start:
            return 1.0
        return max(0.0, (now.value - best.value) / (self.start - best.value)) if self.start > best.value else 1.0

    @property
    def level_at_rollback(self) -> float:
        """The level at the state that the last rollback has restored, the start where that is the first."""
        before = [level.value for level in self.levels if level.step < self.since]
        return before[-1] if before else self.start or 0.0

    @property
    def improved(self) -> bool:
        """Whether the loss has been clearly lower since the last rollback than ever before, or as low for long."""
        since = [level for level in self.levels if level.step >= self.since]
        before = [level.value for level in self.levels if level.step < self.since]
        best = min([*before, *([self.start] if self.start is not None else [])], default=math.inf)
        lasted = bool(since) and since[-1].step - self.since >= LONG and any(s.value <= best + NOISE * s.spread for s in since[1:])
        return bool(since) and (min(level.value for level in since) < STALLED * best or lasted)

    def halves(self, now: Level) -> tuple[float, float] | None:
        """Return the lowest levels of the first and of the second half of the steps since the last rollback, where both are known."""
        middle = (self.since + now.step + 1) / 2
        first = [level.value for level in self.levels if self.since <= level.step < middle]
        second = [level.value for level in self.levels if level.step >= middle]
        return (min(first), min(second)) if first and second else None

    def rolled_back(self, snapshot: int, step: int) -> None:
        """Forget the levels of steps that are undone: those after a snapshot; what comes begins with `step`."""
        self.levels = [level for level in self.levels if level.step < snapshot]
        self.since, self.restored, self.begins_at, self.left_out = step, snapshot, None, frozenset()

    @property
    def falling(self) -> bool:
        """Whether the last level is clearly below the one before."""
        return len(self.levels) > 1 and self.levels[-1].value < FALLING * self.levels[-2].value

    def jumps_at(self, step: int, series: Sequence[tuple[int, float]]) -> bool:
        """Whether the loss leaves the best level at this step by a jump, rather than step by step."""
        best = self.best
        near = [loss for number, loss in series if step <= number <= step + 1]
        return best is not None and max(near, default=0.0) >= max(best.value + JUMP * best.spread, RISES_BY * best.value)

    def onset(self, series: Sequence[tuple[int, float]]) -> int:
        """Return the step from which on the losses of a series have left the best level."""
        if self.begins_at is not None:
            return self.begins_at
        best = self.best
        present = [entry for entry in series if entry[0] >= (best.step if best is not None else 0)]
        return onset(present, best) if best is not None and present else 0
