"""Faults that no single step shows and that stay finite: looked for rarely between two steps, on the host.

A look reads a few small variables. Nothing but a line follows from what it finds, with three exceptions: a loss scale out of
range, a number beyond a limit that the policy sets, and settled moving statistics of a BatchNormalization that have leapt beyond
1e30. A run that is lost as a whole is the business of `Divergence`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.incident import Finding
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.sightings import HUGE, beyond_limits
from keras_nanguard._keras import layers as keras_layers, variables as keras_variables
from keras_nanguard._policy.policy import Policy

__all__ = ["Monitors"]

LOOKS = (1, 10, 20, 30, 45, 60, 80, 100)
"""Steps of the first looks after the start, and after a rollback; then one every `LOOK_INTERVAL` steps."""

LOOK_INTERVAL = 50

MIN_COMMITTED = 50
"""Good steps after which statistics that stand where they were initialised never move at all."""

LEAP = 1e3
"""Factor between two looks by which settled moving statistics have been ruined. At the usual momentum of 0.99 the batches
between two looks replace 40 % of a moving average: they would have to lie a thousand times beyond all earlier ones."""

SETTLED = 10
"""Good steps after which a moving variance is no more than a factor of 20 below its place, at the usual momentum."""

ZEROS = 30
"""Steps in a row without any gradient, although there is a loss, after which nothing is learned."""


class Monitors:
    """What is looked at between two steps of one fit.

    Args:
        policy: the policy.

    Attributes:
        due: step of the next look.
        statistics: the sum over the moving statistics that the last step measured (see `Verdict`).
        ceiling: a sum of statistics from which the next look does not wait.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self.due: float = LOOKS[0]
        self.statistics, self.ceiling = 0.0, HUGE
        self._reported: set[str] = set()
        self._statistics: dict[int, float] = {}
        self._rollbacks = self._since = 0

    @np.errstate(all="ignore")  # what is looked at is not finite
    def look(self, run: Run) -> list[Finding]:
        """Return what is wrong with the state between two steps, each trouble once."""
        step = run.step
        self.ceiling = max(abs(self.statistics), 1.0 if run.counts.committed >= SETTLED else HUGE / LEAP) * LEAP
        if run.counts.rollbacks != self._rollbacks:
            self._rollbacks, self._statistics = run.counts.rollbacks, {}
            self._since = step
            self._reported.clear()
        self.due = next((self._since + at for at in LOOKS if self._since + at > step), step + LOOK_INTERVAL)
        found: list[Finding] = []
        watches = {"range": self._range, "zero": self._zero, "stuck": self._stuck, "leap": self._leap, "scale": self._scale}
        for name, watch in watches.items():
            findings = list(watch(run))
            if findings and name not in self._reported:
                self._reported.add(name)
                found += findings
        return found

    def measured(self, statistics: float) -> bool:
        """Note what the last step has measured; returns whether the next look does not wait. This runs in every step."""
        self.statistics = statistics
        return abs(statistics) > self.ceiling

    def _range(self, run: Run) -> Iterator[Finding]:
        """Finite numbers beyond a limit of the policy. By default there is none."""
        if self.policy.limits:
            yield from beyond_limits(run.train_state(), self.policy)

    def _zero(self, run: Run) -> Iterator[Finding]:
        """Gradients that are exactly zero, step after step, in a model that computes in float16."""
        if not run.history.zeros(run.step, ZEROS):
            return
        if any(str(getattr(layer, "compute_dtype", "")) == "float16" for layer in keras_layers.layers_of(run.model)):
            yield Finding("gradients", "stuck", "", 0, 0, None, 0.0)

    def _stuck(self, run: Run) -> Iterator[Finding]:
        """BatchNorm statistics that stand where they were initialised, although the layer learns."""
        patience = self.policy.statistics.stuck_after
        if not patience or run.counts.committed < min(MIN_COMMITTED, patience):
            return
        first = run.ring.oldest()
        for layer in _learning(run.model):
            if first is not None and _never_moved(layer, first):
                path = layer.moving_mean.path
                yield Finding("statistics", "stuck", path, 0, 0, int(layer.moving_mean.shape[0]), 0.0)

    def _leap(self, run: Run) -> Iterator[Finding]:
        """Settled moving statistics that have grown by orders of magnitude since the last look."""
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

    def _scale(self, run: Run) -> Iterator[Finding]:
        """A loss scale outside of its range."""
        check = self.policy.loss_scale
        for scale, _ in run.train_state().scales if check.action else ():
            value = float(keras_variables.read(scale))
            if value < check.floor:
                yield Finding("loss_scale", "collapse", str(scale.path), value=value)
            elif value > check.ceiling:
                yield Finding("loss_scale", "out_of_range", str(scale.path), value=value)


def _learning(model: Any) -> list[Any]:
    """Return the BatchNorm layers whose statistics move."""
    return [layer for layer in keras_layers.batchnorms(model) if layer.built and layer.trainable]


def _never_moved(layer: Any, first: Any) -> bool:
    """Whether the statistics hold 0 and 1 as at the start, while gamma or beta have moved."""
    mean, variance = keras_variables.view(layer.moving_mean), keras_variables.view(layer.moving_variance)
    if np.any(mean != 0) or np.any(variance != 1):
        return False
    for variable in (layer.gamma, layer.beta):
        start = first.value(variable) if variable is not None else None
        if start is not None and not np.array_equal(start, keras_variables.view(variable)):
            return True
    return False
