"""What is known of an incident without a replay: its findings, the configuration of its model, the
history of the fit, and whether other code than an update has written a bad number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from keras_nanguard._backends import interface
from keras_nanguard._core import finiteness
from keras_nanguard._core.history import History
from keras_nanguard._core.incident import Finding, Incident
from keras_nanguard._core.literals import LOW, RESULT_SITES
from keras_nanguard._diagnose.evidence import Evidence, OptimizerFacts, RunFacts
from keras_nanguard._keras import (
    layers as keras_layers,
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.train_state import TrainState

SETTINGS = (
    *("weight_decay", "momentum", "beta_1", "beta_2", "rho", "epsilon"),
    *("clipnorm", "clipvalue", "global_clipnorm", "centered", "gradient_accumulation_steps"),
)
"""Hyperparameters of optimizers that are reported with the learning rate, if they are in use."""

LIBRARIES = ("keras.", "keras_nanguard.", "torch.", "optax.")
"""Modules whose optimizers are not the user's own code, with those in which the guard wraps one."""


class RunView(interface.Run, Protocol):
    """What the diagnosis reads of a run of the host (`_fit/run.py::Run`) besides what backends do.

    Attributes:
        directory: folder for files; `None` writes nothing.
        shown: this folder as the user wrote it.
        ring: the snapshots (`_fit/snapshots.py::Ring`).
    """

    directory: str | None
    shown: str | None
    history: History
    ring: Any

    @property
    def tolerated(self) -> frozenset[int]:
        """The `id` of each variable that may be infinite or NaN."""

    def train_state(self) -> TrainState:
        """Return the train state, whose variables have the current values."""


def incident_evidence(model: Any, train_state: TrainState, incident: Incident) -> Evidence:
    """Return the evidence that an incident and the configuration of its model already have.

    Args:
        train_state: its state, before a refused step or after a committed one.
    """
    findings, state, site = incident.findings, bad_before(incident), committed_site(incident)
    # A state that is bad before a refused step may be due to the rate of the step before.
    counted = bool(site) or bool(state and incident.refused)
    return Evidence(
        step=incident.step,
        refused=incident.refused,
        findings=findings,
        state=_with_roles(train_state, (f.path for f in state)),
        bad_site="" if _bad_before_update(incident) else site,
        bad_path=next((f.path for f in findings if f.path), ""),
        run=RunFacts(
            optimizers=tuple(optimizer_facts(o, counted) for o in train_state.optimizers),
            gradient_norm=incident.values.get("gradient_norm", math.nan),
            loss_scale=incident.values.get("loss_scale"),
            low_precision=_lowest(model),
        ),
    )


def bad_before(incident: Incident) -> list[Finding]:
    """Return the findings in the state before the step, or before a validation or prediction."""
    found = [f for f in incident.findings if f.site == "state"]
    if found or not any(site in RESULT_SITES for site in incident.sites):
        return found
    return [f for f in incident.findings if f.site in ("weights", "statistics")]


def committed_site(incident: Incident) -> str:
    """Return the first bad site in the state that a committed step has left, `""` if none."""
    if incident.refused:
        return ""
    kinds = ("nonfinite", "explosion", "out_of_range")
    sites = [f.site for f in incident.findings if f.kind in kinds]
    return next((site for site in ("weights", "slots") if site in sites), "")


def _bad_before_update(incident: Incident) -> bool:
    """Whether the inputs of the update were already bad, as is possible under `observe`."""
    sites = ("inputs", "outputs", "loss", "gradients")
    return any(f.kind == "nonfinite" and f.site in sites for f in incident.findings)


def _with_roles(train_state: TrainState, paths: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return each path with the role of its variable: `weights`, `statistics` or `slots`.

    A path may begin with the name of a model that Keras leaves out if it creates the model from its
    configuration.
    """
    statistics = filter(keras_variables.is_statistic, train_state.other)
    roles = {f"/{v.path}": "statistics" for v in statistics}
    roles |= {f"/{v.path}": "slots" for v in train_state.slots}

    def role(path: str) -> str:
        return next((roles[known] for known in roles if f"/{path}".endswith(known)), "weights")

    return tuple((path, role(path)) for path in paths)


def _lowest(model: Any) -> str:
    """Return the lowest float dtype that a layer of the model computes in, `""` if that is float32
    or higher.
    """
    layers = keras_layers.layers_of(model)
    found = {str(getattr(layer, "compute_dtype", "")) for layer in layers}
    found |= {str(v.dtype) for v in model.variables}
    return next((name for name in LOW if name in found), "")


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
        learning_rate=keras_optimizers.rate_if_known(rate_of, whole),
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
