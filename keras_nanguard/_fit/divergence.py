"""Detects a run that is lost although every number is finite. It acts only on proof.

An unusual finite loss proves nothing: losses rise by design with rare classes, heavy tails, growing
targets, schedules and curricula. So levels of the loss only decide *when* to run trials. The proof
comes from measurements on the same batches, at the end of a window of one epoch (or 1000 steps if
an epoch is longer):

    objective   Keras' own train step, one optimizer, a compiled loss, and only positive values of
                it
    untrained   the current weights are not clearly better than those before the first step, or no
                better on their batches than with the inputs of another batch (by a hundredth), or
                most kernels no longer change
    no progress if training continues on the remembered batches, as the run would, the result is
                not clearly better; with damage (a kernel has grown tenfold, or most are dead) it
                is progress only once better than untrained
    helps       from the first state (or the best snapshot), at a tenth, a hundredth or a thousandth
                of the rate, the same batches lead to a clearly lower loss on held-out batches, and
                to less than half of it, or (from the first state) a tenth of it then depends on
                the inputs; with damage, a clearly lower loss is enough

All states are compared with the current objective: variables that training does not change, such
as a loss weight that a callback sets, keep their current value.

All four are required. The action is then on probation: a window later the abandoned state is
compared with the new one, again on the same batches. If the new one is not clearly better, state
and rate are restored, and this guard does not act on finite numbers again.

A run that has diverged at a higher rate has been lost before, so there the last point is enough.
The chosen rate is checked as well: training continues from the current state at ten times and at a
tenth of the rate. Ten times the rate is adopted if that is clearly better and still below the rate
at which training diverged, a tenth if the loss is less than half.

Most healthy runs are recognized on 8 batches, and the next trials come after ten times as many
steps as the last ones took.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from keras_nanguard._backends import processes
from keras_nanguard._core import finiteness
from keras_nanguard._core.history import sizes
from keras_nanguard._core.incident import Diagnosis, Finding
from keras_nanguard._fit.recovery import Lowering
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.snapshots import Snapshot
from keras_nanguard._fit.trial import State, Trial, clearly_lower, trial, with_inputs_of
from keras_nanguard._fit.trial_schedule import LONGEST, SHORTEST, Schedule
from keras_nanguard._keras import (
    optimizers as keras_optimizers,
    train_state as keras_state,
)
from keras_nanguard._keras.variables import write_all

BATCHES = 256
"""Maximum number of batches of a trial. The last quarter is held out."""

TRIAL = 128
"""Minimum number of steps of a trial. Batches repeat if needed: after only a few steps a rate that
is too low may look best.
"""

HELD_OUT, MOST_HELD_OUT = 8, 32
"""Minimum and maximum number of held-out batches. The minimum is enough to see that most healthy
runs have learned something.
"""

FACTORS = (0.1, 0.01, 0.001)
"""Factors of the learning rate in the trials: one, two and three decades."""

TENFOLD = 10.0
"""Factor between two rates that are compared after a divergence."""

HALF = 0.5
"""A trial ends "far better" if its loss is below this share of the current one."""

EXPLAINED, WELL_EXPLAINED = 0.01, 0.1
"""Minimum share of the loss that depends on the inputs if a network has learned something, and if
a trial ends "far better" although its loss cannot fall to half, as a cross-entropy of noisy labels.
"""

GROWN = 10.0
"""Growth of a kernel that counts as damage."""


LEARNED = 1.0
"""Result of the trials of a run that has learned something, as few batches show: its rate does not
change.
"""


@dataclass(frozen=True, slots=True)
class Lost:
    """Proof that a run is lost, and the change that helps.

    Attributes:
        findings: the findings to report.
        diagnosis: the cause, with the measurements as evidence.
        values: `onset`, the step of the snapshot to restore, and `rate_factor`, the factor for the
            learning rate.
    """

    findings: tuple[Finding, ...]
    diagnosis: Diagnosis
    values: Mapping[str, float]


@dataclass(slots=True)
class _Probation:
    """An action whose effect is not known yet.

    Attributes:
        abandoned: the state before the action.
        settings: the values in it that the action does not change; see `Trial.settings`.
        onset: the step of the snapshot that it restored.
        factors, lowering: how the learning rates were lowered before the action.
    """

    abandoned: State
    settings: State
    onset: int
    factors: Mapping[int, float]
    lowering: Lowering


@dataclass(frozen=True, slots=True)
class _Arm:
    """A trial: its initial snapshot, its factor of the rate, its last state, and the losses of that
    state on the held-out batches.
    """

    snapshot: Snapshot
    factor: float
    state: State
    losses: list[float]

    @property
    def mean(self) -> float:
        return fmean(self.losses)

    def explains(self, trying: Trial, held_out: Sequence[Any]) -> bool:
        """Whether a tenth of the loss depends on the inputs."""
        explained = _explained(trying, self.state, self.losses, held_out)
        return WELL_EXPLAINED <= explained < math.inf


class Divergence:
    """Detects a diverged run in one fit.

    Args:
        enabled: whether to check.

    Attributes:
        due: the step of the next check; infinity until an epoch has ended.
    """

    def __init__(self, enabled: bool):
        self._enabled = enabled
        self.due: float = LONGEST if enabled else math.inf
        self._since = 0
        self._schedule = Schedule()
        self._probation: _Probation | None = None
        self._rollbacks = 0

    def begin_epoch(self, step: int) -> None:
        """Schedule a check after the next step if the last epoch was long enough."""
        if self._enabled and step - self._since >= SHORTEST:
            self.due = step + 1

    @np.errstate(all="ignore")
    def look(self, run: Run) -> Lost | None:
        """Return the proof that the run is lost, or `None`. Undo an earlier action that did not
        help.
        """
        if run.step < self.due:
            return None
        began, self._since, self.due = self._since, run.step, run.step + LONGEST
        if run.counts.rollbacks != self._rollbacks and self._probation is None:
            self._rollbacks = run.counts.rollbacks
            self._schedule.restart()
        if processes.count() > 1 or not self._is_objective(run):
            return None
        if self._probation is not None:
            self._end_probation(run)
            return None
        if not self._schedule.end_window(run, began):
            return None
        found, steps = self._found(run)
        if isinstance(found, Lost):
            return found
        self._schedule.note(run.step, steps, found == LEARNED, run.recovery.lowering.diverged)
        if found not in (None, LEARNED):
            self._adjust(run, found)
        return None

    def acted(self, run: Run, done: bool) -> None:
        """Begin the probation of the action, if one was done."""
        if not done:
            self._probation, self._enabled = None, False
        if self._probation is not None:
            _write(run, self._probation.settings)
        self._schedule.restart()
        self._rollbacks = run.counts.rollbacks

    def _is_objective(self, run: Run) -> bool:
        """Whether training minimizes the loss."""
        own = keras_state.trains_by_compiled_loss(run.model)
        positive = all(loss > 0.0 for _, loss in run.history.series)
        return self._enabled and own and positive and len(run.train_state().optimizers) == 1

    def _found(self, run: Run) -> tuple[Lost | float | None, int]:
        """Return the proof that the run is lost, a factor for the rate, `LEARNED` or `None`; and
        the number of steps of the trials.
        """
        batches = run.recent.last(BATCHES)
        held_out = batches[-min(max(len(batches) // 4, HELD_OUT), MOST_HELD_OUT) :]
        batches = batches[: len(batches) - len(held_out)]
        first = run.ring.start
        if len(batches) < HELD_OUT or first is None or not first.at_hand:
            return None, 0
        with trial(run) as trying:
            if trying is None:
                return None, 0
            return self._tried(run, trying, batches, held_out, first), trying.steps

    def _tried(
        self,
        run: Run,
        trying: Trial,
        batches: list[Any],
        held_out: Sequence[Any],
        first: Snapshot,
    ) -> Lost | float | None:
        """Run the trials; see the module docstring."""
        before = run.recovery.lowering.diverged
        few = held_out[:HELD_OUT]
        needs_all = before or len(few) == len(held_out)
        after = trying.trained(trying.present, few)
        settings = trying.settings(after)
        start = trying.state_of(first, settings)
        for some in (held_out,) if needs_all else (few, held_out):
            untrained = _Arm(first, 1.0, start, trying.losses(start, some))
            present = trying.losses(trying.present, some)
            learned = _has_learned(trying, trying.present, present, untrained.losses, some)
            if before or not learned:
                continue
            if not _dead(run, trying.present, after):
                return LEARNED if len(some) == HELD_OUT else None
        growth, path = _growth(run, trying.present, start)
        further: State | None = trying.present
        again = batches * (math.ceil(TRIAL / len(batches)) - 1)
        for more in (batches, again) if again else (batches,):
            further = None if further is None else trying.trained(further, more)
            goes_on = (
                [math.inf] * len(held_out) if further is None else trying.losses(further, held_out)
            )
            dead = _dead(run, trying.present, further)
            damaged = bool(dead) or growth >= GROWN
            aim = untrained.losses if damaged else present
            progress = clearly_lower(goes_on, present) and clearly_lower(goes_on, aim)
            if progress and not dead and not before:
                return None
        further = None  # the trials at lower rates need the memory
        batches = [*batches, *again]
        others = (present, goes_on, untrained.losses)
        least = min(map(fmean, others[:2] if before else others))
        best, far, clear = None, False, False
        for origin in _origins(run, trying, held_out, untrained, settings):
            arm = _best_arm(trying, origin, batches, held_out)
            if arm is None or (best is not None and best.mean <= arm.mean):
                continue
            best, clear = arm, all(clearly_lower(arm.losses, losses) for losses in others)
            anew = origin is untrained and not learned
            far = clear and (arm.mean <= HALF * least or (anew and arm.explains(trying, held_out)))
            if far or before:
                break
        if best is None:
            return None
        if not (far or (clear and damaged)):
            return _better_rate(run, trying, batches, held_out, goes_on) if before else None
        lowered = (run.recovery.factors, run.recovery.lowering)
        self._probation = _Probation(trying.present, settings, best.snapshot.step, *lowered)
        return _lost(
            run, present, untrained, best, (growth, path) if growth >= GROWN else (1.0, ""), dead
        )

    def _adjust(self, run: Run, factor: float) -> None:
        """Multiply the learning rate of a run that has diverged before."""
        for optimizer in run.train_state().optimizers:
            rate = run.recovery.rate(optimizer)
            before = rate.value
            rate.restore(rate.factor * factor)
            run.say(
                f"NanGuard: learning rate {before:.3g} -> {rate.value:.3g}, which lowers the loss"
                " of the last batches further."
            )

    def _end_probation(self, run: Run) -> None:
        """Compare with the abandoned state, and restore it if the action did not help."""
        probation, self._probation = self._probation, None
        batches = run.recent.last(MOST_HELD_OUT)
        if probation is None or len(batches) < HELD_OUT:
            return
        with trial(run) as trying:
            if trying is None:
                return
            settings = trying.settings(trying.trained(trying.present, batches[:HELD_OUT]))
            abandoned = {**probation.abandoned, **settings}
            losses, before = (trying.losses(s, batches) for s in (trying.present, abandoned))
        if clearly_lower(losses, before):
            return
        self._enabled = False
        _write(run, abandoned)
        run.recovery.restore_rates(probation.factors, probation.lowering)
        run.ring.forget_after(probation.onset)
        run.recent.restart(run.step)
        run.say(
            "NanGuard: the lower learning rate did not help. State and learning rate are restored."
        )


def _write(run: Run, state: State) -> None:
    """Write all variables that have a value in a state."""
    write_all((v, state[id(v)]) for v in run.train_state().kept if id(v) in state)


def _origins(
    run: Run, trying: Trial, held_out: Sequence[Any], untrained: _Arm, settings: State
) -> Iterator[_Arm]:
    """Yield the states to train from at a lower rate: the best snapshot if it has learned
    something, and the first state.
    """
    kept = run.ring.with_least_loss()
    if kept is not None and kept.at_hand:
        state = trying.state_of(kept, settings)
        losses = trying.losses(state, held_out)
        if _has_learned(trying, state, losses, untrained.losses, held_out):
            yield _Arm(kept, 1.0, state, losses)
    yield untrained


def _best_arm(
    trying: Trial, origin: _Arm, batches: Sequence[Any], held_out: Sequence[Any]
) -> _Arm | None:
    """Return the trial at a lower rate with the lowest loss."""
    best: _Arm | None = None
    for factor in FACTORS:
        end = trying.trained(origin.state, batches, factor)
        if end is not None:
            arm = _Arm(origin.snapshot, factor, end, trying.losses(end, held_out))
            best = arm if best is None or arm.mean < best.mean else best
    return best


def _better_rate(
    run: Run,
    trying: Trial,
    batches: Sequence[Any],
    held_out: Sequence[Any],
    goes_on: Sequence[float],
) -> float | None:
    """Return the factor by which the current rate should change, if it should."""
    for factor in (TENFOLD, 1 / TENFOLD):
        if factor > 1.0 and run.recovery.rate_factor * factor > FACTORS[0] * (1 + 1e-6):
            continue  # training has diverged at that rate
        end = trying.trained(trying.present, batches, factor)
        losses = trying.losses(end, held_out) if end is not None else [math.inf] * len(held_out)
        enough = fmean(goes_on) * (1.0 if factor > 1.0 else HALF)
        if clearly_lower(losses, goes_on) and fmean(losses) <= enough:
            return factor
    return None


def _has_learned(
    trying: Trial,
    state: State,
    losses: Sequence[float],
    untrained: Sequence[float],
    held_out: Sequence[Any],
) -> bool:
    """Whether a state with these losses is better than untrained, and depends on the inputs."""
    if not clearly_lower(losses, untrained):
        return False
    return _explained(trying, state, losses, held_out) >= EXPLAINED


def _explained(
    trying: Trial, state: State, losses: Sequence[float], held_out: Sequence[Any]
) -> float:
    """Return the share of the loss of a state that depends on the inputs: by how much the loss
    rises with the inputs of another batch.

    0 if it does not clearly rise, infinity if the inputs cannot be exchanged.
    """
    known = []
    for number, (loss, args) in enumerate(zip(losses, held_out)):
        others = [*held_out[number + 1 :], *held_out[:number]]
        exchanged = next(filter(None, (with_inputs_of(args, other) for other in others)), None)
        known += [(loss, exchanged)] if exchanged is not None else []
    if 2 * len(known) < len(held_out):
        return math.inf
    own, others = [loss for loss, _ in known], trying.losses(state, [args for _, args in known])
    return 1.0 - fmean(own) / fmean(others) if clearly_lower(own, others) else 0.0


def _dead(run: Run, before: State, after: State | None) -> tuple[str, ...]:
    """Return the kernels that are bit-identical in two states, if they are the majority."""
    kernels = _kernels(run)
    if after is None or len(kernels) < 2:
        return ()
    same = [v for v in kernels if np.array_equal(before[id(v)], after[id(v)])]
    return tuple(str(v.path) for v in same) if 2 * len(same) > len(kernels) else ()


def _growth(run: Run, present: State, start: State) -> tuple[float, str]:
    """Return the largest growth of a kernel since the first step, and the path of this kernel."""
    found = [
        (_gain(present[id(v)]) / max(_gain(start[id(v)]), 1.0), str(v.path)) for v in _kernels(run)
    ]
    return max(found, default=(1.0, ""))


def _kernels(run: Run) -> list[Any]:
    """Return the trainable weights of more than one dimension."""
    return [
        v for v in run.train_state().trainable if len(v.shape) > 1 and finiteness.is_float(v.dtype)
    ]


def _gain(kernel: np.ndarray[Any, Any]) -> float:
    """Return the gain of a kernel for independent inputs: norm / sqrt(outputs), about 1
    initially.
    """
    return sizes(kernel)[0] / math.sqrt(max(kernel.shape[-1], 1))


def _lost(
    run: Run,
    present: list[float],
    untrained: _Arm,
    best: _Arm,
    grown: tuple[float, str],
    dead: tuple[str, ...],
) -> Lost:
    """Return a proof, with findings and sentences."""
    now, (growth, path) = fmean(present), grown
    found = [Finding("loss", "divergence", value=now)]
    start = f"step {best.snapshot.step}" if best.snapshot.step else "the first state"
    notes = [
        (
            f"On the last {len(present)} batches the loss is {now:.3g}. With the weights before the"
            f" first step it is {untrained.mean:.3g}."
        ),
        (
            f"After a restart from {start} with {best.factor:g} times the learning rate it is"
            f" {best.mean:.3g}."
        ),
    ]
    if path:
        found.append(Finding("weights", "divergence", path, value=growth))
        notes.append(f"{path} has grown {growth:.3g}-fold since the first step.")
    if dead:
        found += [Finding("gradients", "stuck", place, 0, 0, None, 0.0) for place in dead]
        notes.append(f"{len(dead)} kernels no longer change at all, including {dead[0]}.")
    rates = [keras_optimizers.learning_rate(o) * best.factor for o in run.train_state().optimizers]
    advice = (f"Lower the learning rate (try {rates[0]:.1g}), or use a warmup.",)
    diagnosis = Diagnosis("divergence", path, (), tuple(notes), advice, 0.9)
    return Lost(tuple(found), diagnosis, {"onset": best.snapshot.step, "rate_factor": best.factor})
