"""The hyperparameters of optimizers, and whether an update or other code has written a bad number
into the state.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_nanguard._backends.shared.replay import rate_if_known
from keras_nanguard._core import finiteness
from keras_nanguard._core.history import History
from keras_nanguard._diagnose.evidence import Evidence, OptimizerFacts
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.train_state import TrainState

SETTINGS = (
    *("weight_decay", "momentum", "beta_1", "beta_2", "rho", "epsilon"),
    *("clipnorm", "clipvalue", "global_clipnorm", "centered", "gradient_accumulation_steps"),
)
"""Hyperparameters of optimizers that are reported with the learning rate, if they are in use."""

LIBRARIES = ("keras.", "keras_nanguard.", "torch.", "optax.")
"""Modules whose optimizers are not the user's own code, with those in which the guard wraps one."""


def optimizer_facts(whole: Any, committed: bool = False) -> OptimizerFacts:
    """Return the hyperparameters of an optimizer; `committed`: the step in question has already
    been counted.
    """
    optimizer = keras_optimizers.inner(whole)
    rate_of = keras_optimizers.rate_before if committed else keras_optimizers.learning_rate
    dtypes = {str(v.dtype) for v in keras_optimizers.trained_by(optimizer)}
    dtype = next((d for d in ("float16", "bfloat16", "float64") if d in dtypes), "float32")
    epsilon = _number(getattr(optimizer, "epsilon", None))
    rounding = "float32" if dtype == "bfloat16" else dtype
    settings = {name: getattr(optimizer, name, None) for name in SETTINGS}
    known = {
        name: float(value)
        for name, value in settings.items()
        if isinstance(value, (int, float)) and value
    }
    return OptimizerFacts(
        name=type(optimizer).__name__,
        learning_rate=rate_if_known(rate_of, whole),
        epsilon=epsilon,
        epsilon_in_dtype=None if epsilon is None else float(np.asarray(epsilon, rounding)),
        dtype=dtype,
        clips=any(
            settings[name] is not None and _number(settings[name]) != 0.0
            for name in ("clipnorm", "clipvalue", "global_clipnorm")
        ),
        scaled=keras_optimizers.is_loss_scaled(whole),
        scheduled=keras_optimizers.rate_variable(optimizer) is None,
        settings=known,
        iteration=keras_optimizers.scheduled_iteration(optimizer, int(committed)),
        own=not type(optimizer).__module__.startswith(LIBRARIES),
    )


def _number(value: Any) -> float | None:
    """Return a hyperparameter as a number; the smallest of several (`eps` of torch's `Adafactor`),
    `None` if it is none.
    """
    if isinstance(value, (tuple, list)):
        return min((n for n in map(_number, value) if n is not None), default=None)
    try:
        return float(value)
    except Exception:  # noqa: BLE001  an optimizer of the user's may keep anything there
        return None


# Who wrote a bad number into the state: the update of the optimizer, or other code


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


def is_by_other_code(e: Evidence, history: History, train_state: TrainState) -> bool:
    """Whether no update can have produced the bad values of a committed step: given numbers of this
    size, no step of these optimizers makes NaN, Inf or a number beyond `TERM`. The root of a
    negative slot is NaN, whoever has written that.

    Args:
        train_state: the state that the step has left, with the optimizers of the evidence.
    """
    if negative_slot(train_state):
        return False
    norm, norms = e.gradient_norm, [m.norm for m in history.since(e.incident.step)]
    if norms and not e.incident.values:  # an incident between two steps has no norm
        norm = norms[-1]
    values = map(keras_variables.view, (*train_state.trainable, *train_state.slots))
    return (
        norm <= MODERATE
        and all(map(_is_proven, map(keras_optimizers.inner, train_state.optimizers), e.optimizers))
        and all(_largest_ordinary(array) <= MODERATE for array in values)
    )


def negative_slot(train_state: TrainState) -> str:
    """Return the path of the first second moment that has a negative value, `""` if none has."""
    moments = keras_optimizers.second_moments(train_state.optimizers)
    return next((v.path for v in moments if (keras_variables.view(v) < 0).any()), "")


def _is_proven(optimizer: Any, facts: OptimizerFacts) -> bool:
    betas = [getattr(optimizer, name, 0.0) for name in ("beta_1", "beta_2", "rho", "momentum")]
    return (
        keras_optimizers.class_of_keras(optimizer) in PROVEN
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
