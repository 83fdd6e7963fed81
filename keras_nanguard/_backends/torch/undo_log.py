"""An undo log: the old values of everything that one step writes on torch.

An eager step cannot be inspected before it runs, so its writes are recorded. Every write to a Keras
variable, tracked or not, goes through `Variable._direct_assign`. While a step runs, this method
first copies the old value, in the thread of that step only. A healthy step thus copies its small
state (statistics, seeds, metrics), each once, and nothing else.

Other writes are made in place by torch: updates of optimizers, which the transaction runs itself,
and before which it keeps what they write if they cannot wait for the verdict; buffers of torch
modules and torch's generators, which are kept before each step; and in-place writes of the user's
code, which the version counter of each tensor shows. In the first step everything is kept;
afterwards everything that was written in place once is kept before each step.

A hand-written step also changes learning rate schedulers and gradient scalers of torch. Their state
is read when the step first calls them, so that it can be restored if the step is refused or was a
replay.

Names private to Keras: ``Variable._direct_assign`` and ``Variable._initialize``, the only two
places that write the value of a variable on this backend; there is no public hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from keras_nanguard._backends.torch.modules import kept_settings
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._keras.overrides import ThreadOverrides


class Kept(NamedTuple):
    """A tensor, and its value and version when it was kept."""

    tensor: Any
    value: Any
    version: int


class UndoLog:
    """The undo log of one step; a context in which writes are recorded.

    Args:
        kept: tensors to copy beforehand, because torch writes them in place.
        uncounted: the same, if torch may not even count the write, as for the running statistics of
            its own batch normalization.
        note_created: called with each Keras variable that is created meanwhile.

    Attributes:
        old: what is kept of each tensor, by its `id`.
        uncounted: the `id` of tensors that torch may have written without counting it.
        writers: the variable of each tensor that Keras wrote, by the same `id`.
    """

    def __init__(
        self,
        kept: Iterable[Any],
        uncounted: Iterable[Any],
        note_created: Callable[[Any], None],
    ):
        self.note_created = note_created
        self.old: dict[int, Kept] = {}
        self.writers: dict[int, Any] = {}
        self._updated: set[int] = set()
        self._restores: dict[Any, Callable[[], None]] = {"generators": generators_restorer()}
        self._scales: dict[Any, Callable[[], None]] = {}
        self.uncounted = self.keep(uncounted)
        self.keep(kept)

    def keep(self, tensors: Iterable[Any]) -> set[int]:
        """Copy the current values of tensors that are not kept yet; return the `id` of each.
        Tensors of `torch.inference_mode` count no writes, and torch writes them in that mode only.
        """
        keys = set()
        for tensor in tensors:
            if tensor.is_inference():
                continue
            keys.add(key := id(tensor))
            if key not in self.old:
                self.old[key] = Kept(tensor, tensor.detach().clone(), tensor._version)
        return keys

    def keep_updated(self, optimizer: Any, tensors: Iterable[Any]) -> None:
        """Copy what an update of an optimizer is about to write: these tensors, whose writes torch
        does not count if it is a fused one, and its state outside of tensors, if it has any.
        """
        self._updated |= self.keep(tensors)
        if hasattr(optimizer, "held") and id(optimizer) not in self._restores:
            self._restores[id(optimizer)] = optimizer.held(copies=False)

    def keep_outside(self, tensor: Any) -> None:
        """Copy a tensor outside of the train state that is about to be written in place."""
        key = _place(tensor)
        known = id(tensor) in self.old or key in self._restores or key in self._scales
        if not (known or tensor.is_inference()):
            self._restores[key] = partial(tensor.copy_, tensor.detach().clone())

    def keep_scheduler(self, scheduler: Any) -> None:
        """Keep the state of a learning rate scheduler that is about to change, and the settings of
        its optimizer that it may change: rates, momentum.
        """
        attributes = dict(vars(scheduler))
        groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
        restore_settings = kept_settings(groups)

        def restore() -> None:
            vars(scheduler).clear()
            vars(scheduler).update(attributes)
            restore_settings()

        self.at_undo(id(scheduler), restore)

    def keep_scaler(self, scaler: Any) -> None:
        """Keep the tensors of a gradient scaler that are about to change. A replay restores them; a
        refused step does not, because they are to be updated.
        """
        for tensor in (getattr(scaler, name, None) for name in ("_scale", "_growth_tracker")):
            if isinstance(tensor, torch.Tensor):
                self._scales.setdefault(_place(tensor), partial(tensor.copy_, tensor.clone()))

    def at_undo(self, key: Any, restore: Callable[[], None]) -> None:
        """Call a function when the writes are undone, unless there is one of this key."""
        self._restores.setdefault(key, restore)

    def before(self, tensor: Any) -> Any:
        """Return the value of a tensor before the step."""
        kept = self.old.get(id(tensor))
        return tensor.detach() if kept is None else kept.value

    def counted(self, tensor: Any) -> bool:
        """Return whether torch has counted a write of a tensor since it was kept."""
        return bool(tensor._version != self.old[id(tensor)].version)

    @property
    def written(self) -> list[Any]:
        """The tensors that were, or may have been, written since they were kept."""
        uncounted = self.uncounted
        return [
            tensor
            for key, (tensor, _, version) in self.old.items()
            if tensor._version != version or key in uncounted
        ]

    def __enter__(self) -> UndoLog:
        WRITES.enter(self)
        return self

    def __exit__(self, *details: Any) -> None:
        WRITES.leave(self)

    def note(self, variable: Any) -> None:
        """Keep the value of a variable that is about to be written."""
        tensor = variable.value
        if id(tensor) not in self.writers and not tensor.is_meta:
            self.writers[id(tensor)] = variable
            self.keep([tensor])

    def give_back(self, unseen: bool = False) -> None:
        """Undo every write; `unseen`: also writes that torch does not count (fused ones, under a
        dispatch mode), and those of gradient scalers.
        """
        silent = self.uncounted | self._updated
        restores = [*self._restores.values(), *(self._scales.values() if unseen else ())]
        with torch.no_grad():
            for restore in reversed(restores):
                restore()
            for key, (tensor, value, version) in self.old.items():
                if unseen or key in silent or tensor._version != version:
                    keras_variables.write_tensor(tensor, value)


def _keeping(keep: Callable[[UndoLog, Any], None]) -> Callable[..., Any]:
    """Return a replacement of a method that writes its object. It keeps the object first."""

    def write(
        real: Callable[..., Any], logs: list[UndoLog], target: Any, *args: Any, **kwargs: Any
    ) -> Any:
        for undo_log in logs:
            keep(undo_log, target)
        return real(target, *args, **kwargs)

    return write


def _initialize(real: Callable[..., Any], logs: list[UndoLog], variable: Any, value: Any) -> None:
    real(variable, value)
    for undo_log in logs:
        undo_log.note_created(variable)


def _companions() -> Iterator[tuple[type, dict[str, Callable[..., Any]]]]:
    """Yield each class of schedulers and scalers with its replacement of the method that writes its
    objects, if it defines this method itself.
    """
    for base, name, keep in (
        (LRScheduler, "step", UndoLog.keep_scheduler),
        (torch.amp.GradScaler, "update", UndoLog.keep_scaler),
    ):
        for kind in (base, *_below(base)):
            if name in vars(kind):
                yield kind, {name: _keeping(keep)}


def _below(kind: Any) -> Iterator[Any]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _below(subclass)


WRITES = ThreadOverrides(
    keras_variables.VARIABLE,
    {"_direct_assign": _keeping(UndoLog.note), "_initialize": _initialize},
    _companions,
)
"""The override through which the undo logs record writes."""


def generators_restorer() -> Callable[[], None]:
    """Return a function that restores the current states of torch's global generators.

    Unseeded dropout and noise use them. A copy takes a microsecond and does not wait for a device.
    """
    state, device = torch.get_rng_state(), None
    if torch.cuda.is_initialized():
        device = torch.cuda.current_device()
        of_device = torch.cuda.get_rng_state(device)

    def restore() -> None:
        torch.set_rng_state(state)
        if device is not None:
            torch.cuda.set_rng_state(of_device, device)

    return restore


def storage(tensor: Any) -> int:
    """Return the address of the memory of a tensor."""
    try:
        return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
    except (NotImplementedError, RuntimeError):  # a sparse tensor: only its parts have a storage
        return id(tensor)


def _place(tensor: Any) -> Any:
    """Return what is the same only for a tensor and its aliases of the same shape."""
    if tensor.layout != torch.strided:
        return id(tensor)
    return storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes in place: tensors, and lists of them."""
    if not func._schema.is_mutable:
        return []
    return [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
