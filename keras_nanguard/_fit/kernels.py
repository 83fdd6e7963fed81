"""How large the kernels of a model are, how far an update moves them, and whether they still move."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.history import sizes
from keras_nanguard._fit.run import Run
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._policy.progress import SGD_BEARS

__all__ = ["Kernels", "bears", "predicted_update", "relative_update"]

GROWN = 0.25
"""Share of the growth that is too much below which a snapshot counts as one from before it."""


def kernels_of(run: Run) -> list[Any]:
    """Return the trainable weights of more than one dimension."""
    return [v for v in run.train_state().trainable if len(v.shape) > 1 and finiteness.is_float(v.dtype)]


def gain(kernel: np.ndarray[Any, Any]) -> float:
    """Return by how much a kernel enlarges independent inputs: its norm by the root of its outputs; 1 as most are initialized."""
    return sizes(kernel)[0] / math.sqrt(max(kernel.shape[-1], 1))


def bears(optimizers: Iterable[Any]) -> float:
    """Return by how much larger a first update may be with these optimizers than with an adaptive one."""
    return SGD_BEARS if all(map(keras_optimizers.shrinks_updates, optimizers)) else 1.0


def relative_update(run: Run) -> float:
    """Return the norm of an update as a share of that of the weights, for a learning rate of 1; NaN where it is not known.

    The distance that decides whether a step is stable is relative to the weights (J. Bernstein et al., On the distance between two
    neural networks and the stability of learning, NeurIPS 2020). Kernels that begin smaller than is usual count as if they did not.
    """
    start, moved, size = run.ring.start, 0.0, 0.0
    optimizers = run.train_state().optimizers
    rates = [keras_optimizers.rate_before(o) for o in optimizers]
    if start is None or not rates or min(rates) <= 0.0 or not run.ring.at_hand(start):
        return math.nan
    for variable in kernels_of(run):
        before = start.value(variable)
        if before is not None:
            moved += sizes(finiteness.widen(keras_variables.view(variable)) - finiteness.widen(before))[0] ** 2
            size += max(sizes(before)[0] ** 2, before.shape[-1])
    momentum = max(keras_optimizers.momentum(o) for o in optimizers)
    if not size or not moved < math.inf or momentum >= 1.0:
        return math.nan
    return math.sqrt(moved / size) / run.counts.committed / max(rates) / (1.0 - momentum)


def predicted_update(run: Run) -> float:
    """Return the relative update that the present rate would have made at the start; NaN where it is not known."""
    return run.progress.update * max(map(keras_optimizers.learning_rate, run.train_state().optimizers))


class Kernels:
    """The kernels of one fit, compared with the state before the first step and with the last look."""

    def __init__(self) -> None:
        self._gains: dict[int, float] = {}
        self._seen: dict[int, Any] = {}

    def start_over(self) -> None:
        """Compare with no look from before a rollback."""
        self._seen = {}

    def growth(self, run: Run) -> tuple[float, str]:
        """Return by how much the kernel has grown that has grown most, from its start or what is usual, and its path."""
        return max(((gain(keras_variables.view(v)) / self._first(run, v), str(v.path)) for v in kernels_of(run)), default=(1.0, ""))

    def _first(self, run: Run, variable: Any) -> float:
        """Return the gain of a kernel before the first step, at least 1; infinity where it is not known."""
        first = self._gains.get(id(variable))
        if first is None:
            start = run.ring.start
            array = start.value(variable) if start is not None and run.ring.at_hand(start) else None
            first = self._gains[id(variable)] = math.inf if array is None else max(gain(array), 1.0)
        return first

    def before_growth(self, run: Run, step: int, growth: float) -> int:
        """Return the step of the newest snapshot up to `step` in which no kernel had grown much towards `growth`; 0 for the start."""
        for snapshot in reversed([s for s in run.ring.snapshots if 0 < s.step <= step and run.ring.at_hand(s)]):
            known = [(self._first(run, v), snapshot.value(v)) for v in kernels_of(run)]
            if all(gain(array) < GROWN * growth * first for first, array in known if array is not None):
                return snapshot.step
        return 0

    def dead(self, run: Run) -> tuple[str, ...]:
        """Return the kernels that stand still since the last look, where that are most of them."""
        if not all(keras_optimizers.learning_rate(o) > 1e-12 for o in run.train_state().optimizers):
            return ()
        before, kernels = self._seen, kernels_of(run)
        self._seen = {id(v): finiteness.fingerprint(keras_variables.view(v)) for v in kernels}
        compared = [v for v in kernels if id(v) in before]
        start = run.ring.start
        known = [(v, start.value(v)) for v in compared] if start is not None and run.ring.at_hand(start) else []
        first = {id(v): value for v, value in known if value is not None}
        still = [v for v in compared if np.array_equal(before[id(v)], self._seen[id(v)])]
        still = [v for v in still if id(v) not in first or not np.array_equal(first[id(v)], keras_variables.view(v))]
        return tuple(str(v.path) for v in still) if len(compared) > 1 and len(still) > len(compared) / 2 else ()
