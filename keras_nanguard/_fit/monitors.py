"""Checks for finite faults that appear over several steps. They run between two steps, on the host.

A check reads a few small variables. Most findings are only reported. An action follows for a loss
scale out of range, for a value beyond a limit of the policy, and for settled moving statistics of a
BatchNormalization that jump beyond 1e30. `Divergence` handles runs that are lost as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.incident import Finding
from keras_nanguard._fit.batchnorm import unfrozen
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.snapshots import Snapshot
from keras_nanguard._fit.state_check import HUGE, beyond, checked
from keras_nanguard._keras import layers as keras_layers, variables as keras_variables

LOOKS = (1, 10, 20, 30, 45, 60, 80, 100)
"""Steps of the first checks after the start and after a rollback. Then a check runs every
`LOOK_INTERVAL` steps.
"""

LOOK_INTERVAL = 50

LEAP = 1e3
"""Growth of settled moving statistics between two checks above which they are wrong.

With the usual momentum of 0.99 the batches between two checks replace 40 % of a moving average.
These batches would have to be a thousand times larger than all earlier ones.
"""

SETTLED = 10
"""Good steps after which a moving variance has reached at least 1/20 of its final value, with the
usual momentum.
"""

ZEROS = 30
"""Steps in a row with zero gradients and a nonzero loss after which the finding is reported."""

Watch = Callable[[Run], Iterator[Finding]]
"""One of the checks."""


@dataclass
class Stretch:
    """The steps since the start or the last rollback, and what the checks have seen in them.

    Attributes:
        rollbacks: number of rollbacks before it.
        first: its first step.
        reported: the checks with a finding.
        beyond: paths of the values that were beyond a limit at the last check.
        statistics: the largest magnitude of settled moving statistics then, by `id`.
    """

    rollbacks: int = 0
    first: int = 0
    reported: set[Watch] = field(default_factory=set)
    beyond: set[str] = field(default_factory=set)
    statistics: dict[int, float] = field(default_factory=dict)


class Monitors:
    """The checks between two steps of one fit.

    Attributes:
        ceiling: sum over the moving statistics of a step (`History.statistics`) above which the
            next check runs at once.
    """

    def __init__(self) -> None:
        self.ceiling = HUGE
        self._stretch = Stretch()

    @np.errstate(all="ignore")  # the values are not finite
    def look(self, run: Run, scale_is_needed: bool = False) -> list[Finding]:
        """Run all checks and return their findings, each kind once. A value beyond a limit of the
        policy is found again once it has been within the limit. A check that raises finds nothing:
        a layer of the user's own may lack what it reads.

        Args:
            scale_is_needed: whether gradients overflow unless the loss scale is below its floor.
        """
        step = run.step
        least = 1.0 if run.counts.committed >= SETTLED else HUGE / LEAP
        self.ceiling = max(abs(run.history.statistics), least) * LEAP
        if run.counts.rollbacks != self._stretch.rollbacks:
            self._stretch = Stretch(run.counts.rollbacks, step)
        stretch = self._stretch
        watches: list[Watch] = [self._zero, self._stuck, self._leap]
        if not scale_is_needed:
            watches.append(self._scale)
        beyond_limits = _found(self._range, run)
        found = [finding for finding in beyond_limits if finding.path not in stretch.beyond]
        stretch.beyond = {finding.path for finding in beyond_limits}
        for watch in watches:
            findings = _found(watch, run)
            if findings and watch not in stretch.reported:
                stretch.reported.add(watch)
                found += findings
        return found

    def next_look(self, step: int) -> int:
        """Return the step of the next check, after one at this step or at the start."""
        looks = (self._stretch.first + at for at in LOOKS)
        return next((look for look in looks if look > step), step + LOOK_INTERVAL)

    def _range(self, run: Run) -> Iterator[Finding]:
        """Find finite values beyond a limit of the policy. By default there are no limits."""
        for site, variable in checked(run.train_state()) if run.policy.limits else ():
            limit = run.policy.max_abs(variable.path, site)
            if limit is not None and keras_variables.is_finite(variable):
                yield from beyond(limit, site, variable)

    def _zero(self, run: Run) -> Iterator[Finding]:
        """Find gradients that are exactly zero for many steps, in a model with float16."""
        if not run.history.zeros(run.step, ZEROS):
            return
        layers = keras_layers.layers_of(run.model)
        if any(str(getattr(layer, "compute_dtype", "")) == "float16" for layer in layers):
            yield Finding("gradients", "stuck", "", 0, 0, None, 0.0)

    def _stuck(self, run: Run) -> Iterator[Finding]:
        """Find BatchNorm statistics that have their initial values although the layer learns."""
        patience = run.policy.statistics.stuck_after
        first = next(iter(run.ring.snapshots), None)
        if not patience or run.counts.committed < patience or first is None:
            return
        for layer in unfrozen(run.model):
            if _never_moved(layer, first):
                path, size = layer.moving_mean.path, int(layer.moving_mean.shape[0])
                yield Finding("statistics", "stuck", path, 0, 0, size, 0.0)

    def _leap(self, run: Run) -> Iterator[Finding]:
        """Find settled moving statistics that have grown by orders of magnitude since a check."""
        for layer in unfrozen(run.model):
            for statistic in (layer.moving_mean, layer.moving_variance):
                now = finiteness.largest(keras_variables.view(statistic))
                before = self._stretch.statistics.get(id(statistic))
                if not math.isfinite(now):
                    continue
                if run.counts.committed >= SETTLED:
                    self._stretch.statistics[id(statistic)] = now
                if before is None or now <= LEAP * max(before, 1e-3):
                    continue
                if now > HUGE:
                    size = int(statistic.shape[0])
                    yield Finding("statistics", "out_of_range", statistic.path, 0, 0, size, now)
                elif statistic is layer.moving_variance:
                    yield Finding("statistics", "spike", statistic.path, value=now)

    def _scale(self, run: Run) -> Iterator[Finding]:
        """Find a loss scale out of its range."""
        check = run.policy.loss_scale
        for scale, _ in run.train_state().scales if check.action else ():
            value = float(keras_variables.read(scale))
            if value < check.floor:
                yield Finding("loss_scale", "collapse", str(scale.path), value=value)
            elif check.is_too_high(value, run.history.scale):
                yield Finding("loss_scale", "out_of_range", str(scale.path), value=value)


def _found(watch: Watch, run: Run) -> list[Finding]:
    """Return the findings of a check, none if it raises."""
    with run.optional("check for finite faults"):
        return list(watch(run))
    return []


def _never_moved(layer: Any, first: Snapshot) -> bool:
    """Whether the statistics are still 0 and 1 although gamma or beta have changed."""
    mean = keras_variables.view(layer.moving_mean)
    variance = keras_variables.view(layer.moving_variance)
    if np.any(mean != 0) or np.any(variance != 1) or not first.is_whole():
        return False
    for variable in (layer.gamma, layer.beta):
        start = first.value(variable) if variable is not None else None
        if start is not None and not np.array_equal(start, keras_variables.view(variable)):
            return True
    return False
