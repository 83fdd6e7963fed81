"""How large the kernels of a model are, and how far an update moves them."""

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

__all__ = ["bears", "gain", "kernels_of", "relative_update"]


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
