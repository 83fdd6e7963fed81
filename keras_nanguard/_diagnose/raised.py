"""Diagnosis of an exception that the backend raised in a step, from its message."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_nanguard._backends.shared import batches
from keras_nanguard._core.incident import Diagnosis, Finding
from keras_nanguard._core.literals import Cause
from keras_nanguard._diagnose.facts import targets_by_loss
from keras_nanguard._keras import layers as keras_layers, losses as keras_losses

LABEL = re.compile(
    r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)"  # TensorFlow
)
LABELS = re.compile(r"Label values: ([-\d ]+)")
NODE = re.compile(r"Detected at node (\S+)/(\w+) defined")
BROKEN = re.compile(
    r"Cholesky decomposition (?:was not successful|failed)|Input is not invertible"
    r"|not positive[- ]definite|(?:matrix|input) is singular"
    r"|Tensor had (?:NaN|Inf|-Inf|\+Inf|[-+ ,a-zA-Z]*(?:NaN|Inf))[a-zA-Z ,+-]* values"
)
INDEX = re.compile(r"indices\[([\d,]+)\] = (-?\d+) is not in \[0, (\d+)\)")
OUT_OF_BOUNDS = re.compile(r"Target (-?\d+) is out of bounds")  # PyTorch, of a class index
UNNAMED = re.compile(r"index out of bounds: 0 <= \w+ < (\d+)")  # PyTorch's compiler, of either
OUT_OF_TABLE = re.compile(r"index out of range in self")  # PyTorch, of an embedding
CALLED = re.compile(r"when calling (\w+)\.call\(\)")

Explained = tuple[Finding, Diagnosis]


def explained(model: Any, message: str, batch: Any = None) -> Explained | None:
    """Return the finding and the diagnosis for an exception, `None` if it is not about the data or
    a numeric domain.

    Args:
        model: the model whose step raised it.
        message: the message of the exception.
        batch: the arguments of the step, if they are known.
    """
    if found := LABEL.search(message):
        listed = LABELS.search(message)
        labels = [int(word) for word in listed[1].split()] if listed else []
        high = int(found[2])
        fitting = [out for out in _outputs(model, batch) if out.classes == high]
        fitting = [out._replace(labels=labels) for out in fitting]
        return _label(model, fitting, int(found[1]), high)
    if found := OUT_OF_BOUNDS.search(message):
        value, outputs = int(found[1]), _outputs(model, batch)
        blamed = [out for out in outputs if value in out.wrong.values()][:1]
        return _label(model, blamed or outputs, value)
    if found := UNNAMED.search(message):
        high, outputs = int(found[1]), _outputs(model, batch)
        wrong = [out for out in outputs if out.wrong and out.classes == high]
        if wrong:
            return _label(model, wrong[:1], next(iter(wrong[0].wrong.values())))
        return _lookup(model, batch)
    if OUT_OF_TABLE.search(message):
        return _lookup(model, batch)
    if found := INDEX.search(message):
        return _index(model, int(found[1].split(",")[0]), int(found[2]), int(found[3]))
    if found := BROKEN.search(message):
        return _broken(model, message, found[0])
    return None


class _Output(NamedTuple):
    """An output whose targets are class indices.

    Attributes:
        loss: name of its loss.
        classes: number of classes, 0 if unknown.
        per_row: number of labels per row of the batch, 0 if unknown.
        labels: the labels of the batch, none if unknown.
    """

    loss: str
    classes: int
    per_row: int
    labels: Sequence[int]

    @property
    def wrong(self) -> dict[int, int]:
        """The labels that are no class, by their place."""
        return {i: n for i, n in enumerate(self.labels) if not 0 <= n < self.classes}

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows with such labels."""
        return tuple(dict.fromkeys(i // self.per_row for i in self.wrong)) if self.per_row else ()


def _outputs(model: Any, batch: Any) -> list[_Output]:
    """Return the outputs of a functional model whose targets are class indices: those with a loss
    of that kind, and the only output of a model.
    """
    found = targets_by_loss(model, batch, keras_layers.output_shapes(model))
    return [
        _Output(
            str(loss.name),
            int(shape[-1] or 0),
            math.prod(length or 0 for length in shape[1:-1]),
            () if part is None else _labels(part.array),
        )
        for _, loss, part, shape in found
        if shape and (len(found) == 1 or "sparse" in loss.name)
    ]


def _labels(targets: np.ndarray[Any, Any]) -> list[int]:
    known = np.isfinite(targets).all()
    return [int(label) for label in targets.reshape(-1)] if known else []


def _label(model: Any, outputs: Sequence[_Output], value: int, high: int = 0) -> Explained:
    """A class index outside of `[0, high)`, in the targets of one of these outputs. `high` is 0 if
    it is unknown.
    """
    names = [str(loss.name) for _, loss in keras_losses.losses_by_output(model)]
    only = names[0] if len(names) == 1 else "loss"
    culprit = next((name for name in names if "sparse" in name), only)
    rows: tuple[int, ...] = ()
    size: int | None = None
    if len(outputs) == 1:
        found = outputs[0]
        high, rows, size = high or found.classes, found.rows, len(found.labels) or None
        culprit = found.loss
    valid = f"from 0 to {high - 1}" if high else "from 0 to classes - 1"
    classes = f"the model has {high} classes, {valid}" if high else "the model has no such class"
    seen = (
        f"The targets contain the class index {value}; {classes}.",
        "On a CPU the backend raises an exception here; on a GPU the loss may be NaN instead.",
    )
    advice = f"Give {culprit!r} class indices {valid}, or make the last layer wider."
    finding = Finding("targets", "out_of_range", size=size, value=float(value))
    return finding, Diagnosis("target_out_of_range", culprit, rows, seen, (advice,), 0.97)


def _arrays(batch: Any, role: str) -> list[np.ndarray[Any, Any]]:
    found = [] if batch is None else batches.parts(batch)
    return [part.array for part in found if part.role == role]


def _lookup(model: Any, batch: Any) -> Explained:
    """An index beyond an embedding table, of which PyTorch reports neither: both are searched in
    the model and the batch.
    """
    tables = _tables(model)
    high = int(tables[0].input_dim) if len(tables) == 1 else 0
    arrays = _arrays(batch, "inputs")
    for array in arrays if high and len(arrays) == 1 else []:
        wrong = np.argwhere((array < 0) | (array >= high))
        if len(wrong):
            return _index(model, int(wrong[0][0]), int(array[tuple(wrong[0])]), high)
    return _index(model, None, None, high)


def _index(model: Any, row: int | None, value: int | None, high: int) -> Explained:
    """An index beyond an embedding table of `high` entries (0: unknown), in words."""
    tables = [table for table in _tables(model) if high in (0, table.input_dim)]
    culprit = keras_layers.path_of(tables[0], None, model) if len(tables) == 1 else ""
    entries = f" of {high} entries" if high else ""
    seen = f"An index is beyond the end of an embedding table{entries}."
    if value is not None:
        valid = f"with indices from 0 to {high - 1}"
        seen = f"The index {value} is outside of an embedding table{entries}, {valid}."
    table = repr(culprit) if culprit else "the Embedding"
    advice = f"Make input_dim of {table} larger than the largest index, or map unknown ones."
    finding = Finding("inputs", "out_of_range", value=None if value is None else float(value))
    rows = () if row is None else (row,)
    confidence = 0.9 if value is None else 0.95
    return finding, Diagnosis("forward_domain", culprit, rows, (seen,), (advice,), confidence)


def _tables(model: Any) -> list[Any]:
    layers = keras_layers.layers_of(model)
    return [la for la in layers if getattr(la, "input_dim", None) and hasattr(la, "embeddings")]


def _broken(model: Any, message: str, words: str) -> Explained:
    """A matrix that has no decomposition or inverse, or a check of TensorFlow for NaN."""
    node = NODE.search(message)
    names = node[1].split("/") if node is not None else []
    by_name = {layer.name: layer for layer in keras_layers.layers_of(model)[1:]}
    candidates = (n for name in reversed(names) for n in (name, re.sub(r"_\d+$", "", name)))
    known = next((name for name in candidates if name in by_name), None)
    layer = by_name[known] if known else _called(model, message)
    culprit = keras_layers.path_of(layer, None, model) if layer is not None else ""
    backward = "gradient_tape" in names
    phase = " in the backward pass" if backward else ""
    operation = f" The operation was {node[2]}{phase}." if node is not None else ""
    seen = f"The backend raised: {words}.{operation}"
    advice = "Add a small multiple of the identity to a matrix before decomposing or inverting it."
    finding = Finding("gradients" if backward else "outputs", "nonfinite", culprit)
    cause: Cause = "gradient_domain" if backward else "forward_domain"
    return finding, Diagnosis(cause, culprit, (), (seen,), (advice,), 0.95)


def _called(model: Any, message: str) -> Any:
    """Return the only layer of the class that Keras reports as being called, `None` if unknown."""
    words = CALLED.search(message)
    name = words[1] if words is not None else ""
    layers = [la for la in keras_layers.layers_of(model)[1:] if type(la).__name__ == name]
    return layers[0] if len(layers) == 1 else None
