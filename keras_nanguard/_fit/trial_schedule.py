"""When trials of a finite run are worth their time: at the end of a window of steps, if its losses
do not show progress, and seldom enough.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev

from keras_nanguard._core.history import WINDOW
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.trial import STANDARD_ERRORS

SHORTEST, LONGEST = 32, 1000
"""Bounds of a window in steps. A window is an epoch within these bounds; 32 steps give 8 held-out
batches.
"""

FALLS = 0.9
"""If the median loss of a window is below this share of the previous one, the run makes progress
and trials can wait.
"""

FALLEN = 0.5
"""Trials can wait if the loss is also below this share of that of the first steps."""

REST_LEARNED, REST, REST_DIVERGED = 10.0, 1.0, 0.1
"""Minimum number of steps until the next trials, as a multiple of the steps of the last ones: of a
run that has learned something (trials take at most a tenth of the time), of one that has not (at
most half), and of one that has diverged before. It doubles each time. It is a tenth if the loss is
clearly higher than in an earlier window since; and 0 for the first `LONGEST` steps of trials if the
loss of a run that has not learned anything does not clearly fall.
"""


class Schedule:
    """When trials are worth their time."""

    def __init__(self) -> None:
        self._looked, self._wait = 0, 0.0
        self._spent, self._falls, self._may_wait = 0, True, True
        self._window: Sequence[float] = ()
        self._lowest: Sequence[float] = ()

    def restart(self) -> None:
        """Forget the trials so far, as after a rollback."""
        self._wait, self._spent = 0.0, 0

    def end_window(self, run: Run, began: int) -> bool:
        """Note the losses of a window that began after a step; return whether to run trials now."""
        losses = [loss for step, loss, _ in run.history.since(began)]
        if len(losses) < WINDOW:
            return False
        before, self._window = self._window, losses
        self._falls = not before or _below(losses, before)
        first = [m.loss for m in run.history.first(run.step)] or [math.inf]
        falls = median(losses) < FALLS * median(before or [math.inf])
        if falls and median(losses[-WINDOW:]) < FALLEN * min(first):
            return False
        if not (self._falls or self._may_wait or self._spent > LONGEST):
            self._wait = 0.0
        wait = self._wait
        if _below(self._lowest, losses):
            wait /= REST_LEARNED
        elif _mean_log(losses) < _mean_log(self._lowest):
            self._lowest = losses
        return run.step >= self._looked + wait

    def note(self, step: int, steps: int, learned: bool, diverged: bool) -> None:
        """Note what trials took, and rest.

        Args:
            step: the step of the run.
            steps: number of steps of the trials.
            learned: whether a few batches showed that the run has learned something.
            diverged: whether the rate was lowered for a divergence before.
        """
        self._spent += steps
        rest = REST_DIVERGED if diverged else REST
        rest = REST_LEARNED if learned else rest
        self._may_wait = learned or diverged
        self._wait = max(2 * self._wait, rest * steps)
        self._looked, self._lowest = step, self._window


def _below(losses: Sequence[float], others: Sequence[float]) -> bool:
    """Whether positive losses are clearly lower than others, of other batches: in the mean of their
    logarithms, which a few huge losses do not hide.
    """
    if min(len(losses), len(others)) < WINDOW:
        return False
    both = [stdev(map(math.log, some)) / math.sqrt(len(some)) for some in (losses, others)]
    error = math.hypot(*both)
    return _mean_log(others) - _mean_log(losses) > STANDARD_ERRORS * error


def _mean_log(losses: Sequence[float]) -> float:
    """Return the mean logarithm of positive losses, infinity if there are none."""
    return fmean(map(math.log, losses)) if losses else math.inf
