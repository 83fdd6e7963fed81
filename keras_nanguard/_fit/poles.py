"""Poles of learning rate schedules: iterations without a usable rate.

A schedule can have a pole, as `rsqrt(step - warmup)` at the end of the warmup. No weights are
finite after a step at such a rate. So the step is skipped and the iteration counter moves past the
pole; otherwise the next step would have the same rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_nanguard._backends.shared.replay import rate_if_known
from keras_nanguard._fit.run import Run
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras.all_or_none import write_all
from keras_nanguard._keras.optimizers import scheduled_iteration

MAX_PASSED = 10
"""Iterations in a row that are passed over. A schedule that gives no rate for longer ends the run
by the bounds of the policy.
"""

Unusable = dict[int, tuple[int, float]]
"""Iteration and rate of a schedule without a usable rate, by `id` of the optimizer."""


class Poles:
    """The poles of the schedules of one run."""

    def __init__(self, run: Run):
        self._run = run
        self._known: dict[int, set[int]] = {}

    def find(self, ago: int, highest: float) -> Unusable:
        """Return the poles that the optimizers have now, or had one update `ago`: a rate that is
        not finite, or above the `highest` magnitude.
        """
        unusable = Unusable()
        for optimizer in self._run.train_state().optimizers:
            iteration = scheduled_iteration(optimizer, ago)
            rate = 0.0 if iteration is None else _rate(optimizer, iteration)
            if iteration is not None and not (math.isfinite(rate) and abs(rate) <= highest):
                unusable[id(optimizer)] = iteration, rate
                self._known.setdefault(id(optimizer), set()).add(iteration)
        return unusable

    def pass_over_found(self, poles: Unusable) -> None:
        """Pass over the poles of an incident, unless the replay has."""
        if poles and self._run.refuses and not self._run.stopped:
            self.pass_over({key: iteration for key, (iteration, _) in poles.items()})

    def pass_over(self, beyond: Mapping[int, int] | None = None) -> None:
        """Move the iteration counters of optimizers past the poles that are known.

        Args:
            beyond: the iteration that a counter has to be past, by `id` of the optimizer.
        """
        for optimizer in self._run.train_state().optimizers if self._known else ():
            poles = self._known.get(id(optimizer), set())
            first = scheduled_iteration(optimizer) if poles else None
            if first is None:
                continue
            # Accumulated gradients are applied at each of these.
            every = keras_optimizers.inner(optimizer).gradient_accumulation_steps or 1
            last = (beyond or {}).get(id(optimizer), -1)
            start = first + every * max(math.ceil((last + 1 - first) / every), 0)
            coming = range(start, start + every * (MAX_PASSED + 1), every)
            usable = (n for n in coming if n not in poles and math.isfinite(_rate(optimizer, n)))
            iteration = next(usable, first)
            if iteration > first:
                counter = keras_optimizers.iterations(optimizer)
                value = np.asarray(iteration, str(counter.dtype))
                write_all([(counter, value)])


def _rate(optimizer: Any, iteration: int) -> float:
    """Return the rate of a schedule; 0.0 if it cannot be evaluated outside of a step."""
    read = keras_optimizers.scheduled_rate
    return rate_if_known(read, optimizer, iteration) or 0.0
