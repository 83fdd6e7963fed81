"""What a step on torch may change outside of its train state: schedulers, gradient scalers, and
tensors that it writes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from keras_nanguard._backends.torch.optimizers import settings_restorer
from keras_nanguard._keras.torch_tensors import local


class OutsideChanges:
    """Whether a step has changed anything outside of its train state that lasts."""

    def __init__(self) -> None:
        self._has_objects = False
        self._storages: list[StorageWeakRef] = []  # many of the tensors are gone after the step

    def note_object(self) -> None:
        """Note that a scheduler or a scaler changes."""
        self._has_objects = True

    def note_tensor(self, tensor: Any) -> None:
        """Note that a tensor is written in place."""
        if tensor.layout == torch.strided:
            self._storages.append(StorageWeakRef(tensor.untyped_storage()))
        else:
            self._has_objects = True

    def remain(self, known: Iterable[Any]) -> bool:
        """Return whether an object, or a tensor that still exists, has changed. Before the undo log
        of the step is released, all of them exist.

        Args:
            known: tensors that do not count. They are only looked at if others still exist.
        """
        left = {ref for ref in self._storages if not ref.expired()}
        if left and not self._has_objects:
            dense = (t for t in map(local, known) if t.layout == torch.strided)
            left -= {StorageWeakRef(t.untyped_storage()) for t in dense}
        return self._has_objects or bool(left)


def scheduler_restorer(scheduler: Any) -> Callable[[], None]:
    """Return a function that restores a scheduler, and its optimizer's settings."""
    attributes = dict(vars(scheduler))
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    restore_settings = settings_restorer(groups)

    def restore() -> None:
        vars(scheduler).clear()
        vars(scheduler).update(attributes)
        restore_settings()

    return restore


def scaler_restorers(scaler: Any, is_replay: bool) -> Iterator[tuple[Any, Callable[[], None]]]:
    """Yield functions that restore which optimizers a gradient scaler has unscaled, each with a
    key.

    Its scale, and where it has found Inf, are restored only for a replay: a refused step is to
    lower the scale, perhaps after its end.
    """
    stages = {key: dict(stage) for key, stage in scaler._per_optimizer_states.items()}

    def restore_stages() -> None:
        states, found_inf = scaler._per_optimizer_states, "found_inf_per_device"
        found = {} if is_replay else {k: s[found_inf] for k, s in states.items()}
        states.clear()
        states.update(stages)
        for key, value in found.items():
            states[key][found_inf] = value

    yield id(scaler), restore_stages
    for tensor in (getattr(scaler, name, None) for name in ("_scale", "_growth_tracker")):
        if isinstance(tensor, torch.Tensor):
            restore = partial(tensor.copy_, tensor.clone())
            yield place_of(tensor), restore if is_replay else lambda: None


def tensor_restorer(tensor: Any) -> Callable[[], None]:
    """Return a function that restores the value of a tensor, and its memory and shape, which `set_`
    and `resize_` change; copies and pickles of tensors are created by `set_`.
    """
    alias = tensor.detach() if tensor.layout == torch.strided else tensor
    value = alias.detach().clone()

    def restore() -> None:
        alias.copy_(value)
        if alias is not tensor and place_of(alias) != place_of(tensor):
            tensor.set_(alias)

    return restore


def storage(tensor: Any) -> int:
    """Return the address of the memory of a tensor."""
    try:
        return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
    except (NotImplementedError, RuntimeError):  # a sparse tensor: only its parts have a storage
        return id(tensor)


def place_of(tensor: Any) -> Any:
    """Return what is the same only for a tensor and its aliases of the same shape."""
    if tensor.layout != torch.strided:
        return id(tensor)
    return storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
