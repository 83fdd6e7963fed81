"""The sums of `keras_nanguard._core.finiteness` as torch operations: one pass over each tensor,
without waiting for the device.

Small tensors of one dtype are concatenated and read at once, because the number of calls dominates
a step of a millisecond. Large ones are read in place: `dot` and `sum` run near memory bandwidth (50
GB/s on two cores, where `torch.isfinite` reaches 3). On an accelerator the fused `_foreach_norm`
replaces `dot`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

__all__ = [
    *("added", "can_be_bad", "confirmed", "counts", "is_away", "kind", "looked_at", "squares"),
    *("total", "update_sums"),
]

LARGE = 1 << 16
"""Elements above which a tensor is read in place."""

SERIAL = 1 << 15
"""Elements above which PyTorch uses several threads for a sum (`GRAIN_SIZE` in
aten/src/ATen/TensorIterator.h).

Without such an operation in a step these threads sleep. Waking them takes 1.5 ms on a busy machine
of two cores, and they then spin for as long as a small step takes, which makes its processor time
two and a half times as long.
"""

SERIAL_DOT = 1 << 13
"""The same limit of `dot`, in MKL."""

SUM_LIMIT = 2.0**1000
"""Replacement of a sum that has overflowed over finite entries. A few of them still add up to a
finite number.
"""


def can_be_bad(tensor: Any) -> bool:
    """Whether entries of this tensor can be NaN or Inf."""
    return bool(tensor.is_floating_point() or tensor.is_complex())


def kind(tensors: Iterable[Any]) -> Any:
    """Return the dtype of the sums: float64 if the state has float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _dense(tensor: Any) -> Any:
    """Return the numbers of a tensor as one row of at least 32 bits, complex ones as pairs."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype is torch.float32 and tensor.layout is torch.strided:
        return tensor.reshape(-1)
    if tensor.layout != torch.strided:
        whole = tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor
        tensor = whole.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype.itemsize < 4:
        tensor = tensor.float()
    return tensor.reshape(-1)


def _rows(tensors: Iterable[Any]) -> list[Any]:
    """Return the numbers of all tensors in few rows: a large one alone, small ones of one dtype and
    device joined, on a CPU up to `SERIAL` entries.
    """
    groups: list[list[Any]] = []
    last: dict[Any, tuple[list[Any], float]] = {}
    for row in (_dense(t) for t in tensors if can_be_bad(t) and t.numel()):
        size, kind = row.numel(), (row.dtype, row.device)
        most = SERIAL if row.device.type == "cpu" else math.inf
        if size >= min(LARGE, most):
            groups.append([row])
            continue
        group, filled = last.get(kind, ([], math.inf))
        if filled + size >= most:
            group, filled = [], 0
            groups.append(group)
        group.append(row)
        last[kind] = group, filled + size
    return [torch.cat(group) if len(group) > 1 else group[0] for group in groups]


def added(losses: Sequence[Any], dtype: Any) -> Any:
    """Return the sum of all entries of these tensors."""
    return _add([loss.detach().sum() if loss.ndim else loss.detach() for loss in losses], dtype)


def _add(scalars: Sequence[Any], dtype: Any) -> Any:
    """Return the sum of scalars as a tensor of this dtype, 0 if there are none."""
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
    return 0.5 * _add([_squares(row) for row in rows], dtype)


def _squares(row: Any) -> Any:
    """Return the sum of squares, in one thread if the row is not large."""
    if SERIAL_DOT <= row.numel() < LARGE:
        norm = torch.linalg.vector_norm(row)
        return norm * norm
    return torch.dot(row, row)


def total(tensors: Iterable[Any], dtype: Any) -> Any:
    """Return a number that is not finite if one entry is not, and finite if all are and nothing
    overflows.
    """
    return _add([row.sum() for row in _rows(tensors)], dtype)


def confirmed(number: float, tensors: Iterable[Any], power: int = 1) -> float:
    """Return the sum over these tensors, which is finite exactly if all of their entries are.

    Args:
        number: the computed sum, in which finite entries may overflow.
        tensors: the summed tensors.
        power: 2 for half the sum of squares.
    """
    if math.isfinite(number):
        return number
    rows = [_dense(tensor) for tensor in tensors if can_be_bad(tensor) and tensor.numel()]
    if not all(bool(torch.isfinite(row).all()) for row in rows):
        return number
    exact = sum(float((row.double() ** power).sum()) for row in rows) / power
    return exact if abs(exact) < SUM_LIMIT else math.copysign(SUM_LIMIT, exact)


def is_away(tensor: Any) -> bool:
    """Whether the host has to wait for a device to read the tensor."""
    return bool(tensor.device.type != "cpu")


def looked_at(*groups: Sequence[Any]) -> list[list[float]]:
    """Return groups of scalars of one dtype as numbers, with one read of the device for all of
    them.
    """
    scalars = [scalar for group in groups for scalar in group]
    away = next((scalar.device for scalar in scalars if is_away(scalar)), None)
    if away is None:
        return [[scalar.item() for scalar in group] for group in groups]
    numbers = iter(torch.stack([scalar.to(away) for scalar in scalars]).tolist())
    return [[next(numbers) for _ in group] for group in groups]


def counts(tensors: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Return the number of NaN, of infinite, and of all entries of each tensor."""
    return [_count(tensor) for tensor in tensors]


def _count(tensor: Any) -> tuple[int, int, int]:
    if not can_be_bad(tensor):
        return 0, 0, int(tensor.numel())
    row = _dense(tensor)
    size = tensor.numel() if row.dtype == tensor.dtype else row.numel()
    return int(torch.isnan(row).sum()), int(torch.isinf(row).sum()), int(size)


def update_sums(read: tuple[list[Any], list[Any]], dtype: Any) -> tuple[Any, Any]:
    """Return the sums over two lists of tensors, on the device."""
    together, separate = read
    return total(together, dtype), total(separate, dtype)
