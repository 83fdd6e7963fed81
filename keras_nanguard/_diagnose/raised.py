"""Diagnosis of an exception that the backend raised in a step, from its message."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_nanguard._backends.shared import batches
from keras_nanguard._core.evidence import Evidence
from keras_nanguard._core.incident import Diagnosis, Finding
from keras_nanguard._keras import layers as keras_layers, losses as keras_losses

__all__ = ["by_replay", "explained"]

LABEL = re.compile(
    r"label value of (-?\d+) which is outside the valid range of \[(-?\d+), (-?\d+)\)"
)
LABELS = re.compile(r"Label values: ([-\d ]+)")
NODE = re.compile(r"Detected at node (\S+)/(\w+) defined")
BROKEN = re.compile(
    r"Cholesky decomposition (?:was not successful|failed)|Input is not invertible|not positive[-"
    r" ]definite|(?:matrix|input) is singular"
    r"|Tensor had (?:NaN|Inf|-Inf|\+Inf|[-+ ,a-zA-Z]*(?:NaN|Inf))[a-zA-Z ,+-]* values"
)
INDEX = re.compile(r"indices\[([\d,]+)\] = (-?\d+) is not in \[0, (\d+)\)")
OUT_OF_BOUNDS = re.compile(r"Target (-?\d+) is out of bounds")  # PyTorch, of a class index
UNNAMED = re.compile(r"index out of bounds: 0 <= \w+ < (\d+)")  # PyTorch's compiler, of either
OUT_OF_TABLE = re.compile(r"index out of range in self")  # PyTorch, of an embedding
CALLED = re.compile(r"when calling (\w+)\.call\(\)")


def explained(
    model: Any, error: BaseException, batch: Any = None
) -> tuple[Finding, Diagnosis] | None:
    """Return the finding and the diagnosis for an exception, `None` if it is not about the data or
    a numeric domain.

    Args:
        model: the model whose step raised it.
        error: the exception.
        batch: the arguments of the step, if they are known.
    """
    message = str(error)
    if (bound := OUT_OF_BOUNDS.search(message)) is not None:
        return _class(model, int(bound[1]), batch)
    if (beyond := UNNAMED.search(message)) is not None:
        indices = _class_indices(batch) if _labels_per_row(model) else []
        wrong = [index for index in indices if not 0 <= index < int(beyond[1])]
        return _class(model, wrong[0], batch) if wrong else _lookup(model, batch)
    if OUT_OF_TABLE.search(message) is not None:
        return _lookup(model, batch)
    label = LABEL.search(message)
    if label is not None:
        given = LABELS.search(message)
        labels = [int(word) for word in given[1].split()] if given else []
        return _label(model, labels, int(label[1]), int(label[2]), int(label[3]))
    index = INDEX.search(message)
    if index is not None:
        return _index(model, int(index[1].split(",")[0]), int(index[2]), int(index[3]))
    broken = BROKEN.search(message)
    return _broken(model, message, broken[0]) if broken is not None else None


def by_replay(model: Any, evidence: Evidence, report: Any) -> Diagnosis | None:
    """Return the diagnosis of a step whose replay raises an exception, `None` if the exception has
    none.

    Args:
        model: the model.
        evidence: the evidence, with the result of the replay.
        report: has the `batch`.
    """
    if evidence.replay != "failed":
        return None
    found = explained(model, RuntimeError(evidence.replay_error), report.batch)
    return found[1] if found is not None else None


def _class(model: Any, value: int, batch: Any) -> tuple[Finding, Diagnosis]:
    """A class index that PyTorch reports without its row: the row is searched in the targets of the
    batch.
    """
    shapes = keras_layers.output_shapes(model)
    high = int(shapes[0][-1] or 0) if len(shapes) == 1 and shapes[0] else 0
    return _label(model, _class_indices(batch), value, 0, high)


def _class_indices(batch: Any) -> list[int]:
    targets = (
        [p.array for p in batches.parts(batch) if p.role == "targets"] if batch is not None else []
    )
    return (
        [int(label) for label in targets[0].reshape(-1)]
        if len(targets) == 1 and np.isfinite(targets[0]).all()
        else []
    )


def _lookup(model: Any, batch: Any) -> tuple[Finding, Diagnosis]:
    """An index beyond an embedding table, of which PyTorch reports neither: both are searched in
    the model and the batch.
    """
    tables = [
        layer
        for layer in keras_layers.layers_of(model)
        if getattr(layer, "input_dim", None) and hasattr(layer, "embeddings")
    ]
    high = int(tables[0].input_dim) if len(tables) == 1 else 0
    arrays = (
        [p.array for p in batches.parts(batch) if p.role == "inputs"] if batch is not None else []
    )
    for array in arrays if high and len(arrays) == 1 else []:
        wrong = np.argwhere((array < 0) | (array >= high))
        if len(wrong):
            return _index(model, int(wrong[0][0]), int(array[tuple(wrong[0])]), high)
    culprit = keras_layers.path_of(tables[0], None, model) if len(tables) == 1 else ""
    seen = (
        f"An index is beyond the end of an embedding table{f' of {high} entries' if high else ''}.",
    )
    do = ("Make input_dim of the Embedding larger than the largest index, or map unknown ones.",)
    return Finding("inputs", "out_of_range"), Diagnosis(
        "forward_domain", culprit, (), seen, do, 0.9
    )


def _label(
    model: Any, labels: Sequence[int], value: int, low: int, high: int
) -> tuple[Finding, Diagnosis]:
    width = _labels_per_row(model)
    wrong = [i for i, label in enumerate(labels) if not low <= label < high] if width else []
    rows = tuple(dict.fromkeys(i // width for i in wrong))
    names = [str(loss.name) for _, loss in keras_losses.losses_by_output(model)]
    culprit = next(
        (name for name in names if "sparse" in name), names[0] if len(names) == 1 else "loss"
    )
    return Finding(
        "targets", "out_of_range", "", 0, 0, len(labels) or None, float(value)
    ), Diagnosis(
        "target_out_of_range",
        culprit,
        rows,
        (
            (
                f"The targets contain the class index {value}; the model has {high} classes, from"
                f" {low} to {high - 1}."
            ),
            "On a CPU the backend raises an exception here; on a GPU the loss may be NaN instead.",
        ),
        (
            (
                f"Give {culprit!r} class indices from {low} to {high - 1}, or make the last layer"
                " wider."
            ),
        ),
        0.97,
    )


def _labels_per_row(model: Any) -> int:
    """Return the number of labels per row of the batch, 0 if unknown."""
    shapes = keras_layers.output_shapes(model)
    if len(shapes) != 1:
        return 0
    count = 1
    for length in shapes[0][1:-1]:
        count *= length or 0
    return count


def _index(model: Any, row: int, value: int, high: int) -> tuple[Finding, Diagnosis]:
    tables = [
        layer
        for layer in keras_layers.layers_of(model)
        if getattr(layer, "input_dim", None) == high
    ]
    culprit = keras_layers.path_of(tables[0], None, model) if len(tables) == 1 else ""
    return Finding("inputs", "out_of_range", "", 0, 0, None, float(value)), Diagnosis(
        "forward_domain",
        culprit,
        (row,),
        (
            (
                f"The index {value} is outside of an embedding table of {high} entries, with"
                f" indices from 0 to {high - 1}."
            ),
        ),
        (
            (
                f"Make input_dim of {culprit or 'the Embedding'!r} larger than the largest index,"
                " or map unknown ones."
            ),
        ),
        0.95,
    )


def _broken(model: Any, message: str, words: str) -> tuple[Finding, Diagnosis]:
    node = NODE.search(message)
    names = node[1].split("/") if node is not None else []
    by_name = {layer.name: layer for layer in keras_layers.layers_of(model)[1:]}
    known = [
        n for name in reversed(names) for n in (name, re.sub(r"_\d+$", "", name)) if n in by_name
    ]
    layer = by_name[known[0]] if known else _called(model, message)
    culprit = keras_layers.path_of(layer, None, model) if layer is not None else ""
    return Finding("outputs", "nonfinite", culprit), Diagnosis(
        "forward_domain",
        culprit,
        (),
        (
            f"The backend raised: {words}."
            + (f" The operation was {node[2]}." if node is not None else ""),
        ),
        ("Add a small multiple of the identity to a matrix before decomposing or inverting it.",),
        0.95,
    )


def _called(model: Any, message: str) -> Any:
    """Return the only layer of the class that Keras reports as being called, `None` if unknown."""
    words = CALLED.search(message)
    layers = [
        layer
        for layer in keras_layers.layers_of(model)[1:]
        if words is not None and type(layer).__name__ == words[1]
    ]
    return layers[0] if len(layers) == 1 else None
