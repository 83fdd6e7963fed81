"""Rules about the data, if it is given: inputs of the first layer, and targets of the loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._files.scanner import statistics
from keras_nanguard._lint.rule import Site, rule
from keras_nanguard._lint.rules_outputs import kind_of, option_of
from keras_nanguard._lint.subject import Output, Subject

_MAX_INPUT = 1e3
"""Maximum magnitude of an input. Pixels reach 255; initializers assume inputs of about 1, and
outputs scale with them."""


@rule(
    "error",
    fix="Check the pipeline for missing values and divisions by 0; drop or fill those rows.",
)
def data_nonfinite(subject: Subject) -> Iterator[Site]:
    """NaN or Inf in the data."""
    targets = [(f"targets of {output.name}", array) for output, array in subject.targets()]
    for name, array in [*subject.inputs(), *targets]:
        if array.dtype.kind == "f" and (bad := statistics(array).nonfinite):
            yield name, f"{bad} of {array.size} values are NaN or Inf"


@rule("warning", fix="Add an adapted Normalization, or a Rescaling, as the first layer.")
def input_scale(subject: Subject) -> Iterator[Site]:
    """Inputs that are not scaled."""
    if any(placed.kind in ("Normalization", "Rescaling", "Embedding") for placed in subject.layers):
        return
    for name, array in subject.inputs():
        found = statistics(array) if array.dtype.kind == "f" else None
        if found and (largest := max(-(found.min or 0.0), found.max or 0.0)) > _MAX_INPUT:
            yield name, f"values up to {largest:.3g}, and no layer scales them"


@rule("error", fix="Count classes from 0, and give the last layer one unit per class.")
def labels_out_of_range(subject: Subject) -> Iterator[Site]:
    """Targets that the loss does not accept."""
    for output, array in subject.targets():
        if output.loss is None or not np.isfinite(array.astype(np.float64)).all():
            continue
        if sentence := _rejected(output, array):
            yield output.name, sentence


def _rejected(output: Output, targets: NDArray[Any]) -> str:
    """Return what of the targets the loss does not accept, `""` if it accepts all of them."""
    kind = kind_of(output.loss)
    if kind == "SparseCategoricalCrossentropy":
        return _rejected_labels(output, targets)
    low, high = float(targets.min()), float(targets.max())
    if kind in ("BinaryCrossentropy", "BinaryFocalCrossentropy") and (low < 0 or high > 1):
        return f"targets from {low:g} to {high:g} for {kind}, which expects 0 to 1"
    if kind in ("Poisson", "MeanSquaredLogarithmicError") and low < 0:
        return f"targets down to {low:g} for {kind}, which expects nonnegative targets"
    of_classes = ("CategoricalCrossentropy", "CategoricalFocalCrossentropy", "KLDivergence")
    if kind in of_classes and targets.ndim > 1:
        total = targets.astype(np.float64).sum(-1)
        if low < 0 or np.abs(total - 1).max() > 0.01:
            return f"rows of targets that add up to {total.min():g} to {total.max():g} instead of 1"
    return ""


def _rejected_labels(output: Output, labels: NDArray[Any]) -> str:
    ignored = option_of(output.loss, "ignore_class")
    counted = labels if ignored is None else labels[labels != ignored]
    if not output.units or not counted.size:
        return ""
    low, high = float(counted.min()), float(counted.max())
    if low >= 0 and high < output.units:
        return ""
    also = "" if ignored is None else f" and {ignored}"
    found = f"labels from {low:g} to {high:g} for {output.units} outputs"
    return f"{found}: valid are 0 to {output.units - 1}{also}"
