"""The evidence of an incident: what its findings, its batch, its model and the history of the fit
show, then a replay and the trials.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from keras_nanguard._backends import current, interface
from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.replay import ReplayableStep
from keras_nanguard._core.data import named
from keras_nanguard._core.history import History
from keras_nanguard._core.incident import Incident
from keras_nanguard._core.literals import LOW
from keras_nanguard._core.verdict import Report
from keras_nanguard._diagnose.evidence import BatchFacts, Evidence, TrialFacts
from keras_nanguard._diagnose.examination import Case, Start, examine, obstacle_to
from keras_nanguard._diagnose.growth import growth_before
from keras_nanguard._diagnose.optimizers import is_by_other_code, negative_slot, optimizer_facts
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
