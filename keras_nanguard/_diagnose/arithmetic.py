"""Whether the update of an optimizer can have produced a non-finite number, or other code wrote
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.evidence import OptimizerFacts
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables

KNOWN = ("SGD", "Adam", "AdamW", "Nadam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Lion")
"""Optimizers of Keras whose update consists of sums, products and roots of gradient, slots and
weight, and divides only by `epsilon` plus a nonnegative number (keras/src/optimizers, `update_step`
of each). A centered RMSprop divides by the root of a difference, which cancels: it is not among
them.
"""

MODERATE = 1e15
"""With numbers up to this size, a rate up to `MAX_RATE` and an epsilon of at least `MIN_EPSILON`
every term of these updates stays below `TERM`, far from the largest float32, 3.4e38.
"""

TERM = 1e30
"""Magnitude that no term of these updates reaches then."""

MAX_RATE, MIN_EPSILON = 1e3, 1e-12


def must_stay_finite(
    optimizers: Sequence[Any],
    facts: Sequence[OptimizerFacts],
    variables: Sequence[Any],
    norm: float,
) -> bool:
    """Return whether no step of these optimizers can produce NaN, Inf or a number beyond `TERM`,
    given numbers of this size.

    Args:
        optimizers: the optimizers.
        facts: their hyperparameters, in the same order.
        variables: weights and slots, or their values; entries that are not finite, or beyond what
            the terms can be, are ignored.
        norm: global gradient norm of the step.
    """
    if not (
        norm <= MODERATE
        and all(_known(keras_optimizers.inner(o), f) for o, f in zip(optimizers, facts))
    ):
        return False
    return all(
        _largest_ordinary(v if isinstance(v, np.ndarray) else keras_variables.view(v)) <= MODERATE
        for v in variables
    )


def _known(optimizer: Any, facts: OptimizerFacts) -> bool:
    betas = [getattr(optimizer, name, 0.0) for name in ("beta_1", "beta_2", "rho", "momentum")]
    return (
        type(optimizer).__module__.startswith("keras.")
        and facts.name in KNOWN
        and not getattr(optimizer, "centered", False)
        and facts.dtype in ("float32", "float64")
        and abs(facts.learning_rate) <= MAX_RATE
        and (facts.epsilon_in_dtype is None or facts.epsilon_in_dtype >= MIN_EPSILON)
        and all(isinstance(beta, (int, float)) and 0.0 <= beta < 1.0 for beta in betas)
    )


def _largest_ordinary(array: Any) -> float:
    wide = finiteness.widen(array)
    if wide.dtype.kind not in "fc" or not wide.size:
        return 0.0
    ordinary = np.abs(wide[np.abs(wide) < TERM])
    return float(ordinary.max()) if ordinary.size else 0.0
