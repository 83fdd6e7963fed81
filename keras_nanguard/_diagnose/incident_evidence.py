"""What is known of an incident without a replay: its findings, its batch, and the configuration of
its model; and what the diagnosis reads of a run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from keras_nanguard._backends import interface
from keras_nanguard._backends.shared import batches
from keras_nanguard._core.data import named
from keras_nanguard._core.history import History
from keras_nanguard._core.incident import Incident
from keras_nanguard._core.literals import LOW
from keras_nanguard._diagnose.evidence import BatchFacts, Evidence, bad_before, left_by_step
from keras_nanguard._diagnose.optimizers import optimizer_facts
from keras_nanguard._keras import layers as keras_layers, variables as keras_variables
from keras_nanguard._keras.train_state import TrainState


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


def known_evidence(
    model: Any, train_state: TrainState, incident: Incident, batch: Any = None
) -> Evidence:
    """Return the evidence of an incident that needs no replay and no history.

    Args:
        train_state: its state, before a refused step or after a committed one.
        batch: the arguments of the step, `None` if they are not known.
    """
    state = _with_roles(train_state, (f.path for f in bad_before(incident)))
    # A state that is bad before a refused step may be due to the rate of the step before.
    counted = bool(left_by_step(incident) or (state and incident.refused))
    constraints = ((v.path, getattr(v, "constraint", None)) for v in train_state.trainable)
    return Evidence(
        incident,
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
