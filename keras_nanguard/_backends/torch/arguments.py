"""The arguments of a step on PyTorch, kept until later steps need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import torch

from keras_nanguard._backends.shared.batch_memory import owned


class Given:
    """The arguments of one step.

    A tensor that shares its memory with a NumPy array, or with another process, is copied, because
    its owner may overwrite it unnoticed. So is a tensor of `torch.inference_mode`, which counts no
    writes. Any other tensor counts the writes to it, so changes are detected.

    Attributes:
        tensors: the arguments as they are now.
    """

    __slots__ = ("_versions", "tensors")

    def __init__(self, args: Any):
        self._versions: list[tuple[Any, int]] = []
        self.tensors = self._structure(args)

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
        if value.is_inference() or not value.untyped_storage().resizable():
            return value.detach().clone()
        self._versions.append((value, value._version))
        return value

    @property
    def args(self) -> Any:
        """The arguments, or `None` if one of them was written since."""
        unchanged = all(value._version == version for value, version in self._versions)
        return self.tensors if unchanged else None


def as_tensors(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of a step with arrays converted to tensors."""
    converted: tuple[Any, ...] = keras.tree.map_structure(_as_tensor, tuple(args))
    return converted


def _as_tensor(value: Any) -> Any:
    has_numbers = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    return keras.ops.convert_to_tensor(value) if has_numbers else value
