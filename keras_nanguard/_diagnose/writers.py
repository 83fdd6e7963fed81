"""Who wrote a bad number into the state: an optimizer, a constraint, or other code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.evidence import OptimizerFacts
from keras_nanguard._core.incident import Incident
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.train_state import TrainState

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


def was_finite(run: Any, step: int) -> bool:
    """Whether the whole state was finite after the step before this one."""
    return [good for good, _ in run.history.last(1)] == [step - 1]


def constraint_of(train_state: TrainState, path: str) -> str:
    """Return the class of the constraint of a weight, `""` if it has none."""
    weight = next((v for v in train_state.trainable if v.path == path), None)
    constraint = getattr(weight, "constraint", None)
    return "" if constraint is None else type(constraint).__name__


def wrote_otherwise(
    run: Any, incident: Incident, train_state: TrainState, facts: Sequence[OptimizerFacts]
) -> bool:
    """Whether no update can have produced the bad values of a committed step, neither from the
    current values nor from a snapshot and the gradients since.
    """
    norms = [norm for _, _, norm in run.history.since(incident.step)]
    norm = incident.values.get("gradient_norm", math.nan)
    if norms and not incident.values:  # an incident between two steps has no norm
        norm = norms[-1]
    optimizers, variables = train_state.optimizers, [*train_state.trainable, *train_state.slots]
    if must_stay_finite(optimizers, facts, variables, norm):
        return True
    snapshot, committed = run.ring.newest(), incident.committed
    if snapshot is None or committed is None or not snapshot.at_hand:
        return False
    norms = [one for _, _, one in run.history.since(snapshot.step)]
    values = [value for v in variables if (value := snapshot.value(v)) is not None]
    known = len(values) == len(variables) and len(norms) >= committed - snapshot.good - 1
    return known and must_stay_finite(optimizers, facts, values, max(norms, default=norm))


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
