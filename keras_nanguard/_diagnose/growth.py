"""How loss, gradient norm and weights have grown before a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

from keras_nanguard._core import finiteness
from keras_nanguard._core.history import History, Measured
from keras_nanguard._core.json_records import STORED
from keras_nanguard._keras import variables as keras_variables

JUMP = 20.0
"""Rise of the loss over its lowest value before, above which gradients of zero are a divergence."""

RECENT = 5
"""Number of last steps that are reported, and from which the magnitude before the incident is
taken.
"""


@dataclass(frozen=True, slots=True)
class Growth:
    """How loss, gradient norm and weights have grown before a step.

    Attributes:
        steps: number of good steps in the history.
        loss: ratio of the last loss to the first ones; 1.0 if it is not defined.
        norm: ratio of the last gradient norm to the first ones.
        weights: ratio of the norm of all trainable weights to their norm at the start, 1.0 if
            unknown.
        largest_weight: largest magnitude of these weights now.
        largest_weight_before: largest magnitude of these weights at the start.
        losses: the last few losses.
        norms: the last few gradient norms.
        jump: the largest rise of the loss over its lowest value before, as a factor, and the step
            of it.
    """

    __pydantic_config__ = STORED

    steps: int = 0
    loss: float = 1.0
    norm: float = 1.0
    weights: float = 1.0
    largest_weight: float = 0.0
    largest_weight_before: float = 0.0
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    jump: tuple[float, int] = (1.0, 0)


def growth_before(
    step: int,
    history: History,
    own: tuple[float, float],
    weights: Sequence[Any],
    start: Callable[[Any], Any] | None,
) -> Growth:
    """Return the history of loss, gradient norm and weights before a step.

    Args:
        own: loss and gradient norm of the step itself, as far as they are finite.
        weights: the trainable weights, with their current values.
        start: returns the value of a weight before the first step, `None` if it had none.
    """
    entries, first = history.before(step), history.first(step)
    losses = [e.loss for e in entries if math.isfinite(e.loss)]
    norms = [e.norm for e in entries if math.isfinite(e.norm)]
    first_losses = _magnitudes(e.loss for e in first)
    first_norms = _magnitudes(e.norm for e in first)
    last_losses, last_norms = ([*v[-RECENT:], last] for v, last in zip((losses, norms), own))
    present = [finiteness.sizes(keras_variables.view(v)) for v in weights]
    initial = [None if start is None else start(v) for v in weights]
    known = [(finiteness.sizes(a), size) for a, size in zip(initial, present) if a is not None]
    before = math.hypot(*(norm for (norm, _), _ in known))
    now = math.hypot(*(norm for _, (norm, _) in known))
    return Growth(
        steps=len(entries),
        loss=_factor(first_losses, _magnitudes(last_losses)),
        norm=_factor(first_norms, _magnitudes(last_norms)),
        weights=now / before if before > 0 and now > 0 else 1.0,
        largest_weight=max([0.0, *(largest for _, largest in present)]),
        largest_weight_before=max([0.0, *(largest for (_, largest), _ in known)]),
        losses=tuple(losses[-RECENT:]),
        norms=tuple(norms[-RECENT:]),
        jump=_jump(entries, history.first(entries[0].step if entries else step)),
    )


def _magnitudes(values: Iterable[float]) -> list[float]:
    """Return the magnitudes of the finite values that are not zero."""
    return [abs(v) for v in values if math.isfinite(v) and v != 0.0]


def _factor(first: list[float], last: list[float]) -> float:
    """Return the growth factor from the first values to the last ones, relative to the smallest of
    the first ones.

    A run that diverges at once has no healthy start; its first value is its smallest.
    """
    if not first or not last:
        return 1.0
    start = first[0] if len(first) < RECENT else min(first[0], median_low(first))
    return max(last) / start


def _jump(entries: Sequence[Measured], first: Sequence[Measured]) -> tuple[float, int]:
    """Return the largest rise of the loss over its lowest value before, and the step at which it
    occurred.

    Args:
        first: the first steps before these ones.
    """
    best, low = (1.0, 0), math.inf
    for number, loss, _, _ in (*first, *entries):
        if loss < 0.0:  # a ratio of losses of different signs has no meaning
            return 1.0, 0
        if not 0.0 < loss < math.inf:  # neither NaN nor zero
            continue
        if loss < low:
            low = loss
        elif loss / low > best[0]:
            best = (loss / low, number)
    return best
