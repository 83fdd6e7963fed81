"""The tensors of a train state on PyTorch by role."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from keras_nanguard._backends.torch.modules import Modes, replaceable_buffers
from keras_nanguard._backends.torch.optimizers import TorchOptimizer, unlisted_optimizers
from keras_nanguard._keras import (
    attributes as keras_attributes,
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.torch_tensors import TensorVariable, local
from keras_nanguard._keras.train_state import TrainState


class StateTensors:
    """A train state, and the tensors in it by role.

    Args:
        model: its model, whose modules have buffers.

    Attributes:
        by_site: what updates write: `weights`, `slots`.
        weights_and_slots: both in one list.
        updated: the `id` of each of them.
        other: statistics, frozen weights, seeds and states of recurrent layers.
        small_state: `other`, and the tensors of metrics.
        all: all of these tensors.
        gradient_holders: what has a gradient: whole tensors, not shards.
        unlisted: tensors that may be written although Keras lists them nowhere, buffers of torch
            modules included.
        not_statistics: the `id` of tensors that are not statistics.
        modes: which modules train, and which of their parameters.
        unlisted_optimizers: the optimizers of torch in attributes of the model or its layers that
            are not among the optimizers of the train state.
    """

    def __init__(self, train_state: TrainState, model: Any):
        self.train_state, self._buffers = train_state, replaceable_buffers(model)
        self.by_site = {"weights": _of(train_state.trainable), "slots": _of(train_state.slots)}
        self.weights_and_slots = [t for tensors in self.by_site.values() for t in tensors]
        self.updated = set(map(id, self.weights_and_slots))
        self.other, metrics = _of(train_state.other), _of(train_state.metrics)
        self.small_state = [*self.other, *metrics]
        self.all = [*self.small_state, *self.weights_and_slots]
        self.gradient_holders = [getattr(v, "of", v.value) for v in train_state.trainable]
        self.not_statistics = self.updated.union(map(id, _of(train_state.unjudged)))
        listed = self.updated.union(map(id, self.other))
        natives = map(keras_variables.native, train_state.unlisted)
        self.unlisted = [t for t in natives if isinstance(t, torch.Tensor) and id(t) not in listed]
        torchs = (v.value for v in train_state.other if isinstance(v, TensorVariable))
        self.unlisted += [t for t in torchs if not isinstance(t, torch.nn.Parameter)]  # buffers
        attributes = self.attributes(every=True)
        self._of_tensors = [entry for entry in attributes if isinstance(entry[2], torch.Tensor)]
        self.modes = Modes(model)
        self.unlisted_optimizers = unlisted_optimizers(train_state.layers, train_state.optimizers)

    def gradients(self) -> list[tuple[str, Any]]:
        """Return the current gradients that a known optimizer uses, each with the path of its
        weight; all of them if none does, because it has copies of the weights, or if one is not
        built yet.
        """
        trained = list(map(_trained_by, self.train_state.optimizers))
        used = {id(t) for tensors in trained for t in tensors} & set(map(id, self.gradient_holders))
        used = used if all(trained) else set()
        pairs = [(v.path, t) for v, t in zip(self.train_state.trainable, self.gradient_holders)]
        pairs = [(path, t) for path, t in pairs if id(t) in used or not used]
        return [(path, local(t.grad)) for path, t in pairs if t.grad is not None]

    def attributes(self, every: bool) -> list[tuple[dict[str, Any], str, Any]]:
        """Return attributes of layers and buffers: tensors, or all, which may become tensors; then
        buffers as they were read, because such a step reads its state.
        """
        if every:
            return [*keras_attributes.attributes_of(self.train_state.layers), *self._buffers]
        return [(held, name, held.get(name)) for held, name, _ in self._of_tensors]

    def buffers(self) -> list[Any]:
        """Return the current buffers of modules, which may replace them in each call."""
        now = (held.get(name) for held, name, _ in self._buffers)
        return [tensor for tensor in now if isinstance(tensor, torch.Tensor)]


def _of(variables: Iterable[Any]) -> list[Any]:
    return [variable.value for variable in variables]


def _trained_by(optimizer: Any) -> list[Any]:
    """Return the tensors that an optimizer updates; none before one of Keras is built."""
    if isinstance(optimizer, TorchOptimizer):
        return optimizer.parameters
    return _of(keras_optimizers.trained_by(optimizer))
