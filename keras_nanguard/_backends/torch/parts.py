"""The tensors of a train state on PyTorch, by role."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import keras
import torch

from keras_nanguard._backends.shared import rules
from keras_nanguard._backends.torch import reductions
from keras_nanguard._backends.torch.tensors import local
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._keras import layers as keras_layers, variables as keras_variables
from keras_nanguard._keras.train_state import TrainState


class Parts:
    """A train state, and the tensors in it by role.

    Attributes:
        other: statistics, frozen weights, seeds and states of recurrent layers.
        metrics: the `id` of the tensors of metrics.
        small_state: `other`, and the tensors of metrics.
        weights_and_slots: what updates write.
        all: all of these tensors.
        holders: what has a gradient.
        unlisted: tensors that may be written although Keras lists them nowhere, buffers of torch
            modules included.
        results: the `id` of tensors that earlier calls have left in layers.
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

    def gradients(self) -> list[tuple[str, Any]]:
        """Return the current gradients, each with the path of its weight."""
        pairs = zip(self.train_state.trainable, self.holders)
        return [(v.path, local(t.grad)) for v, t in pairs if t.grad is not None]

    def slot_versions(self) -> dict[int, list[int]]:
        """Return how often torch has written each slot that may wait, by the `id` of its optimizer.

        If other code has written a slot since the last update, the slots are read after the next
        one. So they need not be read after each update, unlike the slots of small networks on other
        backends.
        """
        waiting = {key: slots for key, (slots, wait) in self.slots.items() if wait}
        return {key: [t._version for t in slots] for key, slots in waiting.items()}

    def slots_written_since(self, versions: Mapping[int, Sequence[int]]) -> set[int]:
        """Return the `id` of the optimizers whose slots do not have these versions any more."""
        now = self.slot_versions()
        return {key for key, counted in now.items() if versions.get(key) != counted}

    def updated(
        self, records: Sequence[Update], due: bool, written: Container[int]
    ) -> dict[str, list[Any]]:
        """Return the tensors to read after an update: `weights` with the slots that may not wait,
        and other `slots` if their read is due.

        Args:
            records: the updates.
            due: whether to read all slots.
            written: the `id` of the optimizers whose slots other code has written.
        """
        weights = [tensor for record in records for tensor in record.tensors]
        waiting: list[Any] = []
        for key in {id(record.optimizer) for record in records}:
            slots, wait = self.slots[key]
            if not wait:
                weights += slots
            elif due or key in written:
                waiting += slots
        return {"weights": weights, "slots": waiting}

    def attributes(self, every: bool) -> list[tuple[dict[str, Any], str, Any]]:
        """Return the attributes of layers that are tensors, or all attributes (each may become
        one), with current values.
        """
        if every:
            return keras_layers.attributes_of(self.train_state.layers)
        return [(held, name, held.get(name)) for held, name in self._tensor_attributes]


def _is_buffer(variable: Any) -> bool:
    """Whether this is a buffer of a torch module, which torch itself writes."""
    of_keras = isinstance(variable, keras.Variable)
    return not (of_keras or isinstance(variable.value, torch.nn.Parameter))
