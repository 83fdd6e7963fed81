"""The train state of a model on PyTorch: its modules, their modes and buffers, and its tensors by
role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from keras_nanguard._backends.torch.optimizers import TorchOptimizer, unlisted_optimizers
from keras_nanguard._keras import (
    attributes as keras_attributes,
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.torch_tensors import TensorVariable, Variables, local
from keras_nanguard._keras.train_state import TrainState


def derives_from(module: Any, *names: str) -> bool:
    """Whether a class of a module has one of these names. Torch may lack the class itself."""
    return any(base.__name__ in names for base in type(module).__mro__)


def is_sharded(variables: Iterable[Any]) -> bool:
    """Whether this process has only a part of one of these variables."""
    return any(v.of is not v.value for v in variables if isinstance(v, TensorVariable))


def modules_of(model: Any) -> Iterator[Any]:
    """Return the modules of a model of torch, or of the layers of a model of Keras, which may be in
    lists that torch does not know.
    """
    of_torch = [model.of] if isinstance(model, TorchModule) else []
    layers = of_torch or ([] if model is None else model._flatten_layers())
    owners = [layer for layer in layers if isinstance(layer, torch.nn.Module)]
    return iter({id(module): module for owner in owners for module in owner.modules()}.values())


class Modes:
    """Which modules of a model are in training mode, which of their parameters are trainable, and
    whether this thread records gradients. A step may change them for a part of it, and end halfway.
    """

    def __init__(self, model: Any):
        modules = list(modules_of(model))
        self._parameters = [p for m in modules for p in m.parameters(recurse=False)]
        # A frozen scripted module has no mode.
        self._modules = [module for module in modules if hasattr(module, "training")]

    def restorer(self) -> Callable[[], None]:
        """Return a function that restores the current modes."""
        is_enabled = torch.is_grad_enabled()
        training = [module.training for module in self._modules]
        trainable = [parameter.requires_grad for parameter in self._parameters]

        def restore() -> None:
            torch.set_grad_enabled(is_enabled)
            for module, before in zip(self._modules, training):
                if module.training != before:
                    module.training = before
            for parameter, before in zip(self._parameters, trainable):
                if parameter.requires_grad != before and parameter.is_leaf:
                    parameter.requires_grad_(before)

        return restore


def replaceable_buffers(model: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """Return `(dict of the module, name, tensor)` for each buffer that a model may replace: not
    those of a scripted module.
    """
    held = [module._buffers for module in modules_of(model)]
    return [(b, *item) for b in held if isinstance(b, dict) for item in b.items()]


class TorchModule:
    """A module as a model: its parameters are weights, its buffers are statistics."""

    def __init__(self, module: Any):
        self.of, self.name = module, type(module).__name__
        self.stop_training = False
        self._known = Variables()

    @property
    def variables(self) -> list[TensorVariable]:
        for module in self.of.modules():  # a pass without a backward pass leaves whole parameters
            if derives_from(module, "FSDPModule"):
                module.reshard()
        places = {id(tensor): (held, key) for held, key, tensor in replaceable_buffers(self)}
        known, weights = self._known, self.of.named_parameters()
        buffers = [
            known.at(*places[id(t)], name) if id(t) in places else known.of(t, name)
            for name, t in self.of.named_buffers()
        ]
        return [*(known.of(tensor, name) for name, tensor in weights), *buffers]

    @property
    def trainable_variables(self) -> list[TensorVariable]:
        return [v for v in self.variables if v.trainable]

    @property
    def non_trainable_variables(self) -> list[TensorVariable]:
        return [v for v in self.variables if not v.trainable]

    def _flatten_layers(self, include_self: bool = True, recursive: bool = True) -> list[Any]:
        """Return no layers: a module has no layers of Keras."""
        return []


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
