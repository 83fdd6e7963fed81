"""Whether an optimizer's own arithmetic can have made a number that is not finite, or something else wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.evidence import OptimizerFacts
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras import variables as keras_variables

__all__ = ["must_stay_finite"]

KNOWN = ("SGD", "Adam", "AdamW", "Nadam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Lion")
"""Optimizers of Keras whose update is made of sums, products and roots of gradient, slots and weight, and divides, if at
all, by `epsilon` plus something that is not negative (keras/src/optimizers, `update_step` of each)."""

MODERATE = 1e15
"""Numbers up to this size, and a rate up to `FASTEST`, divided by `SMALLEST` at the least, stay below 1e30 in every term of
these updates: far from the largest float32, 3.4e38."""

FASTEST, SMALLEST = 1e3, 1e-12


def must_stay_finite(
    optimizers: Sequence[Any], facts: Sequence[OptimizerFacts], variables: Sequence[Any], norm: float
) -> bool:
    """Return whether no step of these optimizers can end in NaN or Inf, given numbers of this size.

    Args:
        optimizers: the optimizers.
        facts: their hyper-parameters, in the same order.
        variables: weights and slots as they are now; entries that are not finite are what is in question, and are left out.
        norm: global gradient norm of the step.
    """
    if not (norm <= MODERATE and all(_known(keras_optimizers.inner(o), f) for o, f in zip(optimizers, facts))):
        return False
    return all(_largest_finite(keras_variables.view(v)) <= MODERATE for v in variables)


def _known(optimizer: Any, facts: OptimizerFacts) -> bool:
    betas = [getattr(optimizer, name, 0.0) for name in ("beta_1", "beta_2", "rho", "momentum")]
    return (
        type(optimizer).__module__.startswith("keras.")
        and facts.name in KNOWN
        and facts.dtype in ("float32", "float64")
        and abs(facts.learning_rate) <= FASTEST
        and (facts.epsilon_in_dtype is None or facts.epsilon_in_dtype >= SMALLEST)
        and all(isinstance(beta, (int, float)) and 0.0 <= beta < 1.0 for beta in betas)
    )


def _largest_finite(array: Any) -> float:
    wide = finiteness.widen(array)
    if wide.dtype.kind not in "fc" or not wide.size:
        return 0.0
    finite = np.abs(wide[np.isfinite(wide)])
    return float(finite.max()) if finite.size else 0.0
