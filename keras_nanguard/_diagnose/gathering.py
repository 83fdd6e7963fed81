"""The evidence of an incident: what its findings, its batch, its model and the history of the fit
show, then a replay and the trials.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from keras_nanguard._backends import current, interface
from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.replay import ReplayableStep, rate_if_known
from keras_nanguard._core import finiteness
from keras_nanguard._core.data import named
from keras_nanguard._core.history import History
from keras_nanguard._core.incident import Incident
from keras_nanguard._core.literals import LOW
from keras_nanguard._core.verdict import Report
from keras_nanguard._diagnose.evidence import BatchFacts, Evidence, OptimizerFacts, TrialFacts
from keras_nanguard._diagnose.examination import Case, Start, examine, obstacle_to
from keras_nanguard._diagnose.growth import growth_before
from keras_nanguard._diagnose.targets import negative_loss
from keras_nanguard._keras import (
    layers as keras_layers,
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.train_state import TrainState

ITERATOR = (
    "The step reads from an iterator, so a replay would take another batch from it. Pass the batch"
    " to the step as an argument."
)
"""Why a step is not replayed."""

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


def gather(run: RunView, incident: Incident, report: Report | None) -> Evidence:
    """Return everything that can be measured about an incident."""
    train_state, start, refused = run.train_state(), start_of(run), incident.refused
    batch = None if report is None else report.batch
    e = known_evidence(run.model, train_state, incident, batch)
    # The whole state was finite after the step before.
    finite_before = [good for good, _ in run.history.last(1)] == [incident.step - 1]
    written, notes = bool(e.state) and refused and finite_before, tuple[str, ...]()
    if e.bad_site:
        written = is_by_other_code(e, run.history, train_state)
        if negative := negative_slot(train_state):
            notes = (f"{negative} has negative values, whose roots in the update are NaN.",)
    weights = () if e.left_by_step else train_state.trainable
    own = (incident.values.get("loss", math.nan), e.gradient_norm)
    growth = growth_before(incident.step, run.history, own, weights, start)
    fault = None
    if report is None or report.verdict.finite:
        fault = negative_loss(run.model, [*growth.losses, own[0]])
    step = step_of(run) if refused and not e.state and batch is not None else None
    if step is not None and (obstacle := obstacle_of(run, step, batch)):
        step, notes = None, (obstacle,)
    e = dataclasses.replace(
        e,
        mode=mode_of(run),
        growth=growth,
        written=written,
        trials=TrialFacts(target_fault=fault),
        notes=notes,
    )
    return e if step is None else examine(Case(step, batch, e, start))


def known_evidence(
    model: Any, train_state: TrainState, incident: Incident, batch: Any = None
) -> Evidence:
    """Return the evidence of an incident that needs no replay and no history.

    Args:
        train_state: its state, before a refused step or after a committed one.
        batch: the arguments of the step, `None` if they are not known.
    """
    e = Evidence(incident)
    state = _with_roles(train_state, e.paths_before)
    # A state that is bad before a refused step may be due to the rate of the step before.
    counted = bool(e.left_by_step or (state and incident.refused))
    constraints = ((v.path, getattr(v, "constraint", None)) for v in train_state.trainable)
    return dataclasses.replace(
        e,
        state=state,
        optimizers=tuple(optimizer_facts(o, counted) for o in train_state.optimizers),
        constraints={path: type(c).__name__ for path, c in constraints if c is not None},
        low_precision=_lowest(model),
        batch=BatchFacts() if batch is None else batch_facts(model, batch),
    )


def batch_facts(model: Any, batch: Any) -> BatchFacts:
    """Return what the batch of a step contains."""
    names, ids = keras_layers.input_names(model), not keras_layers.takes_floats(model)

    def shown(parts: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(dataclasses.replace(p, name=named(p.name, names)) for p in parts)

    return BatchFacts(
        count=batches.row_count(batch),
        inputs_bad=shown(batches.bad(batch, ("inputs",))),
        targets_bad=batches.bad(batch, ("targets", "sample_weight")),
        inputs=tuple(
            dataclasses.replace(p, integer=p.integer and ids)
            for p in shown(batches.spreads(batch, "inputs"))
        ),
        targets=batches.spreads(batch, "targets"),
    )


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


# The step of a run


def start_of(run: RunView) -> Start | None:
    """Return the state before the first step, `None` if it was not kept."""
    return None if run.ring.start is None else run.ring.start.value


def obstacle_of(run: RunView, step: ReplayableStep, batch: Any) -> str:
    """Return why the step of a run cannot be replayed, as a sentence; `""` if it can."""
    reads = run.access.reads_iterator or batches.takes_iterator(batch)
    return ITERATOR if reads else obstacle_to(step)


def step_of(run: RunView) -> ReplayableStep:
    """Return the step of a run, to be run again."""
    transaction, traced = run.access.transaction, run.train_state().optimizers
    return ReplayableStep(
        transaction.replayed,
        run.model,
        # A compiled step keeps an optimizer that the model has no more, an eager replay does not.
        list(dict.fromkeys((*traced, *keras_optimizers.find_optimizers(run.model)))),
        updates_first=transaction.learned.updates_first,
        losses=transaction.losses,
        untracked=list(transaction.learned.untracked.values()),
        tolerated=run.tolerated,
        judged=transaction.judged,
    )


def mode_of(run: RunView) -> str:
    """Return the mode in which a guarded step runs, `"eager"` if it cannot be replayed in that
    mode.
    """
    uncompiled = "eager" if getattr(run.model, "run_eagerly", False) else "graph"
    mode = "xla" if run.access.transaction.jit else uncompiled
    return mode if mode in current.replay().MODES else "eager"


# The optimizers


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
