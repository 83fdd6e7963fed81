"""The steps since a snapshot, tried in another way: with another learning rate, or without a few batches.

A trial runs them again with one thing changed, looks at the level that the loss ends at, and undoes all of it. So what a run suffers
from is shown before anything is done about it. A trial costs as much as the steps that it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from keras_nanguard._core.incident import Finding
from keras_nanguard._fit.kernels import bears, predicted_update
from keras_nanguard._fit.run import Run
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._policy.progress import MAX_UPDATE, NOISE, WINDOW, Level
from keras_nanguard._policy.settings import DivergenceCheck

__all__ = ["Suspicion", "raise_rate", "tried"]

LOWER = {0.1: "a tenth", 0.01: "a hundredth"}
"""Factors of the learning rate in a trial; the second where the first does not help, and its updates would be large as well."""

HIGHER = 10.0**0.5
"""Factor of the learning rate in a trial of whether it was lowered too far."""

MUCH_THE_SAME = 1.1
"""Ratio of two levels up to which neither is clearly the lower one."""

ROSE, SHORTLY = 2.0, 16
"""Factor by which a schedule has to have raised the rate since that many steps before a jump to be what has led to it."""

AROUND = (range(-2, 3), range(-8, 25))
"""Steps around an onset whose batches are left out in a trial, and in the next one where that does not help."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What may be wrong with a run.

    Attributes:
        now: the level that the steps have ended at.
        onset: the step from before which they are tried again.
        findings: what is reported where the learning rate is to blame; nothing where it is not in question.
        notes: what has led to it.
        otherwise: whether the rate counts as to blame where it cannot be tried.
        sure: whether nothing has to be tried but to leave out batches.
        jumped: the steps at which loss or gradients have jumped, so that a few batches may be to blame, oldest first.
        reported: whether a loss that high is reported even where nothing that is tried is to blame.
        enough: the level below which a trial has to end, `None` for a clearly lower one than now.
        without: the steps whose batches are to blame.
        factor: the factor of the learning rate at which a trial has ended clearly lower, 1 where none has.
    """

    now: Level
    onset: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    otherwise: bool = False
    sure: bool = False
    jumped: tuple[int, ...] = ()
    reported: bool = False
    enough: float | None = None
    without: frozenset[int] = frozenset()
    factor: float = 1.0


def tried(run: Run, suspicion: Suspicion, check: DivergenceCheck) -> Suspicion | None:
    """Return a suspicion with what trials have shown, `None` where they clear the run.

    Where both a lower rate and other batches help, what ends at the lower loss is to blame, the batches where that is much the same.
    A jump that follows one of the rate is not that of a batch.
    """
    now = suspicion.now.value
    enough = _enough(run, suspicion.now, check) if suspicion.enough is None else suspicion.enough
    batches = suspicion.jumped and not _rate_rose(run, suspicion.jumped[0])
    without, steps, first = _without_batches(run, suspicion, enough) if batches else (None, frozenset(), 0)
    known = (suspicion.findings or without is not None) and not suspicion.sure and len(run.train_state().optimizers) == 1
    lower, onset, factor = _lower_rate(run, suspicion.onset, enough, check) if known else (None, 0, 1.0)
    if without is not None and (lower is None or without.value <= MUCH_THE_SAME * lower.value):
        left_out = f"{len(steps)} batches from that of step {min(steps) + 1} on"
        note = f"Tried again without {left_out}, the steps since then end at a loss of {without.value:.3g}."
        spike = (Finding("loss", "lasting_spike", value=now),)
        return replace(suspicion, onset=min(first, min(steps)), findings=spike, notes=(*suspicion.notes, note), without=steps)
    if lower is not None and lower.value < enough:
        note = f"Tried again with {LOWER[factor]} of the learning rate, the steps since then end at a loss of {lower.value:.3g}."
        found = suspicion.findings or (Finding("loss", "divergence", value=now),)
        notes = (*suspicion.notes, note)
        return replace(suspicion, onset=max(onset, suspicion.onset), findings=found, notes=notes, factor=factor)
    return suspicion if suspicion.sure or (lower is None and suspicion.otherwise) else None


def _rate_rose(run: Run, step: int) -> bool:
    """Whether a schedule has raised the rate by then since shortly before a step, or since the loss was lowest."""
    best, optimizers = run.progress.best, run.train_state().optimizers
    since = min(step - SHORTLY, best.step) if best is not None and best.step > 0 else step - SHORTLY
    committed = max(len(run.history.since(step)), 1)  # a schedule goes on with committed steps alone
    ago = (committed, committed + step - since)
    rates = [[keras_optimizers.rate_before(o, iterations) for iterations in ago] for o in optimizers]
    return any(then > ROSE * before > 0.0 for then, before in rates)


def _enough(run: Run, now: Level, check: DivergenceCheck) -> float:
    """Return the level below which steps have to end in another way for that to be clearly better; after a divergence less will do."""
    clearly = check.better * now.value
    return max(clearly, now.value - NOISE * now.spread) if run.recovery.diverged else clearly


def _lower_rate(run: Run, onset: int, enough: float, check: DivergenceCheck) -> tuple[Level | None, int, float]:
    """Return the level that the steps since an onset end at with a lower rate, from which step, and the factor of the rate.

    From the newest snapshot before it or, where the steps since are not all known, the oldest later one from which they are. The level
    is `None` where that cannot be tried.
    """
    first = run.ring.before(onset)
    for snapshot in [s for s in run.ring.snapshots if first is None or s.step >= first.step]:
        found: tuple[Level | None, int, float] = (None, 0, 1.0)
        for factor in LOWER:
            if (end := run.try_again(snapshot, factor)) is None:
                break
            found = (end, snapshot.step, factor)
            if end.value < enough or not predicted_update(run) * factor >= check.update:
                break
        if found[0] is not None:
            return found
    return None, 0, 1.0


def _without_batches(run: Run, suspicion: Suspicion, enough: float) -> tuple[Level | None, frozenset[int], int]:
    """Return the level that the steps end at without the batches around the jumps, which these are, and the first jump.

    Not all steps need be known: where they are only from a later jump on, that one has to do. The level is `None` where the steps do
    not end below `enough` in this way.
    """
    for number, first in enumerate(suspicion.jumped):
        snapshot = run.ring.before(max(first + AROUND[0].start, 0))
        if snapshot is None:
            break
        for around in AROUND if suspicion.findings or suspicion.enough is not None else AROUND[:1]:
            steps = frozenset(jump + i for jump in suspicion.jumped[number:] for i in around if snapshot.step <= jump + i < run.step)
            end = run.try_again(snapshot, without=steps)
            if end is None:
                break
            if end.value < enough:
                return end, steps, first
        else:
            break
    return None, frozenset(), 0


def raise_rate(run: Run, now: Level, check: DivergenceCheck) -> None:
    """Raise a rate that was lowered too far: where the last steps end at a clearly lower loss with a higher one."""
    rates = list(run.recovery.rates.values())
    lowest = run.ring.before(run.progress.restored or 0)
    known = [s for s in run.ring.snapshots if lowest is not None and lowest.step <= s.step < run.step - WINDOW]
    most = MAX_UPDATE * bears(run.train_state().optimizers)
    if len(rates) != 1 or not rates[0].value * HIGHER <= rates[0].limit * 1.001 or predicted_update(run) * HIGHER > most:
        return
    for snapshot in known:
        end = run.try_again(snapshot, HIGHER)
        if end is None:
            continue
        if end.value < _enough(run, now, check):
            rates[0].raise_to(rates[0].factor * HIGHER)
            run.say(
                f"NanGuard: step {run.step}: the last {run.step - snapshot.step} steps, tried again, end at a loss of "
                f"{end.value:.3g} with a learning rate of {rates[0].value:.3g}, and ended at {now.value:.3g} without it. "
                "It is raised to that."
            )
        return
