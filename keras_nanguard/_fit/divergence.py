"""Detects a run that is lost although every number is finite. It acts only on proof.

An unusual finite loss proves nothing: losses rise by design with rare classes, heavy tails, growing
targets, schedules and curricula. So levels of the loss only decide *when* to run trials: at the end
of a window of one epoch (or 1000 steps if an epoch is longer), if its losses do not show progress,
and seldom enough. What the trials have to show is in `proof`.

The action is then on probation: a window later, or after the last step of the fit, the abandoned
state is compared with the new one, again on the same batches. If the new one is not clearly better,
state and rate are restored, and this guard does not act on finite numbers again.

Most healthy runs are recognized on 8 batches, and the next trials come after ten times as many
steps as the last ones took.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median, stdev

import numpy as np

from keras_nanguard._backends import processes
from keras_nanguard._core.history import WINDOW
from keras_nanguard._fit.proof import HELD_OUT, MOST_HELD_OUT, Lost, TrialResult, look_for_proof
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.trial import STANDARD_ERRORS, State, clearly_lower, trial
from keras_nanguard._keras.all_or_none import write_all
from keras_nanguard._keras.losses import trains_by_compiled_loss

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
clearly higher than in an earlier window since; and 0 for the first `LONGEST` steps of trials if a
trial brought progress, but the loss of the run did not clearly fall afterwards.
"""

SHARE, SECONDS = 0.1, 30.0
"""Trials that look for a divergence may take these seconds, and in addition this share of the time
of the planned fit, but no longer than the fit has taken so far without them.
"""


class Divergence:
    """Detects a diverged run in one fit.

    Attributes:
        enabled: whether it looks for a divergence.
        schedule: when trials are worth their time; the next fit continues it.
    """

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self._since = 0
        self.schedule, self._budget = Schedule(), Budget()
        self._probation: Lost | None = None
        self._rollbacks = 0

    def plan(self, steps: int) -> None:
        """Note the number of steps that the fit is to have."""
        self._budget.planned = steps

    def follow(self, earlier: Divergence, step: int) -> None:
        """Continue the schedule of an earlier fit, which ended at a step."""
        self.schedule = earlier.schedule
        self.schedule.begin_fit(step)

    def has_window(self, step: int) -> bool:
        """Whether a window that ends at this step is long enough for a check."""
        return self.enabled and step - self._since >= SHORTEST

    def next_look(self, step: int) -> float:
        """Return the step of the next check at the latest; an epoch may end before."""
        return step + LONGEST if self.enabled else math.inf

    @np.errstate(all="ignore")
    def look(self, run: Run) -> Lost | None:
        """Return the proof that the run is lost, or `None`. Its action is on probation.

        If a trial raises, such as for lack of memory, this guard does not check again.

        Raises:
            StateLostError: if the state could not be restored after the trials.
        """
        began, self._since = self._since, run.step
        with run.optional("check for divergence"):
            if run.counts.rollbacks != self._rollbacks:
                self._rollbacks = run.counts.rollbacks
                self.schedule.restart()
            if not (self._can_compare(run) and self.schedule.end_window(run, began)):
                return None
            if (seconds := self._budget.left(run.step)) <= 0.0:
                return None
            with self._budget.measured():
                result, steps = look_for_proof(run, seconds)
            if isinstance(result, Lost):
                self._probation = result
                return result
            self.schedule.note(run.step, steps, result, run.recovery.lowering.diverged)
            return None
        self.disable()
        return None

    def disable(self) -> None:
        """Do not check again."""
        self._probation, self.enabled = None, False

    def acted(self, run: Run) -> float:
        """Begin the probation of the action, if one was done; return the step of the next check."""
        if self._probation is not None:
            _write(run, self._probation.settings)
        self.schedule.restart()
        return self.next_look(run.step)

    def _can_compare(self, run: Run) -> bool:
        """Whether states can be compared here by the loss, and training minimizes it."""
        own = trains_by_compiled_loss(run.model)
        positive = all(loss > 0.0 for _, loss in run.history.series)
        alone = processes.count() == 1
        return (
            self.enabled and alone and own and positive and len(run.train_state().optimizers) == 1
        )

    @property
    def on_probation(self) -> bool:
        """Whether an action is on probation."""
        return self._probation is not None

    @np.errstate(all="ignore")
    def judge(self, run: Run) -> bool:
        """Compare the state with that before the action on probation, and restore that one if the
        action did not help; return whether it is restored. Without enough batches the action stays
        on probation. If a trial raises, this guard does not check again.

        Raises:
            StateLostError: if the state could not be restored after the trials.
        """
        if (probation := self._probation) is None:
            return False
        self._since, batches = run.step, run.recent.last(MOST_HELD_OUT)
        with run.optional("check for divergence"):
            if len(batches) < HELD_OUT or not self._can_compare(run):
                return False
            with trial(run) as trying:
                if trying is None:
                    return False
                settings = trying.settings(trying.trained(trying.present, batches[:HELD_OUT]))
                abandoned = {**probation.abandoned, **settings}
                losses, before = (trying.losses(s, batches) for s in (trying.present, abandoned))
            self._probation = None
            if clearly_lower(losses, before):
                return False
            self.enabled = False
            _write(run, abandoned)
            run.count_replacement()
            run.recovery.restore_rates(probation.rates)
            run.plan_changes()
            run.ring.go_back(probation.restart.time._replace(good=run.counts.good), diverged=True)
            run.recent.restart()
            text = "lower learning rate did not help. State and learning rate are restored."
            run.log.line(f"NanGuard: the {text}")
            run.record_factor(f"The {text}")
            return True
        self.disable()
        return False


def _write(run: Run, state: State) -> None:
    """Write all variables that have a value in a state."""
    write_all((v, state[id(v)]) for v in run.train_state().kept if id(v) in state)


class Budget:
    """The time that the trials of one fit that look for a divergence may take.

    Args:
        clock: returns the time in seconds.

    Attributes:
        planned: number of steps that the fit is to have, 0 if unknown.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.planned = 0
        self._clock, self._began, self._spent = clock, clock(), 0.0

    def left(self, step: int) -> float:
        """Return the time that trials may still take after a step, in seconds."""
        passed = self._clock() - self._began - self._spent
        whole = passed * max(self.planned / max(step, 1), 1.0)
        return SECONDS + min(SHARE * whole, passed) - self._spent

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Return a context of trials, whose time counts."""
        began = self._clock()
        try:
            yield
        finally:
            self._spent += self._clock() - began


class Schedule:
    """When trials are worth their time."""

    def __init__(self) -> None:
        self._looked, self._wait = 0, 0.0
        self._spent, self._progress = 0, False
        self._window: Sequence[float] = ()
        self._lowest: Sequence[float] = ()

    def restart(self) -> None:
        """Forget the trials so far, as after a rollback."""
        self._wait, self._spent = 0.0, 0

    def begin_fit(self, step: int) -> None:
        """Count the steps anew, as in the next fit after one that ended at this step."""
        self._looked -= step

    def end_window(self, run: Run, began: int) -> bool:
        """Note the losses of a window that began after a step; return whether to run trials now."""
        losses = [m.loss for m in run.history.since(began)]
        if len(losses) < WINDOW:
            return False
        before, self._window = self._window, losses
        first = [m.loss for m in run.history.first(run.step)] or [math.inf]
        falls = median(losses) < FALLS * median(before or [math.inf])
        if falls and median(losses[-WINDOW:]) < FALLEN * min(first):
            return False
        wait = self._wait
        if self._progress and self._spent <= LONGEST and not _below(losses, before):
            wait = 0.0
        if _below(self._lowest, losses):
            wait /= REST_LEARNED
        elif _mean_log(losses) < _mean_log(self._lowest):
            self._lowest = losses
        return run.step >= self._looked + wait

    def note(self, step: int, steps: int, result: TrialResult, diverged: bool) -> None:
        """Note what trials took, and rest.

        Args:
            steps: number of steps of the trials.
            diverged: whether the rate was lowered for a divergence before.
        """
        self._spent, self._progress = self._spent + steps, result == "progress"
        rest = REST_DIVERGED if diverged else REST
        rest = REST_LEARNED if result == "learned" else rest
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
