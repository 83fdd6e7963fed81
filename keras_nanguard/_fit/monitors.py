"""Checks for finite faults that appear over several steps. They run between two steps, on the host.

A check reads a few small variables. Most findings are only reported. An action follows for a loss
scale out of range, for a value beyond a limit of the policy, for settled moving statistics of a
BatchNormalization that jump beyond 1e30, and for second moments beyond 1e30 that the gradients
cannot have produced. `Divergence` handles runs that are lost as a whole.

`LayerLooks` measures each layer: norms of weights and gradients, update ratio, statistics. It
copies the weights, and the optimizer slots from which their gradients follow (see
`gradient_slots`), and compares them after the following execution. The compiled step is not
involved. The interval is chosen so that all measurements take only a small share of the training
time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from math import inf
from typing import Any, NamedTuple

import numpy as np

from keras_nanguard._backends import processes
from keras_nanguard._core import finiteness, memory
from keras_nanguard._core.history import sizes
from keras_nanguard._core.incident import Finding
from keras_nanguard._fit.run import HUGE, Run, beyond, checked
from keras_nanguard._keras import (
    layers as keras_layers,
    train_state as keras_state,
    variables as keras_variables,
)
from keras_nanguard._keras.optimizers import GradientSlot, gradient_slots, second_moments
from keras_nanguard._policy.policy import Policy

Array = np.ndarray[Any, Any]

SHARE = 0.005
"""Maximum share of the training time."""

MAX_COPIED = 256 << 20
"""Maximum bytes of copied weights and slots. For other weights only the norm is measured."""

COMPARING = 3
"""Memory of a comparison in multiples of the copies: a copy, the new value and their difference."""

MIN_STEPS = 50
"""Minimum number of steps between two measurements, except for the first."""

TOGETHER = 1000
"""Steps between two measurements if several processes train together: all of them have to read at
the same step.
"""


LOOKS = (1, 10, 20, 30, 45, 60, 80, 100)
"""Steps of the first checks after the start and after a rollback. Then a check runs every
`LOOK_INTERVAL` steps.
"""

LOOK_INTERVAL = 50

MIN_COMMITTED = 50
"""Good steps after which statistics with their initial values count as stuck."""

LEAP = 1e3
"""Growth of settled moving statistics between two checks above which they are wrong.

With the usual momentum of 0.99 the batches between two checks replace 40 % of a moving average.
These batches would have to be a thousand times larger than all earlier ones. For second moments it
is the margin over what all gradients so far can have produced.
"""

SETTLED = 10
"""Good steps after which a moving variance has reached at least 1/20 of its final value, with the
usual momentum.
"""

ZEROS = 30
"""Steps in a row with zero gradients and a nonzero loss after which the finding is reported."""


# Layers


class _Copies(NamedTuple):
    """What a measurement compares with.

    Attributes:
        values: the values of weights, by `id`.
        slots: for weights whose gradient follows from a slot, the slot and its value, by `id`.
        updates: the counts of updates of these slots, by `id` of the counter.
        at: the numbers of steps, committed steps and rollbacks.
    """

    values: dict[int, Array]
    slots: dict[int, tuple[GradientSlot, Array]]
    updates: dict[int, int]
    at: tuple[int, int, int]


class LayerLooks:
    """The measurements of one fit.

    Attributes:
        next_step: the step from which the next measurement may begin.
    """

    def __init__(self) -> None:
        self.next_step: float = 1
        self._next_time = self._cost = 0.0
        self._copies: _Copies | None = None

    def look(self, run: Run) -> float:
        """Copy the weights, or compare them with the copies.

        Returns:
            The step at which to compare them, infinity if a measurement is complete, or would take
            too large a share of the time.
        """
        began, alone = time.monotonic(), processes.count() == 1
        copies, self._copies = self._copies, None
        if alone and copies is None and began < self._next_time:
            return inf
        try:
            with run.access.variables_readable():
                if copies is None:
                    self._copies = _copied(run)
                else:
                    _compare(run, copies)
        except Exception:  # noqa: BLE001  a variable of a kind that cannot be read ends the looks; training needs none
            self.next_step = inf
            return inf
        self._cost += time.monotonic() - began
        if self._copies is not None:
            return run.step + 1
        self._next_time, self._cost = time.monotonic() + self._cost / SHARE, 0.0
        self.next_step = run.step + (MIN_STEPS if alone else TOGETHER)
        return inf

    def release(self) -> None:
        """Release the copies of a measurement that is not complete."""
        self._copies = None


def _copied(run: Run) -> _Copies:
    """Copy the smallest weights, and the slots from which their gradients follow."""
    train_state, counts = run.train_state(), run.counts
    most = min(MAX_COPIED, 2 * train_state.gradient_bytes)
    left = most if run.agreement.fits(memory.room_for(COMPARING * most)) else 0
    gradients = gradient_slots(train_state.optimizers)
    values: dict[int, Array] = {}
    slots: dict[int, tuple[GradientSlot, Array]] = {}
    for variable in sorted(train_state.trainable, key=lambda v: int(np.prod(v.shape))):
        value, slot = keras_variables.view(variable), gradients.get(id(variable))
        left -= 2 * value.nbytes
        if left < 0:
            break
        copied = values[id(variable)] = np.array(value)
        if slot is not None:
            same = slot.variable is variable
            slots[id(variable)] = slot, copied if same else keras_variables.read(slot.variable)
    at = (counts.step, counts.committed, counts.rollbacks)
    return _Copies(values, slots, _counted(slots), at)


@np.errstate(all="ignore")  # the values may not be finite
def _compare(run: Run, copies: _Copies) -> None:
    """Record what has changed since the copies were made, unless a step in between was refused or
    undone.
    """
    step, committed, rollbacks = copies.at
    steps, counts = run.counts.step - step, run.counts
    undisturbed = counts.committed - committed == steps and counts.rollbacks == rollbacks
    if steps < 1 or not undisturbed:
        return
    counted = _counted(copies.slots)
    variables, values = [], []
    for variable in run.train_state().trainable:
        value, before = keras_variables.view(variable), copies.values.get(id(variable))
        norm, moved, gradient = sizes(value)[0], np.nan, np.nan
        if before is not None:
            moved = sizes(finiteness.widen(value) - finiteness.widen(before))[0] / steps
        slot, own = copies.slots.get(id(variable), (None, None))
        number = id(slot.updates) if slot is not None else 0
        if slot is not None and own is not None and counted[number] == copies.updates[number] + 1:
            gradient = float(slot.norm(own, keras_variables.view(slot.variable)))
        variables.append((str(getattr(variable, "path", "")), "trainable"))
        values.append((gradient, norm, moved / norm if norm else np.nan))
    for layer in keras_layers.batchnorms(run.model):
        for variable in (layer.moving_mean, layer.moving_variance):
            value = finiteness.widen(keras_variables.view(variable))
            variables.append((str(variable.path), "statistics"))
            values.append((float(value.min()), float(value.max()), np.nan))
    run.recorder.layers(run.step - 1, tuple(variables), np.array(values).reshape(-1, 3))


def _counted(slots: Mapping[int, tuple[GradientSlot, Array]]) -> dict[int, int]:
    """Return the counts of updates of copied slots, by `id` of the counter."""
    counters = {id(slot.updates): slot.updates for slot, _ in slots.values()}
    return {number: int(keras_variables.read(v)) for number, v in counters.items()}


# Finite faults


class Monitors:
    """The checks between two steps of one fit.

    Args:
        policy: the policy.

    Attributes:
        due: step of the next check.
        ceiling: sum over the moving statistics of a step (`Run.statistics`) above which the next
            check runs at once.
        highest: the same for weights and slots (`Run.updated`).
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.due: float = LOOKS[0]
        self.ceiling = self.highest = HUGE
        self._reported: set[str] = set()
        self._statistics: dict[int, float] = {}
        self._rollbacks = self._since = self._seen = 0
        self._gradient = 0.0

    @np.errstate(all="ignore")  # the values are not finite
    def look(self, run: Run) -> list[Finding]:
        """Run all checks and return their findings, each kind once."""
        step = run.step
        least = 1.0 if run.counts.committed >= SETTLED else HUGE / LEAP
        self.ceiling = max(abs(run.statistics), least) * LEAP
        is_huge, self.highest = abs(run.updated) > HUGE, max(abs(run.updated) * LEAP, HUGE)
        norms = [norm for _, _, norm in run.history.since(min(self._seen, step - 1))]
        self._gradient = max([self._gradient, *norms])  # a norm that is NaN stays
        self._seen = step
        if run.counts.rollbacks != self._rollbacks:
            self._rollbacks, self._statistics = run.counts.rollbacks, {}
            self._since = step
            self._reported.clear()
        coming = (self._since + at for at in LOOKS if self._since + at > step)
        self.due = next(coming, step + LOOK_INTERVAL)
        found: list[Finding] = []
        watches = {
            "range": self._range,
            "zero": self._zero,
            "stuck": self._stuck,
            "leap": self._leap,
            "scale": self._scale,
        }
        if is_huge:
            watches["moments"] = self._moments
        for name, watch in watches.items():
            findings = list(watch(run))
            if findings and name not in self._reported:
                self._reported.add(name)
                found += findings
        return found

    def _range(self, run: Run) -> Iterator[Finding]:
        """Find finite values beyond a limit of the policy. By default there are no limits."""
        for site, variable in checked(run.train_state()) if self.policy.limits else ():
            limit = self.policy.max_abs(variable.path, site)
            if limit is not None and finiteness.is_finite(keras_variables.view(variable)):
                yield from beyond(limit, site, variable)

    def _zero(self, run: Run) -> Iterator[Finding]:
        """Find gradients that are exactly zero for many steps, in a model that computes in
        float16.
        """
        if not run.history.zeros(run.step, ZEROS):
            return
        layers = keras_layers.layers_of(run.model)
        if any(str(getattr(layer, "compute_dtype", "")) == "float16" for layer in layers):
            yield Finding("gradients", "stuck", "", 0, 0, None, 0.0)

    def _stuck(self, run: Run) -> Iterator[Finding]:
        """Find BatchNorm statistics that still have their initial values although the layer
        learns.
        """
        patience = self.policy.statistics.stuck_after
        if not patience or run.counts.committed < min(MIN_COMMITTED, patience):
            return
        first = next(iter(run.ring.snapshots), None)
        for layer in _learning(run.model) if first is not None else ():
            if _never_moved(run, layer, first):
                path, size = layer.moving_mean.path, int(layer.moving_mean.shape[0])
                yield Finding("statistics", "stuck", path, 0, 0, size, 0.0)

    def _leap(self, run: Run) -> Iterator[Finding]:
        """Find settled moving statistics that have grown by orders of magnitude since the last
        check.
        """
        for layer in _learning(run.model):
            for statistic in (layer.moving_mean, layer.moving_variance):
                now = finiteness.largest(keras_variables.view(statistic))
                before = self._statistics.get(id(statistic))
                if not math.isfinite(now):
                    continue
                if run.counts.committed >= SETTLED:
                    self._statistics[id(statistic)] = now
                if before is None or now <= LEAP * max(before, 1e-3):
                    continue
                if now > HUGE:
                    size = int(statistic.shape[0])
                    yield Finding("statistics", "out_of_range", statistic.path, 0, 0, size, now)
                elif statistic is layer.moving_variance:
                    yield Finding("statistics", "spike", statistic.path, value=now)

    def _moments(self, run: Run) -> Iterator[Finding]:
        """Find second moments beyond 1e30 that other code has written.

        A second moment is an average of squared gradients, or their sum. So it never exceeds its
        initial value plus the largest squared norm of a gradient for each step. Large gradients
        explain large moments: a healthy run never gets here.
        """
        first = run.ring.start
        own = keras_state.trains_by_compiled_loss(run.model) and processes.count() == 1
        if not own or first is None or not first.at_hand or not self._gradient > 0.0:
            return
        explained = run.step * self._gradient**2
        for moment in second_moments(run.train_state().optimizers):
            start = first.value(moment)
            now = finiteness.largest(keras_variables.view(moment))
            if start is None or not HUGE < now < math.inf:
                continue
            if now > LEAP * (finiteness.largest(start) + explained):
                size = int(np.prod(moment.shape))
                yield Finding("slots", "out_of_range", moment.path, 0, 0, size, now)

    def _scale(self, run: Run) -> Iterator[Finding]:
        """Find a loss scale out of its range."""
        check = self.policy.loss_scale
        for scale, _ in run.train_state().scales if check.action else ():
            value = float(keras_variables.read(scale))
            if value < check.floor:
                yield Finding("loss_scale", "collapse", str(scale.path), value=value)
            elif value > check.ceiling:
                yield Finding("loss_scale", "out_of_range", str(scale.path), value=value)


def _learning(model: Any) -> list[Any]:
    """Return the BatchNorm layers that update their statistics."""
    return [layer for layer in keras_layers.batchnorms(model) if layer.trainable]


def _never_moved(run: Run, layer: Any, first: Any) -> bool:
    """Whether the statistics are still 0 and 1 although gamma or beta have changed."""
    mean = keras_variables.view(layer.moving_mean)
    variance = keras_variables.view(layer.moving_variance)
    if np.any(mean != 0) or np.any(variance != 1) or not first.at_hand:
        return False
    for variable in (layer.gamma, layer.beta):
        start = first.value(variable) if variable is not None else None
        if start is not None and not np.array_equal(start, keras_variables.view(variable)):
            return True
    return False
