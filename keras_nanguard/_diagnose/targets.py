"""Which targets a loss does not accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_nanguard._backends.shared import batches
from keras_nanguard._core import finiteness
from keras_nanguard._diagnose.evidence import TargetFault
from keras_nanguard._keras import layers as keras_layers
from keras_nanguard._keras.losses import class_of, losses_by_output, option_of

PROBABILITIES = (
    *("CategoricalCrossentropy", "BinaryCrossentropy"),
    *("CategoricalFocalCrossentropy", "BinaryFocalCrossentropy"),
)
"""Losses whose targets are probabilities."""

INDICES = ("SparseCategoricalCrossentropy", "CategoricalGeneralizedCrossEntropy")
"""Losses whose targets are class indices."""

_NOT_NEGATIVE = ("Poisson", "KLDivergence", "MeanSquaredLogarithmicError")
"""Losses whose targets are not negative."""


def class_axis(loss: Any) -> int:
    """Return the axis of outputs that holds the classes: the last one, or the `axis` of a loss."""
    axis = option_of(loss, "axis")
    return axis if isinstance(axis, int) else -1


def classes_of(loss: Any, shape: Sequence[int | None]) -> int:
    """Return the number of classes in an output of this shape, with the rows; 0 if unknown."""
    axis = class_axis(loss)
    return int(shape[axis] or 0) if -len(shape) <= axis < len(shape) else 0


class Rejected(NamedTuple):
    """Targets that a loss does not accept.

    Attributes:
        rows: their rows.
        clause: what is wrong, as a clause.
        valid: all targets, with the nearest that the loss accepts in place of these.
    """

    rows: tuple[int, ...]
    clause: str
    valid: finiteness.Array


ROUNDING = 4
"""Number of ulp by which a target may miss its range: a mixture or sum of probabilities in its
dtype takes a few operations, each of which is off by half an ulp of its result.
"""


def rejected(loss: Any, targets: np.ndarray[Any, Any], width: int) -> Rejected | None:
    """Return which targets a loss of Keras does not accept, `None` if it accepts all of them or is
    a custom one.

    Args:
        targets: the targets of one output, of any shape.
        width: number of classes in that output, 0 if unknown; see `classes_of`.
    """
    kind, wide = class_of(loss), finiteness.widen(targets)
    if wide.dtype.kind not in "fiu" or not wide.size:
        return None
    if kind in INDICES:
        wrong = ((wide < 0) | (wide >= width)) if width else wide < 0
        ignored = option_of(loss, "ignore_class")
        wrong = wrong if ignored is None else wrong & (wide != ignored)
        classes = f" with {width} classes" if width else ""
        return _first(wide, wrong, f"class index {{}}{classes}", 0)
    error = _rounding_error(targets)
    if kind in PROBABILITIES:
        wrong = (wide < -error) | (wide > 1 + error)
        words = "{} instead of a probability from 0 to 1"
        return _first(wide, wrong, words, wide.clip(0, 1))
    if kind in _NOT_NEGATIVE:
        return _first(wide, wide < -error, "the negative number {}", wide.clip(0))
    return None


def _rounding_error(targets: finiteness.Array) -> float:
    """Return by how much such targets may miss a bound; Keras rounds float64 to float32."""
    if finiteness.widen(targets).dtype.kind != "f":
        return 0.0
    import ml_dtypes

    ulp = max(float(ml_dtypes.finfo(d).eps) for d in (targets.dtype, np.float32))
    return ROUNDING * ulp * max(1.0, finiteness.largest(targets))


def _first(wide: Any, wrong: Any, words: str, valid: Any) -> Rejected | None:
    """Return the rows of wrong finite targets and, in `words`, the first of them; `None` if none is
    wrong.
    """
    wrong = wrong & np.isfinite(wide)
    if not wrong.any():
        return None
    rows = np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1)) if wrong.ndim else ()
    first = float(wide[wrong].flat[0])
    exact = first.is_integer() and abs(first) < 2**53
    clause = words.format(f"{first:.0f}" if exact else f"{first:g}")
    return Rejected(tuple(map(int, rows)), clause, np.where(wrong, valid, wide))


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
    entries = losses_by_output(model)
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
    entries = [loss for _, loss in losses_by_output(model)]
    if not entries or not any(loss < -1e-3 for loss in losses) or keras_layers.adds_losses(model):
        return None
    if not all(class_of(loss) in PROBABILITIES for loss in entries):
        return None
    proof = f"With probabilities as targets the loss cannot be negative; it was {min(losses):.3g}."
    return TargetFault(str(entries[0].name), "", (), "values that are not probabilities", proof)
