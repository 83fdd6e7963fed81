"""Finite trouble in loss and gradient norm: jumps, and growth that will overflow. Level 0: imports no backend.

Both are judged on the logarithm of the magnitude, against what the run itself has shown to be healthy, and both err to
silence: a false alarm costs a healthy run more than a late one costs a sick run, which overflows soon anyway and is
refused then. With `v` the magnitude of the loss or of the gradient norm:

    start      median of the first five values
    level      of log v: median of the first `warmup` values, then a running mean to which no value counts for more
               than a factor of 20
    spread     running mean of how far log v lies above the level
    spike      v > 10 * start  and  v > floor  and  log v > level + max(log spike_factor, min(20 * spread, log 1e9))
    early      v > 1e6 * median of the values so far  and  v > floor, from the fourth value to the end of the warm-up: a spike
    explosion  v > explosion_factor * max(start, 1), and the last `patience` values were within a hundredth of that

Values that are not finite, and exact zeros, say nothing about a magnitude and never enter. A spike enters as a factor
of 20, so that a lasting shift becomes the new level after some steps. Where log v is normally distributed, 20 spreads
are 8 standard deviations.
"""

from __future__ import annotations

import math
from statistics import median_low

from keras_nanguard._core.incident import Finding
from keras_nanguard._policy.settings import TrendCheck

__all__ = ["Trend"]

RATE = 0.05
"""Weight of a new value in the running means: they look back over about 20 values."""

CLIP = 3.0
"""The most that one value counts for, as a natural logarithm."""

SPREADS = 20.0
"""How many spreads above the level a spike lies, at least."""

STARTS = 5
"""From how many values the magnitude at the start is taken."""

SUSTAINED = math.log(100.0)
"""How far below the bar of an explosion the values before it may lie."""

FURTHEST = math.log(1e9)
"""A jump by that factor is a spike, however widely the values spread."""

LEAP, FEWEST = math.log(1e6), 3
"""A jump by that factor is a spike even while the spread is being learned, as soon as there are so many values before it."""

REPORT_AGAIN_GROWTH = math.log(1000.0)
"""An explosion is told again when it has grown by this much more."""

FLOORS = {"loss": math.log(1.0), "gradients": math.log(10.0)}
"""A jump to less than this is no trouble, however small the level was."""


class _Series:
    """What loss or gradient norm has shown so far."""

    __slots__ = (
        "_bar",
        "_check",
        "_first",
        "_floor",
        "_grown",
        "_high",
        "_level",
        "_limit",
        "_lowest",
        "_margin",
        "_spread",
        "_sustained",
        "_told",
    )

    def __init__(self, site: str, check: TrendCheck):
        self._check, self._floor, self._margin = check, FLOORS[site], math.log(check.spike_factor)
        self._first: list[float] | None = []
        self._level = self._spread = 0.0
        self._limit = self._lowest = -math.inf
        self._bar = self._sustained = math.inf
        self.settle()

    def settle(self) -> None:
        """Forget what is under way and keep what was learned."""
        self._grown, self._high, self._told = 0, False, -math.inf

    def push(self, size: float) -> str:
        """Take the logarithm of one magnitude in and return the kind of trouble, `""` where it is healthy.

        This runs twice in every step: it holds no call, and does by hand what `_next_jump` says.
        """
        if size >= self._limit:
            return self._learn(size) if self._first is not None else self._judge(size)
        above = size - self._level
        if above > 0.0:
            if above > CLIP:
                above = CLIP
            spread = self._spread + RATE * (above - self._spread)
        else:
            if above < -CLIP:
                above = -CLIP
            spread = self._spread * (1.0 - RATE)
        self._spread = spread
        level = self._level = self._level + RATE * above
        margin = SPREADS * spread
        limit = level + (self._margin if margin < self._margin else margin if margin < FURTHEST else FURTHEST)
        if limit < self._lowest:
            limit = self._lowest
        self._limit = self._sustained if limit > self._sustained else limit
        self._high = False
        self._grown = 0
        return ""

    def _next_jump(self) -> float:
        """Return the size from which a value is a jump."""
        return max(self._level + max(min(SPREADS * self._spread, FURTHEST), self._margin), self._lowest)

    def _learn(self, size: float) -> str:
        """Take one of the first values in: only growth and a leap can be judged yet."""
        first = self._first
        if first is None:
            return ""
        leap = len(first) >= FEWEST and size >= max(median_low(first) + LEAP, self._floor)
        first.append(size)
        if len(first) == STARTS:
            start = median_low(first)
            self._lowest = max(start + math.log(10.0), self._floor)
            growth = math.log(self._check.explosion_factor)
            self._bar = max(start, 0.0) + growth - 1e-9  # so that rounding hides none
            self._sustained = self._bar - min(SUSTAINED, growth / 2)
        if len(first) == self._check.warmup:
            self._level = median_low(first)
            self._spread = sum(min(max(0.0, value - self._level), LEAP) for value in first) / len(first)
            self._limit, self._first = min(self._next_jump(), self._sustained), None
        told, fresh = self._growth(size), leap and not self._high
        self._high = leap or self._grown > 0
        return told or ("spike" if fresh else "")

    def _judge(self, size: float) -> str:
        """Judge a value that is not plainly healthy."""
        jump, growth = size >= self._next_jump(), self._growth(size)
        fresh, self._high = jump and not self._high, jump or self._grown > 0
        self._level += RATE * max(-CLIP, min(size - self._level, CLIP))
        self._limit = min(self._next_jump(), self._sustained)
        return growth or ("spike" if fresh else "")

    def _growth(self, size: float) -> str:
        """Return `"explosion"` where growth has lasted and is told for the first time, or has gone on much further."""
        self._grown = self._grown + 1 if size >= self._sustained else 0
        if self._grown < self._check.patience or size < self._bar or size < self._told + REPORT_AGAIN_GROWTH:
            return ""
        self._told = size
        return "explosion"


class Trend:
    """Watches loss and gradient norm of the healthy steps of one fit, on the host.

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
        """Take in what one healthy step measured and return what is wrong with it: nothing, as a rule."""
        if not self._enabled:
            return ()
        self.step = step
        found: tuple[Finding, ...] = ()
        if loss and -math.inf < loss < math.inf:  # not NaN, not zero
            kind = self._loss.push(math.log(abs(loss)))
            if kind:
                found = (Finding("loss", kind, value=loss),)
        if gradient_norm and -math.inf < gradient_norm < math.inf:
            kind = self._norm.push(math.log(abs(gradient_norm)))
            if kind:
                found = (*found, Finding("gradients", kind, value=gradient_norm))
        return found

    def settle(self) -> None:
        """Call this after a rollback: what was under way is over, what was learned stays."""
        self._loss.settle()
        self._norm.settle()
