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

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from keras_nanguard._backends.torch.modules import kept_settings
from keras_nanguard._backends.torch.tensors import storage
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
        watch: whether writes of Keras are recorded; a compiled step makes them in another way.
        writes: called with each tensor that Keras is about to write.

    Attributes:
        old: what is kept of each tensor, by its `id`.
        uncounted: the `id` of tensors that torch may have written without counting it.
        writers: the variable of each tensor that Keras wrote, by the same `id`.
    """

    def __init__(
        self,
        kept: Iterable[Any],
        note_created: Callable[[Any], None],
        uncounted: Iterable[Any] = (),
        watch: bool = True,
        writes: Callable[[Any], None] | None = None,
    ):
        self.note_created, self.watch, self.writes = note_created, watch, writes
        self.old: dict[int, Kept] = {}
        self._updated: set[int] = set()
        self.writers: dict[int, Any] = {}
        self._restores: list[Callable[[], None]] = []
        self._schedulers: set[int] = set()
        self._outside: dict[Any, tuple[Any, Any]] = {}
        self._scalers: dict[int, list[tuple[Any, Any]]] = {}
        self._learning: set[int] = set()
        self._generators = generators()
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

    def keep_updated(self, tensors: Iterable[Any], restore: Callable[[], None] | None) -> None:
        """Copy what an update is about to write. Torch does not count the writes of a fused one.

        Args:
            tensors: the tensors.
            restore: restores state of the optimizer that is in no tensor, if there is any.
        """
        self._updated |= self.keep(tensors)
        if restore is not None:
            self._restores.append(restore)

    def keep_outside(self, tensor: Any) -> None:
        """Copy a tensor outside of the train state that is about to be written in place."""
        if tensor.is_inference():
            return
        place = storage(tensor)
        key = (place, tensor.storage_offset(), tensor.shape, tensor.stride())
        if id(tensor) not in self.old and key not in self._outside and place not in self._learning:
            with torch.no_grad():
                self._outside[key] = (tensor, tensor.detach().clone())

    def keep_scheduler(self, scheduler: Any) -> None:
        """Keep the state of a learning rate scheduler that is about to change, and the settings of
        its optimizer that it may change: rates, momentum.
        """
        if id(scheduler) in self._schedulers:
            return
        self._schedulers.add(id(scheduler))
        attributes = dict(vars(scheduler))
        groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
        restore_settings = kept_settings(groups)

        def restore() -> None:
            vars(scheduler).clear()
            vars(scheduler).update(attributes)
            restore_settings()

        self._restores.append(restore)

    def keep_scaler(self, scaler: Any) -> None:
        """Keep the tensors of a gradient scaler that are about to change. A replay restores them; a
        refused step does not, because they are to be updated.
        """
        held = [getattr(scaler, name, None) for name in ("_scale", "_growth_tracker")]
        tensors = [tensor for tensor in held if isinstance(tensor, torch.Tensor)]
        self._learning |= {storage(tensor) for tensor in tensors}
        self._scalers.setdefault(id(scaler), [(t, t.clone()) for t in tensors])

    def before(self, tensor: Any) -> Any:
        """Return the value of a tensor before the step."""
        kept = self.old.get(id(tensor))
        return tensor.detach() if kept is None else kept.value

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
        if self.watch:
            WRITES.enter(self)
        return self

    def __exit__(self, *details: Any) -> None:
        if self.watch:
            WRITES.leave(self)

    def note(self, variable: Any) -> None:
        """Keep the value of a variable that is about to be written."""
        tensor = variable.value
        if self.writes is not None:
            self.writes(tensor)
        if id(tensor) not in self.writers and not tensor.is_meta:
            self.writers[id(tensor)] = variable
            self.keep([tensor])

    def give_back(self, unseen: bool = False) -> None:
        """Undo every write; `unseen`: also writes that torch does not count (fused ones, under a
        dispatch mode).
        """
        for restore in reversed(self._restores):
            restore()
        silent = self.uncounted | self._updated
        scalers = [pair for pairs in self._scalers.values() for pair in pairs] if unseen else []
        with torch.no_grad():
            for tensor, value in (*self._outside.values(), *scalers):
                tensor.copy_(value)
            for key, (tensor, value, version) in self.old.items():
                if unseen or key in silent or tensor._version != version:
                    _without_repeats(tensor).copy_(_without_repeats(value, tensor))
        for give, state in self._generators:
            give(state)


def _without_repeats(tensor: Any, of: Any = None) -> Any:
    """Return the part of a tensor that is in memory once: PyTorch cannot write to an expanded
    tensor (`Normalization(mean=0.0)`).

    Args:
        of: the tensor whose memory counts, itself by default.
    """
    of = tensor if of is None else of
    strides = of.stride() if of.layout == torch.strided else ()
    for dim, stride in enumerate(strides):
        if stride == 0 and of.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _keeping(keep: Callable[[UndoLog, Any], None]) -> Callable[..., Any]:
    """Return a replacement of a method that writes its object. It keeps the object first."""

    def write(
        real: Callable[..., Any], journals: list[UndoLog], target: Any, *args: Any, **kwargs: Any
    ) -> Any:
        for undo_log in journals:
            keep(undo_log, target)
        return real(target, *args, **kwargs)

    return write


def _initialize(
    real: Callable[..., Any], journals: list[UndoLog], variable: Any, value: Any
) -> None:
    real(variable, value)
    for undo_log in journals:
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


def generators() -> list[tuple[Callable[[Any], None], Any]]:
    """Return the states of torch's global generators, each with its setter.

    Unseeded dropout and noise use them. A copy takes a microsecond and does not wait for a device.
    """
    held: list[tuple[Callable[[Any], None], Any]] = [(torch.set_rng_state, torch.get_rng_state())]
    if torch.cuda.is_initialized():
        device = torch.cuda.current_device()
        held.append(
            (
                lambda state: torch.cuda.set_rng_state(state, device),
                torch.cuda.get_rng_state(device),
            )
        )
    return held
