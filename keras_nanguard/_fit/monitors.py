"""Checks for finite faults that appear over several steps. They run between two steps, on the host.

A check reads a few small variables. Most findings are only reported. An action follows for a loss
scale out of range, for a value beyond a limit of the policy, for settled moving statistics of a
BatchNormalization that jump beyond 1e30, and for second moments beyond 1e30 that the gradients
cannot have produced. `Divergence` handles runs that are lost as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_nanguard._backends import processes
from keras_nanguard._core import finiteness
from keras_nanguard._core.incident import Finding
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.sightings import HUGE, beyond_limits
from keras_nanguard._keras import (
    fitting as keras_fitting,
    layers as keras_layers,
    variables as keras_variables,
)
from keras_nanguard._keras.slot_gradients import second_moments
from keras_nanguard._policy.policy import Policy

__all__ = ["Monitors"]

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


class Monitors:
    """The checks between two steps of one fit.

    Args:
        policy: the policy.

    Attributes:
        due: step of the next check.
        statistics: the sum over the moving statistics in the last step (see `Verdict`).
        updated: the same over weights and slots.
        ceiling: sum of statistics above which the next check runs at once.
        highest: the same for weights and slots.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.due: float = LOOKS[0]
        self.statistics, self.ceiling = 0.0, HUGE
        self.updated, self.highest = 0.0, HUGE
        self._reported: set[str] = set()
        self._statistics: dict[int, float] = {}
        self._rollbacks = self._since = self._seen = 0
        self._gradient = 0.0

    @np.errstate(all="ignore")  # the values are not finite
    def look(self, run: Run) -> list[Finding]:
        """Run all checks and return their findings, each kind once."""
        step = run.step
        self.ceiling = (
            max(abs(self.statistics), 1.0 if run.counts.committed >= SETTLED else HUGE / LEAP)
            * LEAP
        )
        is_huge, self.highest = abs(self.updated) > HUGE, max(abs(self.updated) * LEAP, HUGE)
        self._note_gradients(run)
        if run.counts.rollbacks != self._rollbacks:
            self._rollbacks, self._statistics = run.counts.rollbacks, {}
            self._since = step
            self._reported.clear()
        self.due = next(
            (self._since + at for at in LOOKS if self._since + at > step), step + LOOK_INTERVAL
        )
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

    def measured(self, statistics: float, updated: float) -> bool:
        """Store the sums over statistics, and over weights and slots, of a step; return whether to
        check at once. Runs in every step.
        """
        self.statistics, self.updated = statistics, updated
        return abs(statistics) > self.ceiling or abs(updated) > self.highest

    def _range(self, run: Run) -> Iterator[Finding]:
        """Find finite values beyond a limit of the policy. By default there are no limits."""
        if self.policy.limits:
            yield from beyond_limits(run.train_state(), self.policy)

    def _zero(self, run: Run) -> Iterator[Finding]:
        """Find gradients that are exactly zero for many steps, in a model that computes in
        float16.
        """
        if not run.history.zeros(run.step, ZEROS):
            return
        if any(
            str(getattr(layer, "compute_dtype", "")) == "float16"
            for layer in keras_layers.layers_of(run.model)
        ):
            yield Finding("gradients", "stuck", "", 0, 0, None, 0.0)

    def _stuck(self, run: Run) -> Iterator[Finding]:
        """Find BatchNorm statistics that still have their initial values although the layer
        learns.
        """
        patience = self.policy.statistics.stuck_after
        if not patience or run.counts.committed < min(MIN_COMMITTED, patience):
            return
        first = run.ring.oldest()
        for layer in _learning(run.model):
            if first is not None and _never_moved(layer, first):
                path = layer.moving_mean.path
                yield Finding(
                    "statistics", "stuck", path, 0, 0, int(layer.moving_mean.shape[0]), 0.0
                )

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

    def _note_gradients(self, run: Run) -> None:
        """Store the largest norm of a gradient so far; steps that are undone later count, too."""
        norms = [norm for _, _, norm in run.history.since(min(self._seen, run.step - 1))]
        self._gradient = max([self._gradient, *norms])  # a norm that is NaN stays
        self._seen = run.step

    def _moments(self, run: Run) -> Iterator[Finding]:
        """Find second moments beyond 1e30 that other code has written.

        A second moment is an average of squared gradients, or their sum. So it never exceeds its
        initial value plus the largest squared norm of a gradient for each step. Large gradients
        explain large moments: a healthy run never gets here.
        """
        first = run.ring.start
        own = keras_fitting.trains_by_compiled_loss(run.model) and processes.count() == 1
        if not own or first is None or not run.ring.at_hand(first) or not self._gradient > 0.0:
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
    return [layer for layer in keras_layers.batchnorms(model) if layer.built and layer.trainable]


def _never_moved(layer: Any, first: Any) -> bool:
    """Whether the statistics are still 0 and 1 although gamma or beta have changed."""
    mean, variance = (
        keras_variables.view(layer.moving_mean),
        keras_variables.view(layer.moving_variance),
    )
    if np.any(mean != 0) or np.any(variance != 1):
        return False
    for variable in (layer.gamma, layer.beta):
        start = first.value(variable) if variable is not None else None
        if start is not None and not np.array_equal(start, keras_variables.view(variable)):
            return True
    return False
