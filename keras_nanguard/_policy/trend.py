"""Monitoring of finite loss and gradient norm: jumps, and growth that will overflow. Imports no backend.

Both are judged on the logarithm of the magnitude, relative to the healthy steps of the same run, and both prefer missed
alarms to false ones: a false alarm costs a healthy run more than a delayed one costs a diverging run, which overflows soon
and is refused then. With `v` the magnitude of the loss or of the gradient norm:

    start      median of the first five values
    level      of log v: median of the first `warmup` values, then a running mean in which no value counts for more
               than a factor of 20
    spread     running mean of the amount by which log v exceeds the level
    spike      v > 10 * start  and  v > floor  and  log v > level + max(log spike_factor, min(20 * spread, log 1e9))
    early      v > 1e3 * largest loss so far, where all are positive, or v > 1e6 * median of the values so far,  and  v > floor, from the
               fourth value to the end of the warm-up: a spike
    explosion  v > explosion_factor * max(start, 1), and the last `patience` values exceeded a hundredth of that

Values that are not finite, and exact zeros, have no useful magnitude and are ignored. A spike enters the means as a
factor of 20, so that a lasting shift becomes the new level after some steps. Where log v is normally distributed, 20
spreads are 8 standard deviations.
"""

from __future__ import annotations

import math
from statistics import median_low
from typing import cast

from keras_nanguard._core.incident import Finding
from keras_nanguard._core.literals import Kind
from keras_nanguard._policy.settings import TrendCheck

__all__ = ["Trend"]

SMOOTHING = 0.05
"""Weight of a new value in the running means, which average over about 20 values."""

MAX_DEVIATION = 3.0
"""Maximum deviation from the level that one value counts for, as a natural logarithm."""

MIN_SPREADS = 20.0
"""Minimum distance of a spike from the level, in spreads."""

START_VALUES = 5
"""Number of values from which the initial magnitude is taken."""

SUSTAINED_BELOW = math.log(100.0)
"""How far below the threshold of an explosion the values before it may lie."""

MAX_MARGIN = math.log(1e9)
"""A jump by this factor is a spike, however large the spread is."""

EARLY_JUMP, EARLY_MIN_VALUES = math.log(1e6), 3
"""A jump by this factor is a spike even during the warm-up, once this many values precede it."""

EARLY_RISE = math.log(1e3)
"""The same for a loss that is positive, compared with the largest one so far."""

REPORT_AGAIN_GROWTH = math.log(1000.0)
"""An explosion is reported again when it has grown by this much more."""

FLOORS = {"loss": math.log(1.0), "gradients": math.log(10.0)}
"""A jump to less than this is not reported, however small the level was."""


class _Series:
    """The running statistics of the loss or of the gradient norm."""

    __slots__ = (
        "_check",
        "_first",
        "_floor",
        "_grown",
        "_jumping",
        "_last_reported",
        "_level",
        "_limit",
        "_lowest",
        "_margin",
        "_spread",
        "_sustained",
        "_threshold",
        "early",
    )

    def __init__(self, site: str, check: TrendCheck):
        self._check, self._floor, self._margin = check, FLOORS[site], math.log(check.spike_factor)
        self._first: list[float] | None = []
        self.early = EARLY_RISE if site == "loss" else math.inf
        self._level = self._spread = 0.0
        self._limit = self._lowest = -math.inf
        self._threshold = self._sustained = math.inf
        self.discard_pending()

    def discard_pending(self) -> None:
        """Discard growth and jumps in progress, and keep the statistics."""
        self._grown, self._jumping, self._last_reported = 0, False, -math.inf

    def push(self, size: float) -> str:
        """Add the logarithm of one magnitude and return the kind of trouble, `""` where it is healthy.

        This runs twice in every step, so it makes no call and computes `_next_jump` inline.
        """
        if size >= self._limit:
            return self._learn(size) if self._first is not None else self._judge(size)
        above = size - self._level
        if above > 0.0:
            if above > MAX_DEVIATION:
                above = MAX_DEVIATION
            spread = self._spread + SMOOTHING * (above - self._spread)
        else:
            if above < -MAX_DEVIATION:
                above = -MAX_DEVIATION
            spread = self._spread * (1.0 - SMOOTHING)
        self._spread = spread
        level = self._level = self._level + SMOOTHING * above
        margin = MIN_SPREADS * spread
        limit = level + (self._margin if margin < self._margin else margin if margin < MAX_MARGIN else MAX_MARGIN)
        if limit < self._lowest:
            limit = self._lowest
        self._limit = self._sustained if limit > self._sustained else limit
        self._jumping = False
        self._grown = 0
        return ""

    def _next_jump(self) -> float:
        """Return the threshold from which a value is a jump."""
        return max(self._level + max(min(MIN_SPREADS * self._spread, MAX_MARGIN), self._margin), self._lowest)

    def _learn(self, size: float) -> str:
        """Add one of the first values: only growth and very large jumps can be judged yet."""
        first = self._first
        if first is None:
            return ""
        leap = len(first) >= EARLY_MIN_VALUES and size >= max(min(median_low(first) + EARLY_JUMP, max(first) + self.early), self._floor)
        first.append(size)
        if len(first) == START_VALUES:
            start = median_low(first)
            self._lowest = max(start + math.log(10.0), self._floor)
            growth = math.log(self._check.explosion_factor)
            self._threshold = max(start, 0.0) + growth - 1e-9  # tolerance for rounding
            self._sustained = self._threshold - min(SUSTAINED_BELOW, growth / 2)
        if len(first) == self._check.warmup:
            self._level = median_low(first)
            self._spread = sum(min(max(0.0, value - self._level), EARLY_JUMP) for value in first) / len(first)
            self._limit, self._first = min(self._next_jump(), self._sustained), None
        growing, new_jump = self._growth(size), leap and not self._jumping
        self._jumping = leap or self._grown > 0
        return growing or ("spike" if new_jump else "")

    def _judge(self, size: float) -> str:
        """Judge a value that is not clearly healthy."""
        jump, growth = size >= self._next_jump(), self._growth(size)
        new_jump, self._jumping = jump and not self._jumping, jump or self._grown > 0
        self._level += SMOOTHING * max(-MAX_DEVIATION, min(size - self._level, MAX_DEVIATION))
        self._limit = min(self._next_jump(), self._sustained)
        return growth or ("spike" if new_jump else "")

    def _growth(self, size: float) -> str:
        """Return `"explosion"` where growth has lasted and is reported for the first time, or has continued much further."""
        self._grown = self._grown + 1 if size >= self._sustained else 0
        if self._grown < self._check.patience or size < self._threshold or size < self._last_reported + REPORT_AGAIN_GROWTH:
            return ""
        self._last_reported = size
        return "explosion"


class Trend:
    """Monitors loss and gradient norm of the healthy steps of one fit, on the host.

    Args:
        check: thresholds; `policy.checks.trend`.

    Example:

        >>> trend = Trend(TrendCheck())
        >>> for step in range(100):
        ...     assert trend.push(step, 1.0, 1.0) == ()
        >>> trend.push(100, 1e5, 1.0)
        (Finding(site='loss', kind='spike', path='', nan=None, inf=None, size=None, value=100000.0),)
    """

    __slots__ = ("_enabled", "_loss", "_norm", "step")

    def __init__(self, check: TrendCheck | None = None):
        check = check or TrendCheck()
        self._enabled = check.enabled
        self._loss, self._norm = _Series("loss", check), _Series("gradients", check)
        self.step = -1

    def push(self, step: int, loss: float | None = None, gradient_norm: float | None = None) -> tuple[Finding, ...]:
        """Add the measurements of one healthy step and return the findings, usually none."""
        if not self._enabled:
            return ()
        self.step = step
        found: tuple[Finding, ...] = ()
        if loss and -math.inf < loss < math.inf:  # not NaN, not zero
            if loss < 0.0:
                self._loss.early = math.inf
            kind = self._loss.push(math.log(abs(loss)))
            if kind:
                found = (Finding("loss", cast(Kind, kind), value=loss),)
        if gradient_norm and -math.inf < gradient_norm < math.inf:
            kind = self._norm.push(math.log(abs(gradient_norm)))
            if kind:
                found = (*found, Finding("gradients", cast(Kind, kind), value=gradient_norm))
        return found

    def discard_pending(self) -> None:
        """Discard growth and jumps in progress, and keep the statistics. To be called after a rollback."""
        self._loss.discard_pending()
        self._norm.discard_pending()
