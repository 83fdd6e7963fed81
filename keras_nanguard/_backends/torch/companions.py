"""Objects of torch that a hand-written step changes beside its model and optimizers: learning rate
schedulers and gradient scalers.

Their state is read when the step first calls them, so that it can be restored if the step is
refused or was a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from keras_nanguard._backends.torch.modules import settings_of

__all__ = ["methods", "scaler_state", "scheduler_state"]


def methods() -> Iterator[tuple[type, str]]:
    """Yield each class of schedulers with `step`, and each of scalers with `update`, that defines
    this method itself.
    """
    for base, name in ((LRScheduler, "step"), (torch.amp.GradScaler, "update")):
        for kind in (base, *_below(base)):
            if name in vars(kind):
                yield kind, name


def _below(kind: Any) -> Iterator[Any]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _below(subclass)


def scheduler_state(scheduler: Any) -> Callable[[], None]:
    """Return a function that restores the present state of a scheduler, and the settings of its
    optimizer that it may change: rates, momentum.
    """
    attributes = dict(vars(scheduler))
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    settings = [{k: _copied(v) for k, v in values.items()} for values in settings_of(groups)]

    def restore() -> None:
        vars(scheduler).clear()
        vars(scheduler).update(attributes)
        for group, values in zip(groups, settings):
            for name, value in values.items():
                if isinstance(value, torch.Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value

    return restore


def scaler_state(scaler: Any) -> tuple[list[Any], Callable[[], None]]:
    """Return the tensors in which a scaler keeps its scale, and a function that restores their
    present values.
    """
    held = [getattr(scaler, name, None) for name in ("_scale", "_growth_tracker")]
    tensors = [tensor for tensor in held if isinstance(tensor, torch.Tensor)]
    values = [tensor.clone() for tensor in tensors]

    def restore() -> None:
        for tensor, value in zip(tensors, values):
            tensor.copy_(value)

    return tensors, restore


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
