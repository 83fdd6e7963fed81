"""Proves on remembered batches that a run is lost, and which change helps.

The proof comes from measurements on the same batches, and all four are required:

    objective   Keras' own train step, one optimizer, a compiled loss, and only positive values of
                it
    untrained   the current weights are not clearly better than an untrained network, or no better
                on their batches than with the inputs of another batch (by a hundredth), or most
                kernels no longer change
    no progress if training continues on the remembered batches, as the run would, the result is
                not clearly better; with damage (a kernel has grown tenfold, or most are dead) it
                is progress only once better than untrained
    helps       from the first state (or the best snapshot), at a tenth, a hundredth or a thousandth
                of the rate, the same batches lead to a clearly lower loss on held-out batches, and
                to less than half of it, or (from the first state) a tenth of it then depends on
                the inputs; with damage, a clearly lower loss is enough

All states are compared with the current objective: variables that training does not change, such
as a loss weight that a callback sets, keep their current value.

The untrained network has the weights before the first step. A fit may begin with weights that an
earlier one has trained: being no better than those proves nothing, unless a kernel has grown
tenfold since. If they explain the targets, the untrained network is the same one with the inputs of
another batch, and the current weights are better if they explain at least half as much. If that
cannot be measured, and the optimizer has made steps before, there is nothing to compare with.

A run that has diverged at a higher rate has been lost before, so there the last point is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

import numpy as np

from keras_nanguard._backends.shared.replay import rate_if_known
from keras_nanguard._core import finiteness
from keras_nanguard._core.incident import Diagnosis, Finding, Incident
from keras_nanguard._fit.incidents import incident_of
from keras_nanguard._fit.recovery import LoweredRates
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.snapshots import Snapshot
from keras_nanguard._fit.trial import State, Trial, clearly_lower, trial, with_inputs_of
from keras_nanguard._keras import optimizers as keras_optimizers

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

HALF = 0.5
"""A trial ends "far better" if its loss is below this share of the current one."""

EXPLAINED, WELL_EXPLAINED = 0.01, 0.1
"""Minimum share of the loss that depends on the inputs if a network has learned something, and if
a trial ends "far better" although its loss cannot fall to half, as a cross-entropy of noisy labels.
"""

EXACT = 1e-5
"""Relative difference below which two losses are equal up to the order of additions."""

GROWN = 10.0
"""Growth of a kernel that counts as damage."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Proof that a run is lost, the change that helps, and what it abandons.

    Attributes:
        incident: findings, and a diagnosis with the measurements as evidence.
        restart: the snapshot from which the change begins.
        abandoned: the state before the change.
        settings: the values in it that the change keeps; see `Trial.settings`.
        rates: how the learning rates are lowered before the change.
    """

    incident: Incident
    restart: Snapshot
    abandoned: State
    settings: State
    rates: LoweredRates


TrialResult = Lost | Literal["learned", "progress"] | None
"""The proof that a run is lost. Without one, whether a few batches show that it has learned
something, or training on the remembered batches brings progress.
"""


def look_for_proof(run: Run, seconds: float) -> tuple[TrialResult, int]:
    """Return what trials find, and the number of their steps.

    Args:
        seconds: maximum time for the trials of a run that has not learned anything, in seconds.
    """
    batches = run.recent.last(BATCHES)
    held_out = batches[-min(max(len(batches) // 4, HELD_OUT), MOST_HELD_OUT) :]
    batches = batches[: len(batches) - len(held_out)]
    first = run.ring.start
    if len(batches) < HELD_OUT or first is None or not first.is_whole():
        return None, 0
    with trial(run) as trying:
        if trying is None:
            return None, 0
        few, diverged = held_out[:HELD_OUT], run.recovery.lowering.diverged
        after, present = trying.trained(trying.present, few), list[float]()
        for some in (held_out,) if diverged or len(few) == len(held_out) else (few, held_out):
            present = [*present, *trying.losses(trying.present, some[len(present) :])]
            trials = _Trials(run, trying, first, some, present, after)
            if trials.has_learned and not diverged and not trials.dead(after):
                return "learned", trying.steps
        steps = (1 + len(FACTORS)) * (max(TRIAL, len(batches)) + len(held_out))
        if steps * trying.seconds > seconds:
            return None, trying.steps
        return trials.prove(batches), trying.steps


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


class _Trials:
    """The trials of one check, compared with the current state, the first one, and an untrained
    network.

    Args:
        held_out: the batches on which states are compared.
        present: the losses of the current state on them.
        after: the state after training on a few batches from the current one.

    Attributes:
        has_learned: whether the current state is better than untrained, and depends on the inputs.
    """

    def __init__(
        self,
        run: Run,
        trying: Trial,
        first: Snapshot,
        held_out: Sequence[Any],
        present: list[float],
        after: State | None,
    ):
        self._run, self._trying, self._held_out = run, trying, held_out
        self._diverged = run.recovery.lowering.diverged  # before, at a higher rate
        self._settings = trying.settings(after)
        self._start = self._arm(first, 1.0, trying.state_of(first, self._settings))
        self._present = present
        self._kernels = [
            v
            for v in run.train_state().trainable
            if len(v.shape) > 1 and finiteness.is_float(v.dtype)
        ]
        self.has_learned = self._is_better(trying.present, self._present)

    def prove(self, batches: list[Any]) -> TrialResult:
        """Return the proof that a lower rate helps, if it does, and training on these batches as
        the run would brings no progress; else whether it brings progress.
        """
        growth = self._growth
        further: State | None = self._trying.present
        again = batches * (math.ceil(TRIAL / len(batches)) - 1)
        for more in (batches, again) if again else (batches,):
            further = None if further is None else self._trying.trained(further, more)
            losses, dead = self._trying.losses(further, self._held_out), self.dead(further)
            damaged = bool(dead) or growth[0] >= GROWN
            aims = (self._present, self._start.losses if damaged else self._present)
            progress = all(clearly_lower(losses, aim) for aim in aims)
            if progress and not dead and not self._diverged:
                return "progress"
        best = self._best([*batches, *again], losses, damaged)
        return None if best is None else self._lost(best, dead, growth)

    def _best(
        self, batches: Sequence[Any], going_on: Sequence[float], damaged: bool
    ) -> _Arm | None:
        """Return the trial at a lower rate that helps most, `None` if none helps enough.

        Args:
            going_on: the losses after training on them as the run would.
            damaged: whether most kernels are dead, or one has grown tenfold.
        """
        first = self._start.losses if self.has_learned else self._untrained
        others = (self._present, going_on, first)
        least = min(map(fmean, others[:2] if self._diverged else others))
        best, far, clear = None, False, False
        for origin in self._origins():  # one trial for each of the lower rates
            ends = ((f, self._trying.trained(origin.state, batches, f)) for f in FACTORS)
            arms = (self._arm(origin.snapshot, f, end) for f, end in ends if end is not None)
            arm = min(arms, key=lambda arm: arm.mean, default=None)
            if arm is None or (best is not None and best.mean <= arm.mean):
                continue
            best, clear = arm, all(clearly_lower(arm.losses, losses) for losses in others)
            anew = origin is self._start and not self.has_learned
            far = clear and (arm.mean <= HALF * least or (anew and self._is_well_explained(arm)))
            if far or self._diverged:
                break
        return best if far or (clear and damaged) else None

    def _origins(self) -> Iterator[_Arm]:
        """Yield the states to train from at a lower rate: the best snapshot if it has learned
        something, and the first state.
        """
        kept = self._run.ring.with_least_loss()
        if kept is not None and kept.is_whole():
            best = self._arm(kept, 1.0, self._trying.state_of(kept, self._settings))
            if self._is_better(best.state, best.losses):
                yield best
        yield self._start

    def _arm(self, snapshot: Snapshot, factor: float, state: State) -> _Arm:
        return _Arm(snapshot, factor, state, self._trying.losses(state, self._held_out))

    def _is_better(self, state: State, losses: Sequence[float]) -> bool:
        """Whether a state with these losses is better than untrained, and depends on the inputs."""
        least = EXPLAINED
        if not clearly_lower(losses, self._start.losses):
            is_destroyed = self._growth[0] >= GROWN
            if is_destroyed or not clearly_lower(losses, self._untrained):
                return False
            explained = _explained_share(self._start.losses, self._start_exchanged)
            least = max(EXPLAINED, HALF * explained)
        return self._explained(state, losses) >= least

    @cached_property
    def _untrained(self) -> list[float]:
        """The losses of an untrained network: those of the first state, with the inputs of another
        batch if that state has learned something. Infinite if this is unknown.
        """
        start = self._start
        exchanged = self._start_exchanged
        own = [start.losses[number] for number in exchanged]
        if not exchanged or np.allclose(list(exchanged.values()), own, rtol=EXACT):
            (optimizer,) = self._run.train_state().optimizers
            counted = start.state.get(id(keras_optimizers.iterations(optimizer)), 0)
            return [math.inf] * len(start.losses) if counted > 0 else start.losses
        losses = [exchanged.get(number, loss) for number, loss in enumerate(start.losses)]
        return losses if clearly_lower(start.losses, losses) else start.losses

    @cached_property
    def _start_exchanged(self) -> dict[int, float]:
        """The losses of the first state with the inputs of another batch."""
        return self._exchanged(self._start.state, self._start.losses)

    def _is_well_explained(self, arm: _Arm) -> bool:
        """Whether a tenth of the loss depends on the inputs."""
        return WELL_EXPLAINED <= self._explained(arm.state, arm.losses) < math.inf

    def _explained(self, state: State, losses: Sequence[float]) -> float:
        """Return the share of the loss of a state that depends on the inputs."""
        return _explained_share(losses, self._exchanged(state, losses))

    def _exchanged(self, state: State, losses: Sequence[float]) -> dict[int, float]:
        """Return the loss of a state on each batch with the inputs of another one, by number of the
        batch.

        Empty if the inputs of most cannot be exchanged, or if the loss does not depend on the
        targets: it is then the one of the batch with these inputs.
        """
        mixed, donors = dict[int, Any](), list[float]()
        pairs = list(zip(losses, self._held_out))
        for number, (_, args) in enumerate(pairs):
            others = (*pairs[number + 1 :], *pairs[:number])
            candidates = ((with_inputs_of(args, other), donor) for donor, other in others)
            exchangeable = next((pair for pair in candidates if pair[0] is not None), None)
            if exchangeable is not None:
                mixed[number], donor = exchangeable
                donors.append(donor)
        if 2 * len(mixed) < len(pairs):
            return {}
        rises = self._trying.losses(state, list(mixed.values()))
        own = [losses[number] for number in mixed]
        if np.allclose(rises, donors, rtol=EXACT) and not np.allclose(rises, own, rtol=EXACT):
            return {}
        return dict(zip(mixed, rises))

    def dead(self, after: State | None) -> tuple[str, ...]:
        """Return the kernels that are bit-identical in the current state and after training, if
        they are the majority.
        """
        kernels, before = self._kernels, self._trying.present
        if after is None or len(kernels) < 2:
            return ()
        same = [v for v in kernels if np.array_equal(before[id(v)], after[id(v)])]
        return tuple(str(v.path) for v in same) if 2 * len(same) > len(kernels) else ()

    @cached_property
    def _growth(self) -> tuple[float, str]:
        """The largest growth of a kernel since the first step, and the kernel's path."""
        present, start = self._trying.present, self._start.state
        growths = [
            (_gain(present[id(v)]) / max(_gain(start[id(v)]), 1.0), str(v.path))
            for v in self._kernels
        ]
        return max(growths, default=(1.0, ""))

    def _lost(self, best: _Arm, dead: tuple[str, ...], growth: tuple[float, str]) -> Lost:
        """Return a proof, with findings and sentences."""
        run, now, step = self._run, fmean(self._present), best.snapshot.step
        start = f"step {step}" if step else "the first state"
        findings = [Finding("loss", "divergence", value=now)]
        notes = [
            (
                f"On the last {len(self._present)} batches the loss is {now:.3g}. With the weights"
                f" before the first step it is {self._start.mean:.3g}."
            ),
            (
                f"After a restart from {start} with {best.factor:g} times the learning rate it is"
                f" {best.mean:.3g}."
            ),
        ]
        times, kernel = growth
        if times >= GROWN:
            findings.append(Finding("weights", "divergence", kernel, value=times))
            notes.append(f"{kernel} has grown {times:.3g}-fold since the first step.")
        if dead:
            findings += [Finding("gradients", "stuck", place, 0, 0, None, 0.0) for place in dead]
            notes.append(f"{len(dead)} kernels no longer change at all, including {dead[0]}.")
        (optimizer,) = run.train_state().optimizers
        rate = rate_if_known(keras_optimizers.learning_rate, optimizer)
        shown = "" if rate is None else f" (try {rate * best.factor:.1g})"
        advice = (f"Lower the learning rate{shown}, or use a warmup.",)
        culprit = kernel if times >= GROWN else ""
        diagnosis = Diagnosis("divergence", culprit, (), tuple(notes), advice, 0.9)
        values = {"rate_factor": best.factor}
        incident = incident_of(run, findings, diagnosis=diagnosis, values=values)
        rates = run.recovery.lowered_rates
        return Lost(incident, best.snapshot, self._trying.present, self._settings, rates)


def _explained_share(losses: Sequence[float], exchanged: Mapping[int, float]) -> float:
    """Return the share of the loss that depends on the inputs: by how much it rises with the inputs
    of another batch; 0 if it does not clearly rise, infinity if unknown.
    """
    own, rises = [losses[number] for number in exchanged], list(exchanged.values())
    if not exchanged:
        return math.inf
    return 1.0 - fmean(own) / fmean(rises) if clearly_lower(own, rises) else 0.0


def _gain(kernel: np.ndarray[Any, Any]) -> float:
    """Return the gain of a kernel for independent inputs: norm / sqrt(outputs), about 1
    initially.
    """
    return finiteness.sizes(kernel)[0] / math.sqrt(max(kernel.shape[-1], 1))
