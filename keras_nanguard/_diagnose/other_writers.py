"""Who wrote a bad number into the state: the update of the optimizer, or other code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.incident import Incident
from keras_nanguard._diagnose.evidence import OptimizerFacts
from keras_nanguard._diagnose.incident_evidence import RunView
from keras_nanguard._keras import (
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.train_state import TrainState

PROVEN = ("SGD", "Adam", "AdamW", "Nadam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Lion")
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

MIN_EPSILON = 1e-12


def is_by_other_code(
    run: RunView, incident: Incident, train_state: TrainState, facts: Sequence[OptimizerFacts]
) -> bool:
    """Whether no update can have produced the bad values of a committed step: given numbers of this
    size, no step of these optimizers makes NaN, Inf or a number beyond `TERM`. The root of a
    negative slot is NaN, whoever has written that.

    Args:
        facts: the hyperparameters of the optimizers, in their order.
    """
    if negative_slot(train_state):
        return False
    norms = [m.norm for m in run.history.since(incident.step)]
    norm = incident.values.get("gradient_norm", math.nan)
    if norms and not incident.values:  # an incident between two steps has no norm
        norm = norms[-1]
    values = map(keras_variables.view, (*train_state.trainable, *train_state.slots))
    return (
        norm <= MODERATE
        and all(map(_is_proven, map(keras_optimizers.inner, train_state.optimizers), facts))
        and all(_largest_ordinary(array) <= MODERATE for array in values)
    )


def negative_slot(train_state: TrainState) -> str:
    """Return the path of the first second moment that has a negative value, `""` if none has."""
    moments = keras_optimizers.second_moments(train_state.optimizers)
    return next((v.path for v in moments if (keras_variables.view(v) < 0).any()), "")


def _is_proven(optimizer: Any, facts: OptimizerFacts) -> bool:
    betas = [getattr(optimizer, name, 0.0) for name in ("beta_1", "beta_2", "rho", "momentum")]
    return (
        type(optimizer).__module__.startswith("keras.")
        and facts.name in PROVEN
        and not getattr(optimizer, "centered", False)
        and facts.dtype in ("float32", "float64")
        and facts.learning_rate is not None
        and not facts.rate_is_bad
        and (facts.epsilon_in_dtype is None or facts.epsilon_in_dtype >= MIN_EPSILON)
        and all(isinstance(beta, (int, float)) and 0.0 <= beta < 1.0 for beta in betas)
    )


def _largest_ordinary(array: Any) -> float:
    """Return the largest magnitude of an array, without entries that are not finite or beyond what
    the terms can be."""
    wide = finiteness.widen(array)
    return finiteness.largest(wide[np.abs(wide) < TERM])
