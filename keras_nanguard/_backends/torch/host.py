"""Process functions of PyTorch: the processes that train together, and the random generators.

All messages use the guard's own process group on the CPU. So they cannot be confused with messages
of the training (a bucket of gradients), and have their own time limit: that of the default process
group. After a timeout the store of the default group shows which process is missing.
"""

from __future__ import annotations

import contextlib
import re
import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed

from keras_nanguard._backends import interface
from keras_nanguard._backends.torch.state import derives_from, is_sharded, modules_of
from keras_nanguard._core.errors import waiting_for

GRACE = 5.0
"""Seconds that a process waits after a failed exchange for the others to notice it."""

LOST = re.compile(r"gloo|NCCL|[Cc]onnection (?:reset|closed)|Broken pipe|[Tt]imed out")
"""Words in torch's messages about a failed exchange."""

PARALLEL = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
"""Classes of modules that communicate; `fully_shard` makes the last one."""

DRAW = 4
"""Steps by which one draw advances the generator of a GPU; torch accepts only multiples of it."""

_GROUPS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The guard's group for each default group."""


def generators() -> list[Any]:
    """Return torch's global generators, which unseeded dropout and noise use: that of the CPU, then
    those of all GPUs, if CUDA is in use.
    """
    return [torch.default_generator, *_of_devices()]


def _of_devices() -> Sequence[Any]:
    return torch.cuda.default_generators if torch.cuda.is_initialized() else ()


def place() -> tuple[int, int]:
    """Return the rank of this process, from 0, and the number of processes."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def summed(numbers: Sequence[float], what: str) -> list[float]:
    """Return the sums of these numbers over all processes, with one message.

    Raises:
        GuardError: if a process has ended or does not answer within the time limit, with its rank
            and `what`.
    """
    total = torch.tensor(numbers, dtype=torch.float64)
    with waiting_for(what, place()[1], _missing):
        torch.distributed.all_reduce(total, group=_group())
    return [float(number) for number in total]


def leave(error: BaseException) -> None:
    """Tell the other processes why this one ends. If the error is a lost connection, add a note to
    it with the process that has ended before. Never raises.
    """
    with contextlib.suppress(Exception):
        if not (isinstance(error, RuntimeError) and LOST.search(str(error))):
            _store().set(f"ended/{place()[0]}", f"{type(error).__name__}: {error}"[:500])
        elif hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"NanGuard: the step waited for {_missing()}.")


def _group() -> Any:
    """Return the guard's own process group, which all create together at the first exchange."""
    world = torch.distributed.group.WORLD
    if world not in _GROUPS:
        limit = None
        with contextlib.suppress(Exception):  # a name private to torch
            limit = torch.distributed.distributed_c10d._get_default_store().timeout
        _GROUPS[world] = torch.distributed.new_group(backend="gloo", timeout=limit)
    return _GROUPS[world]


def _store() -> Any:
    store = torch.distributed.distributed_c10d._get_default_store()
    return torch.distributed.PrefixStore("keras_nanguard", store)


def _missing() -> str:
    """Return in words which processes did not notice that an exchange has failed."""
    rank, count = place()
    try:
        store = _store()
        store.set(f"waits/{rank}", "1")
        missing, end = [other for other in range(count) if other != rank], time.monotonic() + GRACE
        while missing and time.monotonic() < end:
            missing = [other for other in missing if not store.check([f"waits/{other}"])]
            time.sleep(0.05)
        ended = [other for other in range(count) if store.check([f"ended/{other}"])]
        reasons = {other: f" ({store.get(f'ended/{other}').decode()})" for other in ended}
    except RuntimeError:
        return "rank 0, which holds the store of the process group," if rank else "another rank"
    names = [f"rank {other}{reasons.get(other, '')}" for other in missing or ended]
    return ", ".join(names) or "a rank whose connection was lost"


class Host(interface.Host):
    """Functions for the process as a whole."""

    def place(self) -> tuple[int, int]:
        return place()

    def trains_together(self, model: Any, loop: bool) -> bool:
        """Return whether this process trains the model with others.

        A loop does if the process group has several members. A `fit` does only if a part of its
        model communicates, because Keras itself trains in one process.
        """
        is_parallel = any(derives_from(part, *PARALLEL) for part in modules_of(model))
        return place()[1] > 1 and (loop or is_parallel)

    def is_sharded(self, model: Any) -> bool:
        return is_sharded(model.variables)

    def gathered(self, payload: bytes, what: str) -> list[bytes]:
        """Return the values of all processes by rank.

        Raises:
            GuardError: as for `summed`.
        """
        found = [b""] * place()[1]
        with waiting_for(what, len(found), _missing):
            torch.distributed.all_gather_object(found, payload, group=_group())
        return found

    def generator_state(self) -> np.ndarray[Any, Any] | None:
        return np.concatenate([g.get_state().numpy() for g in generators()])

    def set_generator_state(self, state: np.ndarray[Any, Any]) -> None:
        """Restore this state, as far as there are as many GPUs as when it was read."""
        rest = torch.from_numpy(np.array(state))
        for generator in generators():
            size = generator.get_state().numel()
            if len(rest):
                generator.set_state(rest[:size])
            rest = rest[size:]

    def advance_generator(self) -> None:
        torch.rand(1)
        for generator in _of_devices():  # a draw would begin to use every GPU
            generator.set_offset(generator.get_offset() + DRAW)

    def without_gradients(self) -> AbstractContextManager[Any]:
        made: AbstractContextManager[Any] = torch.no_grad()
        return made
