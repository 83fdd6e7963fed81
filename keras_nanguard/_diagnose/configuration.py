"""The configuration of a model: its optimizers, and which targets each loss gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_nanguard._backends.shared import batches
from keras_nanguard._core.literals import LOW
from keras_nanguard._diagnose.evidence import OptimizerFacts, TargetFault
from keras_nanguard._keras import (
    layers as keras_layers,
    losses as keras_losses,
    optimizers as keras_optimizers,
)

SETTINGS = (
    *("weight_decay", "momentum", "beta_1", "beta_2", "rho", "epsilon"),
    *("clipnorm", "clipvalue", "global_clipnorm", "centered", "gradient_accumulation_steps"),
)
"""Hyperparameters of optimizers that are reported with the learning rate, if they are in use."""

LIBRARIES = ("keras.", "keras_nanguard.", "torch.", "optax.")
"""Modules whose optimizers are not the user's own code, with those in which the guard wraps one."""


def lowest(model: Any) -> str:
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
    epsilon = getattr(optimizer, "epsilon", None)
    rounded = np.float16 if dtype == "float16" else np.float32
    settings = {name: getattr(optimizer, name, None) for name in SETTINGS}
    known = {
        name: float(value)
        for name, value in settings.items()
        if isinstance(value, (int, float)) and value
    }
    return OptimizerFacts(
        name=type(optimizer).__name__,
        learning_rate=keras_optimizers.rate_if_known(rate_of, whole),
        epsilon=None if epsilon is None else float(epsilon),
        epsilon_in_dtype=None if epsilon is None else float(rounded(epsilon)),
        dtype=dtype,
        clips=any(settings[name] for name in ("clipnorm", "clipvalue", "global_clipnorm")),
        scaled=keras_optimizers.is_loss_scaled(whole),
        scheduled=keras_optimizers.rate_variable(optimizer) is None,
        settings=known,
        iteration=keras_optimizers.scheduled_iteration(optimizer, int(committed)),
        own=not type(optimizer).__module__.startswith(LIBRARIES),
    )


class LossTargets(NamedTuple):
    """The targets of one loss.

    Attributes:
        output: name of the output, `""` if it has none.
        part: the targets in the batch, `None` if unknown.
        shape: shape of the output, with the rows; `()` if unknown.
    """

    output: str
    loss: Any
    part: batches.Part | None
    shape: tuple[int | None, ...]


def targets_by_loss(
    model: Any, batch: Any, outputs: Sequence[tuple[str, tuple[int | None, ...]]]
) -> list[LossTargets]:
    """Return each compiled loss with its targets and the shape of its output.

    Losses, targets and outputs in dicts can be in three different orders, so they are matched by
    name, and only without names by place.

    Args:
        batch: the arguments of the step; `None` if unknown.
        outputs: path and shape of each output.
    """
    entries = keras_losses.losses_by_output(model)
    targets = [(part.path, part) for part in batches.parts(batch) if part.role == "targets"]

    def of(items: Sequence[tuple[str, Any]], name: str, place: int) -> Any:
        named = {path.rpartition("/")[2]: item for path, item in items}
        if name in named:
            return named[name]
        known = len(items) in (1, len(entries)) and place < len(items)
        return items[place][1] if known else None

    return [
        LossTargets(name, loss, of(targets, name, place), of(outputs, name, place) or ())
        for place, (name, loss) in enumerate(entries)
    ]


def negative_loss(model: Any, losses: Sequence[float]) -> TargetFault | None:
    """Return the problem of the targets that a negative loss implies, if no loss of the model can
    be negative.
    """
    entries = [loss for _, loss in keras_losses.losses_by_output(model)]
    if not entries or not any(loss < -1e-3 for loss in losses) or keras_layers.adds_losses(model):
        return None
    if not all(keras_losses.class_of(loss) in keras_losses.PROBABILITIES for loss in entries):
        return None
    proof = f"With probabilities as targets the loss cannot be negative; it was {min(losses):.3g}."
    return TargetFault(str(entries[0].name), "", (), "values that are not probabilities", proof)
