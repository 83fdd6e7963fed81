"""The sums of `keras_nanguard._core.finiteness` as torch operations: one pass over each tensor, no look at the device.

Small tensors of one dtype are laid end to end and read at once: what a step of a millisecond feels is the number of
calls. Large ones are read where they stand: `dot` and `sum` run near memory bandwidth (50 GB/s on two cores, where
`torch.isfinite` reaches 3). On an accelerator the fused `_foreach_norm` takes the place of `dot`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from keras_nanguard._backends.shared.proof import reading_of
from keras_nanguard._backends.shared.rules import NUMBERS, SlotReading, full_read_is_due
from keras_nanguard._keras.train_state import TrainState

__all__ = ["can_be_bad", "counts", "is_away", "kind", "looked_at", "squares", "total", "update_sums"]

LARGE = 1 << 16
"""Elements from which a tensor is read where it stands."""


def can_be_bad(tensor: Any) -> bool:
    """Whether entries of this tensor can be NaN or Inf."""
    return bool(tensor.is_floating_point() or tensor.is_complex())


def kind(tensors: Iterable[Any]) -> Any:
    """Return the dtype of the sums: float64 where the state has some, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _dense(tensor: Any) -> Any:
    """Return the numbers of a tensor in one row, none of less than 32 bit, complex ones as pairs."""
    if tensor.dtype == torch.float32 and tensor.layout == torch.strided:
        return tensor.detach().reshape(-1)
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout == torch.sparse_coo else tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype.itemsize < 4:
        tensor = tensor.float()
    return tensor.reshape(-1)


def _rows(tensors: Iterable[Any]) -> list[Any]:
    """Return the numbers of all tensors in as few rows as is cheap."""
    rows: list[Any] = []
    small: dict[Any, list[Any]] = {}
    for tensor in tensors:
        if not can_be_bad(tensor) or not tensor.numel():
            continue
        row = _dense(tensor)
        if row.numel() >= LARGE:
            rows.append(row)
        else:
            small.setdefault((row.dtype, row.device), []).append(row)
    return rows + [torch.cat(group) if len(group) > 1 else group[0] for group in small.values()]


def _add(scalars: Sequence[Any], dtype: Any) -> Any:
    """Return the sum of scalars as a tensor of this dtype, 0 where there is none."""
    if not scalars:
        return torch.zeros((), dtype=dtype)
    added = scalars[0].to(dtype)
    for scalar in scalars[1:]:
        added = added + scalar.to(added.device, dtype)
    return added


def squares(tensors: Iterable[Any], dtype: Any) -> Any:
    """Return half the sum of the squares of all entries."""
    rows = _rows(tensors)
    if rows and rows[0].device.type != "cpu":
        norms = torch.stack([n.to(rows[0].device, dtype) for n in torch._foreach_norm(rows)])
        return 0.5 * torch.dot(norms, norms)
    return 0.5 * _add([torch.dot(row, row) for row in rows], dtype)


def total(tensors: Iterable[Any], dtype: Any) -> Any:
    """Return a number that is not finite where one entry is not, and is finite where all are and nothing overflows."""
    return _add([row.sum() for row in _rows(tensors)], dtype)


def is_away(tensor: Any) -> bool:
    """Whether the host has to wait for a device to read the tensor."""
    return bool(tensor.device.type != "cpu")


def looked_at(*groups: Sequence[Any]) -> list[list[float]]:
    """Return groups of scalars of one dtype as numbers, with one look at the device for all of them."""
    scalars = [scalar for group in groups for scalar in group]
    away = next((scalar.device for scalar in scalars if is_away(scalar)), None)
    numbers = iter(torch.stack(scalars if away is None else [scalar.to(away) for scalar in scalars]).tolist())
    return [[next(numbers) for _ in group] for group in groups]


def counts(tensors: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Return how many entries of each tensor are NaN, how many infinite, and how many there are."""
    found = []
    for tensor in tensors:
        row = _dense(tensor) if can_be_bad(tensor) else None
        nan = inf = 0
        if row is not None:
            nan, inf = int(torch.isnan(row).sum()), int(torch.isinf(row).sum())
        found.append((nan, inf, int(tensor.numel()) if row is None or row.dtype == tensor.dtype else int(row.numel())))
    return found


def update_sums(
    train_state: TrainState, records: Sequence[Any], known: dict[int, Any], gradients: float, steps: int, dtype: Any
) -> tuple[Any, Any]:
    """Return the sums over the updated weights and the slots, after the update; which slots are read is in `SlotReading`.

    `known` holds what `slots_of` gives for each optimizer. Steps are counted, as optimizers of torch's count nothing.
    """
    together = [t for record in records for t in record.tensors]
    sums = []
    for optimizer in {id(r.optimizer): r.optimizer for r in records}.values():
        slots, reading = known.get(id(optimizer)) or slots_of(train_state, optimizer)
        if reading is SlotReading.WITH_WEIGHTS:
            together += slots
        elif reading is SlotReading.EVERY_STEP or full_read_is_due(NUMBERS, steps, gradients):
            sums.append(total(slots, dtype))
    return total(together, dtype), _add(sums, dtype)


def slots_of(train_state: TrainState, optimizer: Any) -> tuple[list[Any], SlotReading]:
    """Return the slots of an optimizer that can be bad, and when they are read."""
    listed = {id(v) for v in train_state.slots}
    slots = [v.value for v in optimizer.variables if id(v) in listed and can_be_bad(v.value)]
    return slots, reading_of(optimizer, [(t.numel(), t.dtype.itemsize) for t in slots])
