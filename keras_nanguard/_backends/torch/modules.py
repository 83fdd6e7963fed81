"""Adapter of `torch.nn.Module` to the interface of a Keras model, and what modules have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from keras_nanguard._keras.torch_tensors import TensorVariable, Variables


def tensors_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors among these values and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


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
