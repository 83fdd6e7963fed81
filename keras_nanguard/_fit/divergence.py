"""A run that diverges while every number of it is finite: looked for now and then between two steps, on the host.

One sign alone decides nothing, as a healthy run can show any of them:

    high      the loss has settled at `rise` times its start, or has lost the share `lost` of all progress again
    growth    a kernel has grown by the factor `growth`, from what its layer began with or usually begins with
    dead      most kernels stand still, bit for bit, although they are trained
    violent   the first update was a large share of the weights, and the loss was `rise` times its start soon after it
    stalled   the second half of the steps since the last look back has brought no progress
    rate      the same steps end at a clearly lower loss with a tenth or a hundredth of the learning rate, which is tried and undone
    batches   the same steps end at a clearly lower loss without the few batches at which loss or gradients have jumped, tried likewise

A run has diverged where the loss is high, or there has been no progress at all, while a kernel has grown or most are dead, and that
lasts; where the start was violent; where the loss stays high for `patience` steps at large updates. The rate has to be shown to be to
blame, where that can be tried. After a divergence, and at updates that are still large, a stall at such a rate counts as well, so that a
rate that was not lowered far enough is lowered again. After a jump of loss or gradients it is tried how the run would have gone without
these batches: where that is clearly better, it is a lasting spike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from keras_nanguard._backends import processes
from keras_nanguard._core.incident import Finding
from keras_nanguard._fit import another_way
from keras_nanguard._fit.another_way import Suspicion
from keras_nanguard._fit.kernels import Kernels, bears, predicted_update, relative_update
from keras_nanguard._fit.run import Run
from keras_nanguard._policy.outliers import Outliers
from keras_nanguard._policy.progress import FALLING, NOISE, STALLED, WINDOW, Level
from keras_nanguard._policy.settings import DivergenceCheck

__all__ = ["Divergence"]

CHECKPOINT = 100
"""Steps after a rollback, or after the start, at which it is asked first whether training has stalled; then after twice as many."""

VIOLENT_AFTER = 45
"""Step at which a violent start is judged: early enough for its steps to be run again, and a trial shows something by then."""

FLAT = 0.9
"""Share of the loss of the first step from which on there has been no progress."""

LEARNT = 0.05
"""Share of the loss of the first step below which a run that makes progress goes well: any lower rate would end at a lower loss soon."""

SUSPECT = 0.6
"""Share of what counts as lost from which on another way is worth a trial."""

EXTREME = 30.0
"""Multiple of the start from which a level needs no time, and where a kernel has grown as well no trial."""

AFTER_DIVERGENCE = 0.5
"""Factor of what counts as lost, and as growth, once the run has diverged before."""

CLEARLY = 3.0
"""Spreads of the present level by which it has to exceed the best one for a snapshot to be doubtful: losses of few rows scatter."""

LASTING = 20
"""Steps for which a divergence has to last."""

NEAR = 16
"""Steps between a jump and the onset of what it has led to, at most."""

PAUSE = 100
"""Steps after which another step that stands out is judged; twice as many after each."""

SLOW = 0.5
"""Share of the level at the last rollback above which progress is slow, and a higher rate worth a trial."""

MEASURED_UNTIL = 10
"""Steps up to which the relative update of the first ones can be measured: under a warmup the first rate is 0."""


@dataclass(frozen=True, slots=True)
class _Look:
    """What one look shows.

    Attributes:
        now: the level of the loss.
        high: whether it has settled far above its start, or most progress is lost again.
        suspect: whether much progress is lost again.
        flat: whether there has been no progress since the start.
        growth, path: by how much the kernel has grown that has grown most, and which one that is.
        grown: whether that is too much.
        dead: the kernels that stand still.
        notes: all of that in sentences.
    """

    now: Level
    high: bool
    suspect: bool
    flat: bool
    growth: float
    path: str
    grown: bool
    dead: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is reported of a divergence."""
        found = [Finding("loss", "divergence", value=self.now.value)]
        if self.grown:
            found.append(Finding("weights", "divergence", self.path, value=self.growth))
        return (*found, *(Finding("gradients", "stuck", place, 0, 0, None, 0.0) for place in self.dead))


class Divergence:
    """Looks for divergence in one fit.

    Args:
        check: `policy.checks.divergence`.

    Attributes:
        doubtful: whether the last look has shown a loss that is high, or weights that have grown: the state is finite, and may be doomed.
    """

    def __init__(self, check: DivergenceCheck):
        self.check = check
        self.doubtful = False
        self._kernels, self._outliers = Kernels(), Outliers()
        self._asked = self._reported = False
        self._judged, self._pause, self._again = -1, PAUSE, 0
        self.start_over()

    def start_over(self) -> None:
        """Compare with nothing that was seen before a rollback."""
        self._kernels.start_over()
        self._outliers.start_over()
        self._suspect_since: int | None = None
        self._shown_since: Level | None = None
        self._checkpoint = CHECKPOINT
        self._suspicion: Suspicion | None = None
        self._higher: Level | None = None
        self.doubtful = False

    @np.errstate(all="ignore")
    def look(self, run: Run) -> list[Finding]:
        """Return what shows that a run has diverged; nothing where it has not, or where another way has to be tried first."""
        progress = run.progress
        if math.isnan(progress.update) and 0 < run.counts.committed <= MEASURED_UNTIL and not run.counts.rollbacks:
            progress.update = relative_update(run)
        if progress.start is None:
            progress.start = next((m.loss for m in run.history.first(run.step)), None)
        now = progress.note(run.history.last(WINDOW))
        if now is None or not self._can_tell(run):
            return []
        self._note_outliers(run)
        look = self._look(run, now)
        best = progress.best or now
        self.doubtful = look.grown or (look.high and now.value - best.value >= CLEARLY * now.spread)
        signs = (self._shown, self._violent, self._stalled, self._lasting, self._outlier)
        suspicion = next((found for sign in signs if (found := sign(run, look)) is not None), None)
        if suspicion is None or suspicion.jumped or not suspicion.sure:
            self._suspicion = suspicion
            return []
        return self._blamed(run, suspicion)

    def _can_tell(self, run: Run) -> bool:
        """Whether divergence is looked for: of several processes each sees a loss of its own, and they have to decide the same."""
        return self.check.enabled and not run.progress.signed and processes.count() == 1

    def _note_outliers(self, run: Run) -> None:
        """Look at the steps since the last look for those that stand out."""
        self._outliers.add(run.history.since(self._outliers.seen + 1))

    def tried(self, run: Run) -> list[Finding]:
        """Try another way where the last look has asked for it, and return what that shows. The variables hold the state."""
        suspicion, self._suspicion = self._suspicion, None
        higher, self._higher = self._higher, None
        shown = another_way.tried(run, suspicion, self.check) if suspicion is not None else None
        if shown is not None:
            return self._blamed(run, shown)
        if higher is not None:
            another_way.raise_rate(run, higher, self.check)
        if suspicion is None:
            return []
        self._shown_since = None
        if suspicion.reported and run.policy.checks.trend.enabled and not self._reported:
            self._reported = True
            return [Finding("loss", "spike", value=suspicion.now.value)]
        return []

    @staticmethod
    def _blamed(run: Run, suspicion: Suspicion) -> list[Finding]:
        progress = run.progress
        progress.begins_at, progress.left_out, progress.notes = suspicion.onset, suspicion.without, suspicion.notes
        progress.shown = suspicion.factor
        return list(suspicion.findings)

    def _look(self, run: Run, now: Level) -> _Look:
        progress, check = run.progress, self.check
        factor = AFTER_DIVERGENCE if run.recovery.diverged else 1.0
        best, start = progress.best or now, progress.start or math.inf
        risen = now.value >= check.rise * start
        lost = progress.lost(now) if now.value - best.value >= NOISE * best.spread else 0.0
        high, suspect = risen or lost >= check.lost * factor, risen or lost >= SUSPECT * check.lost
        flat = now.value >= FLAT * start
        growth, path = self._kernels.growth(run) if high or suspect or flat else (1.0, "")
        grown = growth >= check.growth * factor
        dead = self._kernels.dead(run) if high or growth >= check.growth else ()
        lowest = f", and had been {best.value:.3g}" if best.value < FLAT * start else ""
        notes = [f"The loss has settled at {now.value:.3g}; it began at {start:.3g}{lowest}."]
        if grown:
            notes.append(f"{path} has grown {growth:.3g}-fold since the start.")
        if dead:
            notes.append(f"{len(dead)} kernels no longer change, bit for bit, {dead[0]} among them.")
        return _Look(now, high, suspect, flat, growth, path, grown, dead, tuple(notes))

    def _shown(self, run: Run, look: _Look) -> Suspicion | None:
        """Loss and weights together show a divergence that lasts, where the loss does not fall by itself; an explosion need not last."""
        first, progress = self._shown_since, run.progress
        if not ((look.high and (look.grown or look.dead)) or (look.flat and look.grown)):
            self._shown_since = None
            return None
        extreme = look.now.value >= EXTREME * (progress.start or math.inf)
        if not extreme:
            if first is None or look.now.value < FALLING * first.value:
                self._shown_since = look.now
                return None
            if look.now.step - first.step < LASTING:
                return None
        onset = progress.onset(run.history.series)
        jumped = self._outliers.since(onset - NEAR)
        onset = self._kernels.before_growth(run, onset, self.check.growth) if look.grown else onset
        return _suspicion(look, onset, otherwise=True, sure=extreme and look.grown, jumped=jumped)

    def _violent(self, run: Run, look: _Look) -> Suspicion | None:
        """The first updates of the fit were a large share of the weights, and the loss was the worse for them.

        It is asked once, when the loss no longer falls fast by itself.
        """
        progress, update = run.progress, predicted_update(run)
        if self._asked or progress.start is None or look.now.step + 1 < VIOLENT_AFTER or progress.falling:
            return None
        self._asked = True
        worst = max((m.loss for m in run.history.first(run.step)), default=0.0)
        large = self.check.first_update * bears(run.train_state().optimizers)
        if run.recovery.diverged or progress.since or worst < self.check.rise * progress.start or not update >= large:
            return None
        note = f"The first update was as large as {update:.0%} of the weights, and the loss rose to {worst:.3g} after it."
        return _suspicion(look, 0, note, otherwise=look.high)

    def _stalled(self, run: Run, look: _Look) -> Suspicion | None:
        """A rate has brought no progress for as long as it has been in use, or only a little; or its updates are large all the same."""
        progress, diverged = run.progress, run.recovery.diverged
        if look.now.step + 1 - progress.since < self._checkpoint:
            return None
        self._checkpoint *= 2
        slow = diverged and look.now.value > SLOW * progress.level_at_rollback
        self._higher = look.now if slow else None
        halves, update = progress.halves(look.now), predicted_update(run)
        if halves is None:
            return None
        stalled = halves[1] > STALLED * halves[0] and update >= (self.check.update if diverged else 1.0)
        large = update >= self.check.update * (1.0 if diverged else bears(run.train_state().optimizers))
        well = look.now.value <= LEARNT * (progress.start or math.inf) and halves[1] <= STALLED * halves[0]
        if not (stalled or slow or (large and (diverged or not well))):
            return None
        hardly = "not" if halves[1] >= halves[0] else "hardly"
        note = f"Since step {progress.since + 1} the loss has {hardly} fallen: its lowest levels were {halves[0]:.3g} and {halves[1]:.3g}."
        if not stalled and not slow:
            note = f"The first update would be as large as {update:.0%} of the weights at this rate."
        growth, path = self._kernels.growth(run)
        if not stalled or diverged or growth < self.check.growth:
            onset = (progress.restored or 0) if diverged else 0
            return Suspicion(look.now, onset, look.findings[:1], (note,), otherwise=stalled and diverged)
        found = (look.findings[0], Finding("weights", "divergence", path, value=growth))
        return Suspicion(look.now, 0, found, (note,), sure=True)

    def _lasting(self, run: Run, look: _Look) -> Suspicion | None:
        """The loss stays high for `patience` steps, at large updates or since it has jumped; asked again after twice as long."""
        progress, start = run.progress, run.progress.start or math.inf
        onset = progress.onset(run.history.series) if look.suspect else 0
        jumped = self._jumped(run, onset) if look.suspect else ()
        settled = look.now.value >= self.check.settled * start
        known = bool(jumped) or settled or predicted_update(run) >= self.check.update
        if progress.falling or not look.suspect or not known:
            self._suspect_since = None
            return None
        since = self._suspect_since = run.step if self._suspect_since is None else self._suspect_since
        if run.step - since < self.check.patience:
            return None
        self._suspect_since = run.step + run.step - since  # twice as long until the next trial
        return _suspicion(look, onset, jumped=jumped, reported=settled)

    def _outlier(self, run: Run, look: _Look) -> Suspicion | None:
        """One step stood out, `patience` steps ago; each is judged once, and after one that was harmless less often."""
        latest = next((step for step in reversed(self._outliers.steps) if step + self.check.patience <= run.step), -1)
        if latest <= self._judged or run.step < self._again or run.recovery.clips:
            return None
        self._judged, self._again, self._pause = latest, run.step + self._pause, 2 * self._pause
        note = f"Loss or gradient norm of step {latest + 1} were far beyond those of all steps before."
        return Suspicion(look.now, latest, (), (note,), jumped=self._outliers.since(latest - NEAR))

    def _jumped(self, run: Run, onset: int) -> tuple[int, ...]:
        """Return the steps at which loss or gradients have jumped, from shortly before an onset on."""
        near = self._outliers.since(onset - NEAR)
        return near or ((onset,) if run.progress.jumps_at(onset, run.history.series) else ())

    def explained(self, run: Run, findings: Sequence[Finding], loss: float) -> Sequence[Finding]:
        """Return findings of an explosion with what explains them: a few batches, where the steps go on as before without them.

        Not where they do better at a lower rate: then it was the rate.
        """
        self._note_outliers(run)
        jumped, best = self._outliers.since(run.step - NEAR), run.progress.best
        if not jumped or best is None or not self._can_tell(run):
            return findings
        enough = best.value + NOISE * best.spread
        since = [loss for step, loss, _ in run.history.since(jumped[-1] + 1)]
        if since and median(since) <= enough:
            return findings  # it is over
        note = f"The loss has exploded after step {jumped[0] + 1}, which stood out from all steps before."
        suspicion = Suspicion(Level(run.step, loss, 0.0), jumped[0], (), (note,), jumped=jumped, enough=enough)
        shown = another_way.tried(run, suspicion, self.check)
        return [*self._blamed(run, shown), *findings] if shown is not None and shown.without else findings


def _suspicion(look: _Look, onset: int, *notes: str, **more: Any) -> Suspicion:
    return Suspicion(look.now, onset, look.findings, (*notes, *look.notes), **more)
