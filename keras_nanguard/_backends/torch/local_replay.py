"""Replays a step of several processes in one of them, without the communication of its modules.

`DistributedDataParallel` is replayed as the module that it wraps, which exchanges no gradients and
no buffers. Any other communication ends the replay with an exception before a message is sent,
because a training step of another process would answer it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed
from torch.utils._python_dispatch import TorchDispatchMode

from keras_nanguard._backends.torch.group import place
from keras_nanguard._keras.overrides import ThreadOverrides

__all__ = ["communicates", "is_sharded", "locally"]

NAMESPACES = (
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "c10d_functional",
    "symm_mem",
    "_dtensor",
)
"""Namespaces in which torch registers operations that communicate."""


class _Local(TorchDispatchMode):  # type: ignore[misc]
    """Raises instead of running an operation that communicates."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        if func.namespace in NAMESPACES:
            raise RuntimeError(
                f"the step communicates with other processes ({func.overloadpacket}), so one alone"
                " cannot replay it"
            )
        return func(*args, **(kwargs or {}))


def _unwrapped(real: Callable[..., Any], _: Any, wrapper: Any, *inputs: Any, **kwargs: Any) -> Any:
    if not wrapper.device_ids:
        return wrapper.module(*inputs, **kwargs)
    from torch.distributed.utils import _to_kwargs

    device = torch.device(wrapper.device_type, wrapper.device_ids[0])
    (inputs, *_), (kwargs, *_) = _to_kwargs(inputs, kwargs, device, False)
    return wrapper.module(*inputs, **kwargs)


@contextlib.contextmanager
def locally() -> Iterator[None]:
    """Run steps in this thread without communication; raise a `RuntimeError` if they need it."""
    if place()[1] == 1:
        yield
        return
    entered = object()
    _UNWRAPPED.enter(entered)
    try:
        with _Local():
            yield
    finally:
        _UNWRAPPED.leave(entered)


_UNWRAPPED = ThreadOverrides(torch.nn.parallel.DistributedDataParallel, {"forward": _unwrapped})


def communicates(model: Any) -> bool:
    """Return whether a module of this model communicates with other processes."""
    module = getattr(model, "of", model)
    modules = module.modules() if isinstance(module, torch.nn.Module) else ()
    return any(_is_parallel(type(part)) for part in modules)


def is_sharded(model: Any) -> bool:
    """Return whether each process has another part of the parameters of this model."""
    return any(getattr(v, "of", v.value) is not v.value for v in model.variables)


def _is_parallel(kind: type) -> bool:
    """Return whether a class is `DistributedDataParallel`, `FullyShardedDataParallel` or one made
    by `fully_shard`.
    """
    return any(
        base.__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
        for base in kind.__mro__
    )
