"""An undo log: the old values of everything that one step writes on torch.

An eager step cannot be inspected before it runs, so its writes are recorded, in its thread only:

- Variables that Keras writes are kept before their first write, through `WRITES`. So are learning
  rate schedulers and gradient scalers of torch.
- Before the step, `step_context` keeps torch's random generators, attributes of layers, wrapped
  optimizers, buffers, and tensors that a step was seen to write past Keras; in the first steps it
  keeps all tensors of the train state.
- The gradients that the step finds are kept before it first adds to them, or uses them.
- If the step continues after its update, `keep_updated` keeps weights and slots before it.
- `Watch` keeps other tensors that the step writes in place after its update.

So a healthy step mostly copies its small state (statistics, seeds, metrics), each once.

Layers write the value of a variable through two methods of Keras' variables (`_keras.variables`),
optimizers write in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.weak import TensorWeakRef

from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.modules import kept_settings
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._keras.overrides import ThreadOverrides
from keras_nanguard._keras.tensors import local

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""A dtype for the bits of entries, by their number of bytes."""


@dataclass(slots=True)
class Kept:
    """A tensor as it was before the step.

    Attributes:
        value, version: its value and version when it was kept.
        is_counted: whether torch counts every write of it.
        writer: the variable through which Keras wrote it, `None` if it did not.
    """

    tensor: Any
    value: Any
    version: int
    is_counted: bool = True
    writer: Any = None

    @property
    def is_written(self) -> bool:
        """Whether it was, or may have been, written since."""
        return not self.is_counted or bool(self.tensor._version != self.version)

    @property
    def differs(self) -> bool:
        """Whether it has, or may have, other bits now, which takes a pass over it."""
        now, kind = self.tensor.detach(), _BITS.get(self.tensor.dtype.itemsize)
        if kind is None or now.layout != torch.strided or now.is_quantized:
            return True
        return not torch.equal(now.view(kind), self.value.view(kind))


class UndoLog:
    """The undo log of one step; a context in which writes are recorded.

    Args:
        kept: tensors to copy beforehand, because torch writes them in place.
        uncounted: the same, if torch may not even count the write, as for the running statistics of
            its own batch normalization.
        is_replay: whether writes of gradient scalers are undone, too.
        apart: tensors that other code restores.
        holders: the tensors whose gradients the step may add to.

    Attributes:
        kept: the tensors that are restored, by their `id`.
        gradients: each tensor of `holders` whose gradient is kept, with this gradient. `None` until
            the step has added to one, or used one.
        adds_by_hand: whether the step has written a gradient that it has found, before its first
            backward pass or update that is seen. `None` if it has found none, or is not so far.
        created: the tensor of each variable that Keras has created meanwhile, with its first value.
    """

    def __init__(
        self,
        kept: Iterable[Any],
        uncounted: Iterable[Any] = (),
        is_replay: bool = False,
        apart: Iterable[Any] = (),
        holders: Iterable[Any] = (),
    ):
        self.kept: dict[int, Kept] = {}
        self.gradients: list[tuple[Any, Any]] | None = None
        # A step that clears them first is to release their memory.
        found = [(p, p.grad) for p in holders if p.grad is not None]
        self._found = [(p, TensorWeakRef(grad), _version_of(local(grad))) for p, grad in found]
        self.adds_by_hand: bool | None = None
        self.created: list[tuple[Any, Any]] = []
        self._is_replay, self._apart = is_replay, set(map(id, apart))
        self._changed_objects = False
        self._outside: list[StorageWeakRef] = []  # many of these tensors are gone after the step
        # By a number, a name, the `id` of an object or the place of a tensor; the last runs first.
        # The state of a generator takes a microsecond, and does not wait for a device.
        restorers = [partial(g.set_state, g.get_state()) for g in host.generators()]
        self._restores: dict[Any, Callable[[], None]] = dict(enumerate(restorers))
        for tensor in uncounted:
            self.keep(tensor).is_counted = False
        for tensor in kept:
            self.keep(tensor)

    def keep(self, tensor: Any) -> Kept:
        """Return the copy of a tensor, which is made now unless there is one."""
        known = self.kept.get(id(tensor))
        if known is None:
            if tensor.is_inference():  # counts no writes; torch writes it in that mode only
                return Kept(tensor, tensor, 0)
            known = self.kept[id(tensor)] = Kept(tensor, tensor.detach().clone(), tensor._version)
        return known

    def note_gradients(self) -> None:
        """Note whether the step has written the gradients that it has found. Of those that are kept
        already forget the ones that it has cleared or replaced.
        """
        if self.adds_by_hand is not None or not self._found:
            return
        found = [(p, ref(), version) for p, ref, version in self._found]
        written = {id(g) for _, g, v in found if g is not None and _version_of(local(g)) != v}
        self.adds_by_hand = bool(written)
        if self.gradients is not None:
            self.gradients = [(p, g) for p, g in self.gradients if p.grad is g or id(g) in written]

    def keep_gradients(self) -> list[tuple[Any, Any]]:
        """Keep the gradients that the step has found, and neither cleared nor replaced; return
        those that are kept, each with its tensor.
        """
        if self.gradients is None:
            pairs = [(p, p.grad, found) for p, found, _ in self._found]
            self.gradients = [(p, g) for p, g, found in pairs if g is not None and found() is g]
            for _, gradient in self.gradients:
                self.keep(local(gradient))
        return self.gradients

    def give_back_gradients(self, holders: Iterable[Any]) -> None:
        """Restore the gradients that are kept, those of `torch.inference_mode` without their
        values; for all other tensors leave none. A bad sum, which no later step could correct, is
        dropped.
        """
        self.note_gradients()
        kept = self.keep_gradients()
        for holder in holders:
            holder.grad = None
        for holder, gradient in kept:
            if reductions.are_finite([self.before(local(gradient))]):
                holder.grad = gradient

    def keep_updated(self, optimizer: Any, tensors: Iterable[Any]) -> None:
        """Keep what an update is about to write: these tensors, and the optimizer's other state."""
        for tensor in tensors:
            self.keep(tensor)
        if hasattr(optimizer, "held"):
            self.at_undo(id(optimizer), optimizer.held(copies=False))

    def keep_outside(self, tensor: Any) -> None:
        """Copy a tensor outside of the train state that is about to be written in place."""
        key = _place(tensor)
        known = id(tensor) in self._apart or id(tensor) in self.kept or key in self._restores
        if not (known or tensor.is_inference()):
            self._restores[key] = _restorer(tensor)
            if tensor.layout == torch.strided:
                self._outside.append(StorageWeakRef(tensor.untyped_storage()))
            else:
                self._changed_objects = True

    def keep_scheduler(self, scheduler: Any) -> None:
        """Keep the state of a scheduler that is about to change, and its optimizer's settings."""
        self._changed_objects = True
        attributes = dict(vars(scheduler))
        groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
        restore_settings = kept_settings(groups)

        def restore() -> None:
            vars(scheduler).clear()
            vars(scheduler).update(attributes)
            restore_settings()

        self.at_undo(id(scheduler), restore)

    def keep_scaler(self, scaler: Any) -> None:
        """Keep which optimizers a gradient scaler has unscaled. Keep its scale, and where it has
        found Inf, only for a replay: a refused step is to lower the scale, perhaps after its end.
        """
        if not scaler.is_enabled():
            return
        self._changed_objects = True
        stages = {key: dict(stage) for key, stage in scaler._per_optimizer_states.items()}

        def restore_stages() -> None:
            states, found_inf = scaler._per_optimizer_states, "found_inf_per_device"
            found = {} if self._is_replay else {k: s[found_inf] for k, s in states.items()}
            states.clear()
            states.update(stages)
            for key, value in found.items():
                states[key][found_inf] = value

        self.at_undo(id(scaler), restore_stages)
        for tensor in (getattr(scaler, name, None) for name in ("_scale", "_growth_tracker")):
            if isinstance(tensor, torch.Tensor):
                restore = partial(tensor.copy_, tensor.clone())
                self.at_undo(_place(tensor), restore if self._is_replay else lambda: None)

    def at_undo(self, key: Any, restore: Callable[[], None]) -> None:
        """Call a function when the writes are undone, unless there is one of this key."""
        self._restores.setdefault(key, restore)

    def before(self, tensor: Any) -> Any:
        """Return the value of a tensor before the step."""
        kept = self.kept.get(id(tensor))
        return tensor.detach() if kept is None else kept.value

    @property
    def written(self) -> list[Any]:
        """The kept tensors that were, or may have been, written."""
        return [kept.tensor for kept in self.kept.values() if kept.is_written]

    def __enter__(self) -> UndoLog:
        WRITES.enter(self)
        return self

    def __exit__(self, *details: Any) -> None:
        WRITES.leave(self)

    def note(self, variable: Any) -> None:
        """Keep the value of a variable that Keras is about to write."""
        tensor = variable.value
        if not (tensor.is_meta or id(tensor) in self._apart):
            self.keep(tensor).writer = variable

    def note_created(self, variable: Any) -> None:
        """Store the first value of a variable that Keras has created."""
        if not variable.value.is_meta:
            self.created.append((variable.value, keras_variables.read(variable)))

    def give_back(self) -> None:
        """Restore everything."""
        with torch.no_grad():
            for restore in reversed(self._restores.values()):
                restore()
            for kept in self.kept.values():
                # Torch does not count the writes of a fused optimizer, or through `.data`.
                if kept.is_written or kept.differs:
                    keras_variables.write_tensor(kept.tensor, kept.value)

    def has_changed_outside(self, known: Iterable[Any]) -> bool:
        """Return, after `release`, whether the step has changed schedulers, scalers, or tensors
        outside of the train state that still exist.

        Args:
            known: tensors that do not count. They are only looked at if others still exist.
        """
        left = {ref for ref in self._outside if not ref.expired()}
        if left and not self._changed_objects:
            dense = (t for t in map(local, known) if t.layout == torch.strided)
            left -= {StorageWeakRef(t.untyped_storage()) for t in dense}
        return self._changed_objects or bool(left)

    def release(self) -> None:
        self.gradients, self._found = None, []
        self.kept.clear()
        self._restores.clear()


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


def with_subclasses(base: Any) -> list[Any]:
    """Return a class and all of its subclasses, each once."""
    found = {base: None}
    for kind in base.__subclasses__():
        found |= dict.fromkeys(with_subclasses(kind))
    return list(found)


def _companions() -> Iterator[tuple[type, dict[str, Callable[..., Any]]]]:
    """Yield each class of schedulers and scalers that defines what writes its objects."""
    for base, names, keep in (
        (LRScheduler, ("step",), UndoLog.keep_scheduler),
        (torch.amp.GradScaler, ("unscale_", "step", "update"), UndoLog.keep_scaler),
    ):
        for kind in with_subclasses(base):
            yield kind, {name: _keeping(keep) for name in names if name in vars(kind)}


WRITES = ThreadOverrides(
    keras_variables.VARIABLE,
    {keras_variables.ASSIGN: _keeping(UndoLog.note), keras_variables.INITIALIZE: _initialize},
    _companions,
)
"""The override through which the undo logs record writes."""


def is_undone_as_a_whole() -> bool:
    """Whether an undo log around that of an eager step restores everything that it writes."""
    return len(WRITES.inside()) > 1


def _version_of(tensor: Any) -> int:
    """Return how many writes torch has counted: in `torch.inference_mode` it counts none."""
    return 0 if tensor.is_inference() else int(tensor._version)


def storage(tensor: Any) -> int:
    """Return the address of the memory of a tensor."""
    try:
        return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
    except (NotImplementedError, RuntimeError):  # a sparse tensor: only its parts have a storage
        return id(tensor)


def _restorer(tensor: Any) -> Callable[[], None]:
    """Return a function that restores the value of a tensor, and its memory and shape, which `set_`
    and `resize_` change; copies and pickles of tensors are created by `set_`.
    """
    alias = tensor.detach() if tensor.layout == torch.strided else tensor
    value = alias.detach().clone()

    def restore() -> None:
        alias.copy_(value)
        if alias is not tensor and _place(alias) != _place(tensor):
            tensor.set_(alias)

    return restore


def _place(tensor: Any) -> Any:
    """Return what is the same only for a tensor and its aliases of the same shape."""
    if tensor.layout != torch.strided:
        return id(tensor)
    return storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
