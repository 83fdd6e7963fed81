"""What a step on torch was given, held until something goes wrong: references, checked for changes made in place."""

from __future__ import annotations

from typing import Any

import keras
import torch

from keras_nanguard._backends.shared.batch_memory import owned

__all__ = ["Given"]


class Given:
    """The arguments of one step.

    A tensor that shares its memory with a NumPy array, or with another process, is copied: its owner may write the next
    batch over it, and nothing would tell. Any other tensor counts the writes to it, so that a change is seen.
    """

    __slots__ = ("_args", "_versions")

    def __init__(self, args: Any):
        self._versions: list[tuple[Any, int]] = []
        self._args = keras.tree.map_structure(self._held, args)

    def _held(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            return owned(value)
        if not value.untyped_storage().resizable():
            return value.detach().clone()
        self._versions.append((value, value._version))
        return value

    @property
    def tensors(self) -> Any:
        """The arguments as they are now."""
        return self._args

    @property
    def args(self) -> Any:
        """The arguments, `None` where someone has written to one of them since."""
        return self._args if all(value._version == version for value, version in self._versions) else None
