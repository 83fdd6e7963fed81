"""Tensors of PyTorch that belong to no variable of Keras, as variables of Keras: buffers of
modules, parameters of models, slots of optimizers. It is loaded on every backend.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import keras

from keras_nanguard._core import finiteness


def local(tensor: Any) -> Any:
    """Return the part of a tensor that this process has: all of it, or its shard."""
    return getattr(tensor, "_local_tensor", tensor)


class TensorVariable:
    """A torch tensor as a variable with a path and `assign`.

    Args:
        held: what holds the tensor, under `key`; a module may replace a buffer in each call, or
            delete it. Then the last one stays.
        resizable: whether it may get another shape, as the buffer of a module.

    Attributes:
        path, name: its name in the module or optimizer.
    """

    def __init__(
        self, held: MutableMapping[Any, Any], key: Any, path: str, resizable: bool = False
    ):
        self._held, self._key, self.path, self.resizable = held, key, path, resizable
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
        now, tensor = self.value, keras.ops.convert_to_tensor(value)
        if self.resizable and tensor.shape != now.shape:
            self._held[self._key] = tensor.to(device=now.device, dtype=now.dtype)
        else:
            write_tensor(now.detach(), tensor)


def write_tensor(tensor: Any, value: Any) -> None:
    """Write a tensor of PyTorch, each number in memory once: PyTorch cannot write to an expanded
    tensor as a whole (`Normalization(mean=0.0)`).
    """
    if str(tensor.layout) == "torch.strided":
        once = tuple(slice(1 if stride == 0 else None) for stride in tensor.stride())
        tensor, value = tensor[once], value[once]
    tensor.copy_(value)


def is_inference(value: Any) -> bool:
    """Whether it is a tensor of `torch.inference_mode`, which only that mode may write."""
    return hasattr(value, "is_inference") and bool(value.is_inference())


def resizable(variable: Any) -> bool:
    """Whether a variable may get a value of another shape."""
    return getattr(variable, "resizable", False)


class Variables(dict[Any, TensorVariable]):
    """The variable of each tensor, created once, by the `id` of the tensor, or by its place."""

    def of(self, tensor: Any, path: str) -> TensorVariable:
        known = self.get(id(tensor))
        if known is None or known.of is not tensor:
            known = self[id(tensor)] = TensorVariable({0: tensor}, 0, path)
        return known

    def at(self, held: Any, key: str, path: str) -> TensorVariable:
        if not isinstance(held, dict):  # of a scripted module, which does not replace its buffers
            return self.of(held[key], path)
        return self.setdefault((id(held), key), TensorVariable(held, key, path, resizable=True))


_BUFFERS: WeakKeyDictionary[Any, Variables] = WeakKeyDictionary()
"""The variables of the buffers of each module, always the same ones."""


def buffers_of(layers: Sequence[Any]) -> tuple[list[TensorVariable], list[Any]]:
    """Return the buffers of modules of torch within these layers, such as the statistics of a
    `torch.nn.BatchNorm1d` in a `TorchModuleWrapper`: variables for those that belong to the state
    of their module, and the tensors registered with `persistent=False`, or that NumPy has no arrays
    for.
    """
    variables: dict[int, TensorVariable] = {}
    passing: list[Any] = []
    seen = set[Any]()
    for layer in reversed(layers):  # inner layers first: they name theirs
        for prefix, module in layer.named_modules(seen):
            for key, tensor in module._buffers.items():
                if tensor is None:
                    continue
                if key in module._non_persistent_buffers_set or not _is_array(tensor):
                    passing.append(tensor)
                elif id(tensor) not in variables:
                    inner = filter(None, prefix.split("."))
                    path = "/".join([layer.path or layer.name, *inner, key])
                    known = _BUFFERS.setdefault(module, Variables())
                    variables[id(tensor)] = known.at(module._buffers, key, path)
    return list(variables.values()), passing


def _is_array(tensor: Any) -> bool:
    """Whether NumPy has arrays like this tensor."""
    special = tensor.is_quantized or tensor.is_meta or tensor.is_inference()
    kinds = ("float8", "float4", "bits")
    dense = str(tensor.layout) == "torch.strided"
    return dense and not special and not any(kind in str(tensor.dtype) for kind in kinds)


def content_restorer(tensor: Any) -> Callable[[], None] | None:
    """Return a function that restores the content of a tensor if it was written in place; `None`
    for one of `torch.inference_mode`, which counts no writes.
    """
    if tensor.is_inference():
        return None
    version, copy = tensor._version, tensor.detach().clone()
    return lambda: None if tensor._version == version else write_tensor(tensor.detach(), copy)
