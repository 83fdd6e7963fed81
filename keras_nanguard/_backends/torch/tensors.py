"""The parts and the memory of tensors on torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def local(tensor: Any) -> Any:
    """Return the part of a tensor that this process has: all of it, or its shard."""
    return getattr(tensor, "_local_tensor", tensor)


def local_parts(tensors: Iterable[Any]) -> list[Any]:
    """Return the part of each tensor that this process has, with one call for all of them."""
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


def storage(tensor: Any) -> int:
    """Return the address of the memory of a tensor."""
    try:
        return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
    except (NotImplementedError, RuntimeError):  # a sparse tensor: only its parts have a storage
        return id(tensor)


def storages(tensors: Sequence[Any]) -> set[int]:
    """Return the addresses of the memory of tensors of this process."""
    try:
        return {tensor.untyped_storage()._cdata for tensor in tensors}
    except (NotImplementedError, RuntimeError):  # one of them is sparse
        return {storage(tensor) for tensor in tensors}


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes in place: tensors, and lists of them."""
    if not func._schema.is_mutable:
        return []
    return [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
