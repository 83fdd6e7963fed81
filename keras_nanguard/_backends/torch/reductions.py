"""Norms of tensors on torch: one pass over each tensor, without waiting for the device.

The norm of a tensor is finite exactly if all of its entries are, unless it overflows. The number of
calls dominates a step of a millisecond, so one call reads all small tensors. It uses one thread for
each: a step without larger operations lets the threads of PyTorch sleep, and waking them takes
longer than such a step. On a CPU large tensors are read with `dot`, which uses all threads and runs
near memory bandwidth (50 GB/s on two cores, where `torch.isfinite` reaches 3).

`sum_of`, `squares_of` and `norm_of` combine the sums or norms of these tensors, in which finite
entries may overflow. Their result is finite exactly if all entries are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

LARGE = 1 << 17
"""Elements from which a tensor on a CPU is read with `dot`."""

REPLACEMENT = 2.0**1000
"""Replacement of a sum that has overflowed over finite entries. A few of them still add up to a
finite number.
"""


def is_inexact(tensor: Any) -> bool:
    """Whether entries of this tensor can be NaN or Inf."""
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _dense(tensor: Any) -> Any:
    """Return a tensor with the entries of this one in at least 32 bits, which has a norm."""
    if tensor.layout != torch.strided:
        whole = tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor
        tensor = whole.values()
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def norms(tensors: Iterable[Any]) -> list[Any]:
    """Return the norms of all tensors that can be bad, as scalars on their devices."""
    small, away, large = [], [], []
    for tensor in tensors:
        if tensor.dtype is not torch.float32 or tensor.layout is not torch.strided:
            if not is_inexact(tensor):
                continue
            tensor = _dense(tensor)
        size = tensor.numel()
        if not tensor.is_cpu:
            away.append(tensor)
        elif size >= LARGE and not tensor.is_complex():
            large.append(tensor.detach().reshape(-1))
        elif size:
            small.append(tensor)
    found = [torch.dot(row, row).sqrt() for row in large]
    for together in filter(None, (small, away)):  # tensors of one device are read by one kernel
        with torch.no_grad():
            found += torch._foreach_norm(together)
    return found


def sum_of(sums: Iterable[float], tensors: Iterable[Any]) -> float:
    """Return the sum of all entries."""
    number = sum(sums)
    return number if math.isfinite(number) else _exact(number, tensors, 1)


def squares_of(norms: Iterable[float], tensors: Iterable[Any]) -> float:
    """Return half the sum of squares of all entries."""
    number = 0.5 * sum([norm * norm for norm in norms])
    return number if math.isfinite(number) else _exact(number, tensors, 2)


def norm_of(norms: Iterable[float], tensors: Iterable[Any]) -> float:
    """Return the norm of all entries together."""
    number = math.hypot(*norms)
    return number if math.isfinite(number) else math.sqrt(2.0 * _exact(number, tensors, 2))


def are_finite(tensors: Sequence[Any]) -> bool:
    """Whether every entry of these tensors is finite. Waits for the device."""
    return math.isfinite(norm_of(read({"": norms(tensors)})[""], tensors))


def _exact(number: float, tensors: Iterable[Any], power: int) -> float:
    """Return the sum of a power of all entries, divided by it; `number` if an entry is bad."""
    found = [_dense(t.detach()) for t in tensors if is_inexact(t) and t.numel()]
    found = [t.cpu() if t.is_mps else t for t in found]  # which has no float64
    rows = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in found]
    if not all(bool(torch.isfinite(row).all()) for row in rows):
        return number
    exact = sum(float((row.double() ** power).sum()) for row in rows) / power
    return exact if abs(exact) < REPLACEMENT else math.copysign(REPLACEMENT, exact)


def is_away(scalars: Iterable[Any]) -> bool:
    """Whether the host has to wait for a device to read one of these tensors."""
    return False in [scalar.is_cpu for scalar in scalars]


def read(groups: Mapping[str, Sequence[Any]]) -> dict[str, list[float]]:
    """Return named groups of scalars as numbers, with one read of the device for all of them."""
    scalars = [scalar for group in groups.values() for scalar in group]
    if is_away(scalars):
        away = [scalar for scalar in scalars if is_away([scalar])]
        row = torch.stack([scalar.to(away[0].device) for scalar in away])
        found = dict(zip(map(id, away), row.tolist()))
        # To move the others to the device would be a wait for each of them.
        numbers = iter([found[id(s)] if id(s) in found else s.item() for s in scalars])
    else:
        numbers = iter([scalar.item() for scalar in scalars])
    return {name: list(itertools.islice(numbers, len(group))) for name, group in groups.items()}


def counts(tensors: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Return the number of NaN, of infinite, and of all entries of each tensor. Waits for the
    device.
    """
    found = [_dense(tensor.detach()) for tensor in tensors]
    return [(int(t.isnan().sum()), int(t.isinf().sum()), t.numel()) for t in found]
