"""Rules about the data, if it is given: inputs of the first layer, and targets of the loss."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from keras_nanguard._files.scan import statistics
from keras_nanguard._keras.losses import rejected
from keras_nanguard._lint.rule import Site, rule
from keras_nanguard._lint.rules_outputs import kind_of
from keras_nanguard._lint.subject import Subject

_MAX_INPUT = 1e3
"""Maximum magnitude of an input. Pixels reach 255; initializers assume inputs of about 1, and
outputs scale with them."""

_OF_CLASSES = ("CategoricalCrossentropy", "CategoricalFocalCrossentropy", "KLDivergence")
"""Losses whose targets are a probability for each class."""


@rule(
    "error",
    fix="Check the pipeline for missing values and divisions by 0; drop or fill those rows.",
)
def data_nonfinite(subject: Subject) -> Iterator[Site]:
    """NaN or Inf in the data."""
    targets = [(f"targets of {output.name}", array) for output, array in subject.targets()]
    for name, array in [*subject.inputs(), *targets]:
        if array.dtype.kind == "f" and (bad := statistics([array]).nonfinite):
            yield name, f"{bad} of {array.size} values are NaN or Inf"


@rule("warning", fix="Add an adapted Normalization, or a Rescaling, as the first layer.")
def input_scale(subject: Subject) -> Iterator[Site]:
    """Inputs that are not scaled."""
    if any(placed.kind in ("Normalization", "Rescaling", "Embedding") for placed in subject.layers):
        return
    for name, array in subject.inputs():
        found = statistics([array]) if array.dtype.kind == "f" else None
        if found and (largest := max(-(found.min or 0.0), found.max or 0.0)) > _MAX_INPUT:
            yield name, f"values up to {largest:.3g}, and no layer scales them"


@rule("error", fix="Count classes from 0, and give the last layer one unit per class.")
def labels_out_of_range(subject: Subject) -> Iterator[Site]:
    """Targets that the loss does not accept."""
    for output, array in subject.targets():
        if output.loss is None or not np.isfinite(array.astype(np.float64)).all():
            continue
        if found := rejected(output.loss, array, output.units or 0):
            kind = kind_of(output.loss)
            yield output.name, f"targets with {found.clause}, which {kind} does not accept"
        elif kind_of(output.loss) in _OF_CLASSES and array.ndim > 1:
            total = array.astype(np.float64).sum(-1)
            if np.abs(total - 1).max() > 0.01:
                sums = f"{total.min():g} to {total.max():g}"
                yield output.name, f"rows of targets that add up to {sums} instead of 1"
