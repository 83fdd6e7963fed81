"""Tensors of PyTorch that belong to no variable of Keras, as variables: buffers of modules,
parameters of models of torch, slots of optimizers of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import keras

from keras_nanguard._core import finiteness
from keras_nanguard._keras import variables as keras_variables


def local(tensor: Any) -> Any:
    """Return the part of a tensor that this process has: all of it, or its shard."""
    return getattr(tensor, "_local_tensor", tensor)


class TensorVariable:
    """A torch tensor as a variable with a path and `assign`.

    Args:
        held: what holds the tensor, under `key`; a module may replace a buffer in each call, or
            delete it. Then the last one stays.

    Attributes:
        path, name: its name in the module or optimizer.
    """

    def __init__(self, held: Mapping[Any, Any], key: Any, path: str):
        self._held, self._key, self.path = held, key, path
        self._last = held[key]
        self.name = path.rpartition(".")[2].replace("running_var", "running_variance")

    @property
    def of(self) -> Any:
        """The tensor."""
        now = self._held.get(self._key)
        if now is not None:
            self._last = now
        return self._last

    @property
    def value(self) -> Any:
        """The part of it that this process has: its shard if `fully_shard` has split it."""
        return local(self.of)

    @property
    def trainable(self) -> bool:
        return bool(self.of.requires_grad)

    @property
    def dtype(self) -> str:
        return finiteness.dtype_name(self.value.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    def assign(self, value: Any) -> None:
        keras_variables.write_tensor(self.value.detach(), keras.ops.convert_to_tensor(value))


class Variables(dict[Any, TensorVariable]):
    """The variable of each tensor, created once, by the `id` of the tensor, or by its place."""

    def of(self, tensor: Any, path: str) -> TensorVariable:
        known = self.get(id(tensor))
        if known is None or known.of is not tensor:
            known = self[id(tensor)] = TensorVariable({0: tensor}, 0, path)
        return known

    def at(self, held: dict[str, Any], key: str, path: str) -> TensorVariable:
        return self.setdefault((id(held), key), TensorVariable(held, key, path))


_BUFFERS: WeakKeyDictionary[Any, Variables] = WeakKeyDictionary()
"""The variables of the buffers of each module, always the same ones."""


def buffers_of(layers: Sequence[Any]) -> tuple[list[TensorVariable], list[Any]]:
    """Return the buffers of modules of torch within these layers, such as the statistics of a
    `torch.nn.BatchNorm1d` in a `TorchModuleWrapper`: variables for those that belong to the state
    of their module, and the tensors registered with `persistent=False`, whose shape may change.
    """
    variables: dict[int, TensorVariable] = {}
    passing: list[Any] = []
    seen = set[Any]()
    for layer in reversed(layers):  # inner layers first: they name theirs
        for prefix, module in layer.named_modules(seen):
            for key, tensor in module._buffers.items():
                if tensor is None:
                    continue
                if key in module._non_persistent_buffers_set:
                    passing.append(tensor)
                elif id(tensor) not in variables:
                    inner = filter(None, prefix.split("."))
                    path = "/".join([layer.path or layer.name, *inner, key])
                    known = _BUFFERS.setdefault(module, Variables())
                    variables[id(tensor)] = known.at(module._buffers, key, path)
    return list(variables.values()), passing
