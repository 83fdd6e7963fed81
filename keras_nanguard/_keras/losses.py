"""The losses of a compiled model, by output, and the targets that they accept.

Private names of Keras:

- ``LossFunctionWrapper._fn_kwargs``: the options of a loss that wraps a function.
- ``Model._compile_metrics`` and its ``_user_metrics``: the metrics that were passed to `compile`.
- ``Trainer._compile_loss`` and its ``_flat_losses``; before Keras 3.8 or so its ``flat_losses``,
  ``inferred_output_names`` and ``output_names``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.variable_names import snake_case
from keras_nanguard._keras import layers as keras_layers, variables as keras_variables


def losses_by_output(model: Any) -> list[tuple[str, Any]]:
    """Return `(name of the output, loss)` for each loss given to `compile`."""
    compiled: Any = getattr(model, "_compile_loss", None)
    if hasattr(compiled, "flat_losses"):  # Keras before 3.8 or so
        names = compiled.inferred_output_names or compiled.output_names or ()
        found = list(itertools.zip_longest(names, compiled.flat_losses or ()))
    else:
        entries = getattr(compiled, "_flat_losses", None) or ()
        found = [(entry.name, entry.loss) for entry in entries]
    return [(str(name or ""), loss) for name, loss in found if loss is not None]


def losses_of(model: Any) -> list[Any]:
    """Return the `CompileLoss` of a model, the losses given to `compile`, and those of layers."""
    compiled = getattr(model, "_compile_loss", None)
    found = [compiled] if compiled is not None else []
    found += [loss for _, loss in losses_by_output(model)]
    held = keras_layers.held_by(keras_layers.layers_of(model))
    found += [item for item in held if isinstance(item, keras.losses.Loss)]
    return keras_variables.unique(found)


def build_losses(model: Any, y: Any, y_pred: Any) -> None:
    """Build the losses given to `compile`, as the first step does: only then they have names."""
    compiled: Any = getattr(model, "_compile_loss", None)
    if compiled is not None and not getattr(compiled, "built", True):
        with contextlib.suppress(Exception):  # the step reports the fault of the targets
            compiled.build(y, y_pred)


def given_metrics(model: Any) -> Any:
    """Return the metrics that were passed to `compile`, or `None`."""
    return getattr(getattr(model, "_compile_metrics", None), "_user_metrics", None)


PROBABILITIES = (
    *("CategoricalCrossentropy", "BinaryCrossentropy"),
    *("CategoricalFocalCrossentropy", "BinaryFocalCrossentropy"),
    "CategoricalGeneralizedCrossEntropy",
)
"""Losses whose targets are probabilities."""

_NOT_NEGATIVE = ("Poisson", "KLDivergence", "MeanSquaredLogarithmicError")
"""Losses whose targets are not negative."""

_CLASSES = {snake_case(n): n for n in dir(keras.losses) if n[0].isupper()}
"""The classes in `keras.losses`, by the names of their functions."""


def class_of(loss: Any) -> str:
    """Return the name of the class of Keras that a loss or metric belongs to: `"KLDivergence"` for
    an instance of it or of a class derived from it, for `keras.losses.kl_divergence`, and for a
    partial or a wrapper of that function. A custom one has its own name.
    """
    function = getattr(loss, "fn", loss)
    function = getattr(function, "func", function)  # of a partial
    name = str(getattr(function, "__name__", ""))
    if name:
        return _CLASSES.get(name, name)
    own = keras_layers.class_of(loss)
    return type(loss).__name__ if own in ("", "Loss") else own


def option_of(loss: Any, name: str) -> Any:
    """Return an option of a loss or metric, such as `from_logits`; `None` if it has none."""
    value = getattr(loss, name, None)
    if value is None:
        value = (getattr(loss, "_fn_kwargs", None) or {}).get(name)
    if value is None and isinstance(loss, functools.partial):
        value = loss.keywords.get(name)
    return value


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


def logged_losses(logs: Any) -> dict[str, Any]:
    """Return the losses among the logs, for a step that never calls `compute_loss`: `loss`, else
    `*loss`."""
    known = logs if isinstance(logs, dict) else {}
    losses = {name: value for name, value in known.items() if str(name).endswith("loss")}
    return {"loss": losses["loss"]} if "loss" in losses else losses


def predicted(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `y_pred` of a call of `Model.compute_loss`, `None` if there is none."""
    names = ("x", "y", "y_pred", "sample_weight", "training")
    return {**dict(zip(names, args)), **kwargs}.get("y_pred")
