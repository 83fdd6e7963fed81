"""Diagnosis of an exception that the backend raised in a step, from its message."""

from __future__ import annotations

import math
import re
from typing import Any

import keras
import numpy as np

from keras_nanguard._backends.shared import batches
from keras_nanguard._core import finiteness
from keras_nanguard._core.incident import Diagnosis, Finding, Incident
from keras_nanguard._core.literals import Cause
from keras_nanguard._diagnose.advice import advice as advice_for
from keras_nanguard._diagnose.causes import SEEN, SHOWN, Conclusion
from keras_nanguard._diagnose.evidence import BatchFacts, Evidence
from keras_nanguard._diagnose.sentences import at_rows, data_sentences
from keras_nanguard._diagnose.targets import (
    INDICES,
    LossTargets,
    classes_of,
    rejected,
    targets_by_loss,
)
from keras_nanguard._keras import layers as keras_layers
from keras_nanguard._keras.losses import class_of

SPARSE = keras.losses.SparseCategoricalCrossentropy()
"""The loss that checks class indices for a custom one."""

BROKEN = re.compile(
    r"Cholesky decomposition (?:was not successful|failed)|Input is not invertible"
    r"|not positive[- ]definite|(?:matrix|input) is singular"
    r"|Tensor had (?:NaN|Inf|-Inf|\+Inf|[-+ ,a-zA-Z]*(?:NaN|Inf))[a-zA-Z ,+-]* values"
)
NODE = re.compile(r"Detected at node (\S+)/(\w+) defined")
CALLED = re.compile(r"when calling (\w+)\.call\(\)")
CLASS = re.compile(
    r"label value of (-?\d+) which is outside the valid range"  # TensorFlow
    r"|Target (-?\d+) is out of bounds"  # PyTorch
)
LABELS = re.compile(r"Label values: ([-\d ]+)")  # TensorFlow, all of the batch
ENTRY = re.compile(r"indices\[([\d,]+)\] = (-?\d+) is not in \[0, (\d+)\)")  # TensorFlow
UNKNOWN_ENTRY = re.compile(r"index out of range in self")  # PyTorch, of an embedding
EITHER = re.compile(r"index out of bounds: 0 <= \w+ < (\d+)")  # PyTorch's compiler, of either

Explained = tuple[Finding, Diagnosis]


def explain_exception(model: Any, message: str, batch: Any = None) -> Explained | None:
    """Return the finding and the diagnosis for an exception, `None` if it is not about the data or
    a numeric domain.

    Args:
        batch: the arguments of the step, if they are known.
    """
    if found := CLASS.search(message):
        return _class_index(model, batch, found[1] or found[2], LABELS.search(message))
    if found := EITHER.search(message):
        of_targets = _class_index(model, batch, high=int(found[1]))
        return of_targets if of_targets[1].samples else _entry(model, batch, message)
    if ENTRY.search(message) or UNKNOWN_ENTRY.search(message):
        return _entry(model, batch, message)
    if found := BROKEN.search(message):
        return _broken(model, message, found[0])
    return None


def _class_index(
    model: Any, batch: Any, index: str = "", labels: re.Match[str] | None = None, high: int = 0
) -> Explained:
    """A class index in the targets that a loss does not have. They are class indices if the loss is
    sparse, or the only one.

    Args:
        batch: the arguments of the step, if they are known.
        index: the class index, if the message has it.
        labels: the targets that the message lists, for a batch that is not known.
        high: number of classes of the loss, 0 if the message does not have it.
    """
    found = targets_by_loss(model, batch, keras_layers.output_shapes(model))
    sparse = [one for one in found if len(found) == 1 or "sparse" in one.loss.name]
    culprit, rows = str(sparse[0].loss.name) if sparse else "loss", tuple[int, ...]()
    seen = f"The targets contain class index {index}; the model has no such class."
    valid = "classes - 1"
    for one in sparse:
        classes = classes_of(one.loss, one.shape)
        targets = _class_indices(one, classes, index, labels if len(sparse) == 1 else None)
        if targets is None or high not in (0, classes):
            continue
        loss = one.loss if class_of(one.loss) in INDICES else SPARSE
        if (wrong := rejected(loss, targets, classes)) is not None:
            culprit, rows = str(one.loss.name), wrong.rows
            seen = f"The targets contain {wrong.clause}, in {at_rows(rows)}."
            valid = str(classes - 1) if classes else valid
            break
        if one.part is not None and not finiteness.is_finite(one.part.array):
            return _nonfinite(batch, one.part.path)
    on_gpu = "On a CPU the backend raises an exception here; on a GPU the loss may be NaN instead."
    advice = f"Give {culprit!r} class indices from 0 to {valid}, or make the last layer wider."
    finding = Finding("targets", "out_of_range")
    cause: Cause = "target_out_of_range"
    return finding, Diagnosis(cause, culprit, rows, (seen, on_gpu), (advice,), SEEN)


def _nonfinite(batch: Any, path: str) -> Explained:
    """NaN or Inf where an index is expected, in the targets of this path in the batch."""
    bad = tuple(p for p in batches.bad(batch, ("targets",)) if p.name == path)
    finding, rows = Finding("targets", "nonfinite"), bad[0].rows
    facts = BatchFacts(batches.row_count(batch), targets_bad=bad)
    conclusion = Conclusion("target_nonfinite", path, rows, SEEN)
    advice = advice_for(Evidence(Incident(0, 0, 0, (finding,)), batch=facts), conclusion)
    seen = tuple(data_sentences(facts))
    return finding, Diagnosis("target_nonfinite", path, rows, seen, advice, SEEN)


def _class_indices(
    one: LossTargets, classes: int, index: str, labels: re.Match[str] | None
) -> np.ndarray[Any, Any] | None:
    """Return the class indices that a loss was given, `None` if they are not known; of a custom
    loss, which may ignore others, the one that the message names and zeros.
    """
    per_row = math.prod(length or 0 for length in one.shape[1:]) // max(classes, 1)
    if one.part is not None:
        targets = one.part.array
    elif labels and per_row:
        targets = np.array(labels[1].split(), int).reshape(-1, per_row)
    else:
        return None
    custom = class_of(one.loss) not in INDICES
    return np.where(targets == int(index), targets, 0) if custom and index else targets


def _entry(model: Any, batch: Any, message: str) -> Explained:
    """An index beyond a table, that of an `Embedding` if one fits. PyTorch reports neither the
    index nor the number of entries: both are searched in the model and the batch.
    """
    row: int | None = None
    value: int | None = None
    high = 0
    if found := ENTRY.search(message):
        row, value, high = int(found[1].split(",")[0]), int(found[2]), int(found[3])
    tables = [table for table in _tables(model) if high in (0, table.input_dim)]
    layer = None if tables else _layer_of(model, message)
    if len(tables) == 1:
        layer, high = tables[0], int(tables[0].input_dim)
    culprit = "" if layer is None else keras_layers.path_of(layer, None, model)
    inputs = [part.array for part in batches.parts(batch) if part.role == "inputs"]
    if value is None and high and len(inputs) == 1:
        # An index below 0 counts from the end.
        for wrong in np.argwhere((inputs[0] < -high) | (inputs[0] >= high))[:1]:
            row, value = int(wrong[0]), int(inputs[0][tuple(wrong)])
    elif row is not None and not any((array[row : row + 1] == value).any() for array in inputs):
        row = row if tables else None  # the indices of another table need not be in the batch
    kind, whose, larger = "an embedding table", "the Embedding", "input_dim"
    if not tables:
        kind, whose, larger = "a table", "the layer", "the table"
    entries = f" of {high} entries" if high else ""
    seen = f"An index is beyond the end of {kind}{entries}."
    if value is not None:
        valid = f"with indices from 0 to {high - 1}"
        seen = f"The index {value} is outside of {kind}{entries}, {valid}."
    owner = repr(culprit) if culprit else whose
    advice = f"Make {larger} of {owner} larger than the largest index, or map unknown ones."
    finding = Finding("inputs", "out_of_range", value=None if value is None else float(value))
    rows = () if row is None else (row,)
    confidence = SHOWN if value is None else SEEN
    return finding, Diagnosis("forward_domain", culprit, rows, (seen,), (advice,), confidence)


def _tables(model: Any) -> list[Any]:
    layers = keras_layers.layers_of(model)
    return [la for la in layers if getattr(la, "input_dim", None) and hasattr(la, "embeddings")]


def _broken(model: Any, message: str, words: str) -> Explained:
    """A matrix that has no decomposition or inverse, or a check of TensorFlow for NaN."""
    node, layer = NODE.search(message), _layer_of(model, message)
    culprit = keras_layers.path_of(layer, None, model) if layer is not None else ""
    backward = node is not None and "gradient_tape" in node[1].split("/")
    phase = " in the backward pass" if backward else ""
    operation = f" The operation was {node[2]}{phase}." if node is not None else ""
    seen, is_check = f"The backend raised: {words}.{operation}", words.startswith("Tensor had")
    advice = "Add a small multiple of the identity to a matrix before decomposing or inverting it."
    finding = Finding("gradients" if backward else "outputs", "nonfinite", culprit)
    cause: Cause = "gradient_domain" if backward else "forward_domain"
    return finding, Diagnosis(cause, culprit, (), (seen,), () if is_check else (advice,), SEEN)


def _layer_of(model: Any, message: str) -> Any:
    """Return the layer of the node that TensorFlow names, or the only layer of the class that Keras
    reports as being called; `None` if unknown.
    """
    layers, node = keras_layers.layers_of(model)[1:], NODE.search(message)
    words = CALLED.search(message)
    by_name = {layer.name: layer for layer in layers}
    for name in reversed(node[1].split("/") if node is not None else ()):
        for known in (name, re.sub(r"_\d+$", "", name)):
            if known in by_name:
                return by_name[known]
    called = [la for la in layers if words is not None and type(la).__name__ == words[1]]
    return called[0] if len(called) == 1 else None
