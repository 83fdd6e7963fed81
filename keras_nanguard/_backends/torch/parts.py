"""What a step on PyTorch is given: its arguments, and the tensors of the train state, by role."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import keras
import numpy as np
import torch

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.shared.batch_memory import owned
from keras_nanguard._backends.torch import reductions
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._keras import layers as keras_layers, variables as keras_variables
from keras_nanguard._keras.train_state import TrainState

__all__ = ["Given", "Parts", "as_tensors"]


class Parts:
    """A train state, and the tensors in it by role.

    Attributes:
        holders: what has a gradient.
        natives: the tensor of each trainable weight, by the `id` of its variable.
        unlisted: tensors that may be written although Keras lists them nowhere, buffers of torch
            modules included.
        judged_elsewhere: the `id` of tensors that are not statistics.
        slots: the slots of each optimizer that can be bad, and whether their read may wait, by its
            `id`.
    """

    def __init__(self, train_state: TrainState):
        self.train_state = train_state
        updated = (*train_state.trainable, *train_state.slots)
        metrics = [v.value for v in train_state.metrics]
        self.other = [v.value for v in train_state.other]
        self.weights_and_slots = [v.value for v in updated]
        self.small_state = [*self.other, *metrics]
        self.all = [*self.small_state, *self.weights_and_slots]
        self.holders = [getattr(v, "of", v.value) for v in train_state.trainable]
        self.metrics = {id(tensor) for tensor in metrics}
        self.results = {id(tensor) for tensor in train_state.results}
        settings = (*(s for pair in train_state.scales for s in pair), *train_state.rates)
        apart = (*metrics, *self.weights_and_slots, *(v.value for v in settings))
        self.judged_elsewhere = {id(tensor) for tensor in apart}
        listed = {id(t) for t in (*self.other, *self.weights_and_slots)}
        natives = [keras_variables.native(v) for v in train_state.unlisted]
        self.unlisted = [t for t in natives if isinstance(t, torch.Tensor) and id(t) not in listed]
        self.unlisted += [v.value for v in train_state.other if _is_buffer(v)]
        self.paths = {id(v.value): v.path for v in (*train_state.trainable, *train_state.other)}
        self.natives = {id(v): keras_variables.native(v) for v in train_state.trainable}
        self.slots = {id(o): self._slots_of(o) for o in train_state.optimizers}
        self._tensor_attributes = [
            (held, name)
            for held, name, value in keras_layers.attributes_of(train_state.layers)
            if isinstance(value, torch.Tensor)
        ]

    def _slots_of(self, optimizer: Any) -> tuple[list[Any], bool]:
        listed = {id(v) for v in self.train_state.slots}
        slots = [v.value for v in optimizer.variables if id(v) in listed]
        slots = [tensor for tensor in slots if reductions.can_be_bad(tensor)]
        sizes = [(tensor.numel(), tensor.dtype.itemsize) for tensor in slots]
        return slots, rules.slots_may_wait(optimizer, sizes, small=0)

    def slot_versions(self) -> dict[int, list[int]]:
        """Return how often torch has written each slot that may wait, by the `id` of its optimizer.

        If other code has written a slot since the last update, the slots are read after the next
        one. So they need not be read after each, as on other backends those of small networks are.
        """
        waiting = {key: slots for key, (slots, wait) in self.slots.items() if wait}
        return {key: [t._version for t in slots] for key, slots in waiting.items()}

    def updated(
        self, records: Sequence[Update], gradients: float, steps: int, written: Container[int]
    ) -> tuple[list[Any], list[Any]]:
        """Return the tensors to read after an update: weights with the slots that may not wait,
        and other slots if their read is due.

        Args:
            records: the updates.
            gradients: half the sum of squares of the gradients, and of the weights, which weight
                decay of torch adds to them.
            steps: number of steps so far, because torch optimizers have no common counter.
            written: the `id` of the optimizers whose slots other code has written.
        """
        together = [tensor for record in records for tensor in record.tensors]
        separate: list[Any] = []
        due = rules.full_read_is_due(rules.NUMBERS, steps, gradients)
        for key in {id(record.optimizer) for record in records}:
            slots, wait = self.slots[key]
            if not wait:
                together += slots
            elif due or key in written:
                separate += slots
        return together, separate

    def attributes(self, every: bool) -> list[tuple[dict[str, Any], str, Any]]:
        """Return the attributes of layers that are tensors, or all attributes (each may become
        one), with present values.
        """
        if every:
            return keras_layers.attributes_of(self.train_state.layers)
        return [(held, name, held.get(name)) for held, name in self._tensor_attributes]


def _is_buffer(variable: Any) -> bool:
    """Whether this is a buffer of a torch module, which torch itself writes."""
    of_keras = isinstance(variable, keras.Variable)
    return not (of_keras or isinstance(variable.value, torch.nn.Parameter))


class Given:
    """The arguments of one step.

    A tensor that shares its memory with a NumPy array, or with another process, is copied, because
    its owner may overwrite it unnoticed. Any other tensor counts the writes to it, so changes are
    detected.
    """

    __slots__ = ("_args", "_versions")

    def __init__(self, args: Any):
        self._versions: list[tuple[Any, int]] = []
        self._args = self._structure(args)

    def _structure(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._held(value)
        kind = type(value)  # one of these, nearly always; `keras.tree` takes ten times as long
        if kind is tuple or kind is list:
            return kind([self._structure(part) for part in value])
        if kind is dict:
            return {key: self._structure(part) for key, part in value.items()}
        return keras.tree.map_structure(self._held, value)

    def _held(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return owned(value)
        if not value.untyped_storage().resizable():
            return value.detach().clone()
        self._versions.append((value, value._version))
        return value

    @property
    def tensors(self) -> Any:
        """The present arguments."""
        return self._args

    @property
    def args(self) -> Any:
        """The arguments, or `None` if one of them was written since."""
        unchanged = all(value._version == version for value, version in self._versions)
        return self._args if unchanged else None


def as_tensors(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of a step with arrays converted to tensors."""
    converted: tuple[Any, ...] = keras.tree.map_structure(_as_tensor, tuple(args))
    return converted


def _as_tensor(value: Any) -> Any:
    has_numbers = isinstance(value, np.ndarray) and value.dtype.kind != "O"
    return keras.ops.convert_to_tensor(value) if has_numbers else value
