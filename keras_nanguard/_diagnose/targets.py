"""Which targets a loss does not accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._keras.losses import class_of, option_of

PROBABILITIES = (
    *("CategoricalCrossentropy", "BinaryCrossentropy"),
    *("CategoricalFocalCrossentropy", "BinaryFocalCrossentropy"),
    "CategoricalGeneralizedCrossEntropy",
)
"""Losses whose targets are probabilities."""

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
        valid: all targets, with the nearest that the loss accepts in place of these; `None` if
            other targets would not help.
    """

    rows: tuple[int, ...]
    clause: str
    valid: finiteness.Array | None = None


ROUNDING = 4
"""Number of ulp by which a target may miss its range: a mixture or sum of probabilities in its
dtype takes a few operations, each of which is off by half an ulp of its result.
"""


def rejected(loss: Any, targets: np.ndarray[Any, Any], width: int) -> Rejected | None:
    """Return which targets a loss does not accept, `None` if it accepts all of them.

    Args:
        targets: the targets of one output, of any shape.
        width: number of classes in that output, 0 if unknown; see `classes_of`.
    """
    kind, wide = class_of(loss), finiteness.widen(targets)
    if wide.dtype.kind not in "fiu" or not wide.size:
        return None
    if "sparsecategorical" in kind.replace("_", "").lower():  # a custom one, too
        wrong = ((wide < 0) | (wide >= width)) if width else wide < 0
        ignored = option_of(loss, "ignore_class")
        wrong = wrong if ignored is None else wrong & (wide != ignored)
        classes = f" with {width} classes" if width else ""
        return _first(wide, wrong, f"class index {{:g}}{classes}", 0)
    error = _rounding_error(targets)
    if kind in PROBABILITIES:
        wrong = (wide < -error) | (wide > 1 + error)
        words = "{:g} instead of a probability from 0 to 1"
        return _first(wide, wrong, words, wide.clip(0, 1)) or _smoothed(loss)
    if kind in _NOT_NEGATIVE:
        return _first(wide, wide < -error, "the negative number {:g}", wide.clip(0))
    return None


def _rounding_error(targets: finiteness.Array) -> float:
    """Return by how much such targets may miss a bound; Keras rounds float64 to float32."""
    if finiteness.widen(targets).dtype.kind != "f":
        return 0.0
    import ml_dtypes

    ulp = max(float(ml_dtypes.finfo(d).eps) for d in (targets.dtype, np.float32))
    return ROUNDING * ulp * max(1.0, finiteness.largest(targets))


def _first(wide: Any, wrong: Any, words: str, valid: Any) -> Rejected | None:
    """Return the rows of wrong targets and, in `words`, the first of them; `None` if none is."""
    if not wrong.any():
        return None
    rows = np.flatnonzero(wrong.reshape(len(wrong), -1).any(axis=1)) if wrong.ndim else ()
    clause = words.format(wide[wrong].flat[0])
    return Rejected(tuple(map(int, rows)), clause, np.where(wrong, valid, wide))


def _smoothed(loss: Any) -> Rejected | None:
    """Return a label smoothing that makes negative probabilities."""
    smoothing = getattr(loss, "label_smoothing", 0.0)
    if not isinstance(smoothing, (int, float)) or 0.0 <= smoothing <= 1.0:
        return None
    clause = f"label_smoothing={smoothing:g}, which makes negative probabilities"
    return Rejected((), clause)
