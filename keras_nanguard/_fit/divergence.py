"""A run that diverges while every number of it is finite: looked for now and then between two steps, on the host.

One sign alone decides nothing, as a healthy run can show any of them:

    high      the loss has settled at `rise` times its start, or has lost the share `lost` of all progress again
    growth    a kernel has grown by the factor `growth`, from what its layer began with or usually begins with
    dead      most kernels stand still, bit for bit, although they are trained
    violent   the first update was as large as the weights, and the loss was `rise` times its start soon after it
    stalled   the second half of the steps since the last look back has brought no progress
    rate      the same steps end at a clearly lower loss with a tenth of the learning rate, which is tried and undone

A run has diverged where the loss is high, or there has been no progress at all, while a kernel has grown or most are dead, and that
lasts; where the start was violent; where the loss stays high for `patience` steps at large updates. The rate has to be shown to be to
blame, where that can be tried. After a divergence, and at updates that are still large, a stall at such a rate counts as well, so that a
rate that was not lowered far enough is lowered again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_nanguard._backends import processes
from keras_nanguard._core import finiteness
from keras_nanguard._core.incident import Finding
from keras_nanguard._fit.kernels import bears, gain, kernels_of, relative_update
from keras_nanguard._fit.run import Run
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._policy.progress import STALLED, WINDOW, Level
from keras_nanguard._policy.settings import DivergenceCheck

__all__ = ["Divergence"]

CHECKPOINT = 100
"""Steps after a rollback, or after the start, at which it is asked first whether training has stalled; then after twice as many."""

LARGE_UPDATE = 0.1
"""Relative update of the first step above which a rate that brings no progress may be too high."""

VIOLENT_UPDATE = 0.4
"""The same above which the first updates of an adaptive optimizer replace the weights rather than train them."""

MAX_UPDATE = 0.25
"""The same up to which a rate that was lowered may be raised again."""

GROWN = 0.25
"""Share of the growth that is too much below which a snapshot counts as one from before it."""

VIOLENT_AFTER = 45
"""Step at which a violent start is judged: early enough to be run again, late enough for a trial to show something."""

FLAT = 0.9
"""Share of the loss of the first step from which on there has been no progress."""

NOISE = 1.5
"""Spreads by which a level has to exceed the best one to be distinguished from it."""

SUSPECT = 0.6
"""Share of what counts as lost from which on a lower rate is worth a trial."""

EXTREME = 30.0
"""Multiple of the start from which a level needs neither time nor a trial, where a kernel has grown as well."""

LASTING, FALLING = 20, 0.8
"""Steps for which a divergence has to last, and the share of an earlier level below which the loss is falling by itself."""

LOWER = 0.1
"""Factor of the learning rate in a trial."""

SLOW = 0.5
"""Share of the level at the last rollback above which progress is slow, and a higher rate worth a trial."""

HIGHER = 10.0**0.5
"""Factor of the learning rate in a trial of whether it was lowered too far."""

BETTER = 0.8
"""Share of the level below which the same steps have to end at a lower rate for the rate to be to blame."""

MEASURED_UNTIL = 10
"""Steps up to which the relative update of the first ones can be measured: under a warmup the first rate is 0."""


@dataclass(frozen=True, slots=True)
class _Loss:
    """What the loss shows at one look.

    Attributes:
        now: its level.
        high: whether it has settled far above its start, or most progress is lost again.
        suspect: whether much progress is lost again.
        flat: whether there has been no progress since the start.
    """

    now: Level
    high: bool = False
    suspect: bool = False
    flat: bool = False


@dataclass(frozen=True, slots=True)
class _Trial:
    """A lower learning rate to be tried.

    Attributes:
        now: the level that the steps have ended at.
        onset: the step from before which they are tried again.
        findings: what is reported where the rate is to blame.
        notes: what has led to it.
        otherwise: whether the rate counts as to blame where it cannot be tried.
    """

    now: Level
    onset: int
    findings: list[Finding]
    notes: tuple[str, ...]
    otherwise: bool


class Divergence:
    """Looks for divergence in one fit.

    Args:
        check: `policy.checks.divergence`.
    """

    def __init__(self, check: DivergenceCheck):
        self.check = check
        self._gains: dict[int, float] = {}
        self._asked = False
        self.start_over()

    def start_over(self) -> None:
        """Compare with nothing that was seen before a rollback."""
        self._kernels: dict[int, Any] = {}
        self._suspect_since: int | None = None
        self._shown_since: Level | None = None
        self._checkpoint = CHECKPOINT
        self._trial: _Trial | None = None
        self._higher: Level | None = None

    @np.errstate(all="ignore")
    def look(self, run: Run) -> list[Finding]:
        """Return what shows that a run has diverged; nothing where it has not."""
        progress = run.progress
        if math.isnan(progress.update) and 0 < run.counts.committed <= MEASURED_UNTIL and not run.counts.rollbacks:
            progress.update = relative_update(run)
        now = progress.note(run.history.last(WINDOW))
        if now is None or progress.signed or not self.check.enabled or processes.count() > 1:
            return []  # of several processes each sees a loss of its own, and they have to decide the same
        loss, strict = self._loss(run, now), 0.5 if run.recovery.diverged else 1.0
        growth, path = 1.0, ""
        dead: tuple[str, ...] = ()
        if loss.high or loss.suspect or loss.flat:
            growth, path = max(self._growth(run), default=(1.0, ""))
            dead = self._dead(run) if loss.high or growth >= self.check.growth else ()
        notes = [self._words(run, loss)]
        if growth >= self.check.growth * strict:
            notes.append(f"{path} has grown {growth:.3g}-fold since the start.")
        if dead:
            notes.append(f"{len(dead)} kernels no longer change, bit for bit, {dead[0]} among them.")
        shown = self._shown(loss, growth / strict, dead)
        if self._settled(run, loss, shown):
            extreme = loss.now.value >= EXTREME * (progress.start or math.inf) and growth >= self.check.growth
            if not extreme:
                onset = self._before_growth(run, progress.onset(run.history.series), growth / strict)
                self._trial = _Trial(now, onset, self._findings(now, growth, path, dead), tuple(notes), True)
                return []
        elif not self._to_blame(run, loss, growth, notes):
            return []
        progress.notes = tuple(notes)
        self._trial = None
        return self._findings(now, growth, path, dead)

    def _findings(self, now: Level, growth: float, path: str, dead: tuple[str, ...]) -> list[Finding]:
        found = [Finding("loss", "divergence", value=now.value)]
        if growth >= self.check.growth:
            found.append(Finding("weights", "divergence", path, value=growth))
        return [*found, *(Finding("gradients", "stuck", place, 0, 0, None, 0.0) for place in dead)]

    def tried(self, run: Run) -> list[Finding]:
        """Try a lower rate where the last look has asked for it, and return what that shows. The variables hold the state."""
        trial, self._trial = self._trial, None
        higher, self._higher = self._higher, None
        if trial is None:
            if higher is not None:
                self._raise(run, higher)
            return []
        notes = self._better_lower(run, trial)
        if notes is None and trial.otherwise:
            notes = trial.notes
        if not notes:
            self._shown_since = None
            return []
        run.progress.begins_at, run.progress.notes = trial.onset, notes
        return trial.findings

    def _loss(self, run: Run, now: Level) -> _Loss:
        progress, check = run.progress, self.check
        best, start = progress.best, progress.start
        if best is None or start is None:
            return _Loss(now)
        risen = now.value >= check.rise * start
        lost = progress.lost(now) if now.value - best.value >= NOISE * best.spread else 0.0
        enough = check.lost * (0.5 if run.recovery.diverged else 1.0)
        return _Loss(now, risen or lost >= enough, risen or lost >= SUSPECT * check.lost, now.value >= FLAT * start)

    def _words(self, run: Run, loss: _Loss) -> str:
        progress = run.progress
        best = progress.best.value if progress.best is not None else math.nan
        lowest = f", and had been {best:.3g}" if best < FLAT * (progress.start or 0.0) else ""
        return f"The loss has settled at {loss.now.value:.3g}; it began at {progress.start or 0.0:.3g}{lowest}."

    def _shown(self, loss: _Loss, growth: float, dead: tuple[str, ...]) -> bool:
        """Whether loss and weights together show a divergence."""
        grown = growth >= self.check.growth
        return (loss.high and (grown or bool(dead))) or (loss.flat and grown)

    def _settled(self, run: Run, loss: _Loss, shown: bool) -> bool:
        """Whether what is shown lasts, and the loss does not fall by itself meanwhile; an explosion does not have to."""
        first = self._shown_since
        if not shown:
            self._shown_since = None
            return False
        if loss.now.value >= EXTREME * (run.progress.start or math.inf):
            return True
        if first is None or loss.now.value < FALLING * first.value:
            self._shown_since = loss.now
            return False
        return loss.now.step - first.step >= LASTING

    def _to_blame(self, run: Run, loss: _Loss, growth: float, notes: list[str]) -> bool:
        """Whether the learning rate is shown to be to blame for a loss that is high, stalled, or was so at once."""
        if self._violent(run, loss.now):
            share = f"{self._update(run):.0%}"
            told = f"The first update was as large as {share} of the weights, and the loss rose to {_worst(run):.3g} after it."
            self._trial = _Trial(loss.now, 0, self._findings(loss.now, 1.0, "", ()), (told, *notes), loss.high)
            return False
        if self._stalled(run, loss, notes):
            if run.recovery.diverged:
                found = self._findings(loss.now, 1.0, "", ())
                self._trial = _Trial(loss.now, run.progress.restored or 0, found, tuple(notes), True)
                return False
            run.progress.begins_at = 0 if max([growth, *(g for g, _ in self._growth(run))]) >= self.check.growth else None
            return run.progress.begins_at is not None
        if not loss.suspect or not self._update(run) >= LARGE_UPDATE or _falling(run, loss.now):
            self._suspect_since = None
            return False
        since = self._suspect_since = run.step if self._suspect_since is None else self._suspect_since
        if run.step - since < self.check.patience:
            return False
        self._suspect_since = run.step + run.step - since  # twice as long until the next trial
        self._trial = _Trial(loss.now, run.progress.onset(run.history.series), self._findings(loss.now, 1.0, "", ()), tuple(notes), False)
        return False

    def _violent(self, run: Run, now: Level) -> bool:
        """Whether the first updates of the fit were as large as the weights, and the loss was the worse for them.

        It is asked once, when the loss no longer falls fast by itself.
        """
        progress = run.progress
        if self._asked or progress.start is None or now.step + 1 < VIOLENT_AFTER or _falling(run, now):
            return False
        self._asked = True
        if run.recovery.diverged or progress.since:
            return False
        large = VIOLENT_UPDATE * bears(run.train_state().optimizers)
        return _worst(run) >= self.check.rise * progress.start and self._update(run) >= large

    def _stalled(self, run: Run, loss: _Loss, notes: list[str]) -> bool:
        """Whether a rate that is still high has brought no progress for as long as it has been in use."""
        progress, diverged = run.progress, run.recovery.diverged
        if loss.now.step + 1 - progress.since < self._checkpoint:
            return False
        self._checkpoint *= 2
        self._higher = loss.now if diverged and loss.now.value > SLOW * progress.level_at_rollback else None
        halves = progress.halves(loss.now)
        if halves is None or halves[1] <= STALLED * halves[0] or not self._update(run) >= (LARGE_UPDATE if diverged else 1.0):
            return False
        notes[:] = [f"Since step {progress.since + 1} the loss has not fallen: its lowest levels were {halves[0]:.3g} and {halves[1]:.3g}."]
        return True

    def _update(self, run: Run) -> float:
        """Return the relative update that the present rate would have made at the start; NaN where it is not known."""
        return run.progress.update * max(map(keras_optimizers.learning_rate, run.train_state().optimizers))

    def _better_lower(self, run: Run, trial: _Trial) -> tuple[str, ...] | None:
        """Return what shows that the steps since a snapshot end at a clearly lower loss with a lower rate, nothing where they do not.

        `None` where that cannot be tried. The snapshot is the newest from before the onset or, where the steps since are not all
        known, the oldest later one from which they are.
        """
        first = run.ring.before(trial.onset)
        if len(run.train_state().optimizers) != 1:
            return None
        for snapshot in [s for s in run.ring.snapshots if first is None or s.step >= first.step]:
            tried = run.try_rate(LOWER, snapshot)
            if tried is not None:
                steps = run.step - snapshot.step
                note = f"The last {steps} steps, tried again with a tenth of the learning rate, end at a loss of {tried.value:.3g}."
                return (*trial.notes, note) if tried.value < BETTER * trial.now.value else ()
        return None

    def _raise(self, run: Run, now: Level) -> None:
        """Raise a rate that was lowered too far: where the last steps end at a clearly lower loss with a higher one."""
        rates = list(run.recovery.rates.values())
        lowest = run.ring.before(run.progress.restored or 0)
        known = [s for s in run.ring.snapshots if lowest is not None and lowest.step <= s.step < run.step - WINDOW]
        most = MAX_UPDATE * bears(run.train_state().optimizers)
        if len(rates) != 1 or not rates[0].value * HIGHER <= rates[0].limit * 1.001 or self._update(run) * HIGHER > most:
            return
        for snapshot in known:
            tried = run.try_rate(HIGHER, snapshot)
            if tried is not None:
                if tried.value < BETTER * now.value:
                    rates[0].raise_to(rates[0].factor * HIGHER)
                    run.say(
                        f"NanGuard: step {run.step}: the last {run.step - snapshot.step} steps, tried again, end at a loss of "
                        f"{tried.value:.3g} with a learning rate of {rates[0].value:.3g}, and ended at {now.value:.3g} without it. "
                        "It is raised to that."
                    )
                return

    def _before_growth(self, run: Run, onset: int, growth: float) -> int:
        """Return the onset, or where a kernel has grown the step of the newest snapshot from before it in which none had."""
        if growth < self.check.growth:
            return onset
        for snapshot in reversed([s for s in run.ring.snapshots if 0 < s.step <= onset and run.ring.at_hand(s)]):
            known = [(v, snapshot.value(v)) for v in kernels_of(run)]
            if all(gain(array) < GROWN * self.check.growth * self._gains.get(id(v), math.inf) for v, array in known if array is not None):
                return snapshot.step
        return 0

    def _growth(self, run: Run) -> Iterator[tuple[float, str]]:
        """Yield by how much each kernel has grown, and its path."""
        for variable in kernels_of(run):
            first = self._gains.get(id(variable))
            if first is None:
                start = run.ring.start
                array = start.value(variable) if start is not None and run.ring.at_hand(start) else None
                first = self._gains[id(variable)] = math.inf if array is None else max(gain(array), 1.0)
            yield gain(keras_variables.view(variable)) / first, str(variable.path)

    def _dead(self, run: Run) -> tuple[str, ...]:
        """Return the kernels that stand still since the last look, where that are most of them."""
        if not all(keras_optimizers.learning_rate(o) > 1e-12 for o in run.train_state().optimizers):
            return ()
        before, kernels = self._kernels, kernels_of(run)
        self._kernels = {id(v): finiteness.fingerprint(keras_variables.view(v)) for v in kernels}
        compared = [v for v in kernels if id(v) in before]
        start = run.ring.start
        known = [(v, start.value(v)) for v in compared] if start is not None and run.ring.at_hand(start) else []
        first = {id(v): value for v, value in known if value is not None}
        still = [v for v in compared if np.array_equal(before[id(v)], self._kernels[id(v)])]
        still = [v for v in still if id(v) not in first or not np.array_equal(first[id(v)], keras_variables.view(v))]
        return tuple(str(v.path) for v in still) if len(compared) > 1 and len(still) > len(compared) / 2 else ()


def _falling(run: Run, now: Level) -> bool:
    """Whether the loss has fallen clearly since the look before."""
    levels = run.progress.levels
    return len(levels) > 1 and now.value < FALLING * levels[-2].value


def _worst(run: Run) -> float:
    """Return the largest loss of the first steps of the fit."""
    return max((m.loss for m in run.history.first(run.step)), default=0.0)
