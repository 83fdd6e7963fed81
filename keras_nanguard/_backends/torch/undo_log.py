"""An undo log: the old values of everything that one step writes on torch.

An eager step cannot be inspected before it runs, so its writes are recorded, in its thread only:

- Before the step, `Attempt` keeps modes, torch's random generators, attributes of layers, buffers,
  and tensors that a step was seen to write past Keras; in the first steps all tensors of the train
  state.
- Variables that Keras writes are kept before their first write, through `RECORDED_WRITES`. So are
  learning rate schedulers and gradient scalers of torch.
- The gradients that the step finds are kept before it first adds to them, or uses them.
- If the step continues after its update, the update keeps weights and slots before it runs.
- `LateWrites` keeps other tensors that the step writes in place after its update.

So a healthy step mostly copies its small state (statistics, seeds, metrics), each once. A refusal
restores what was kept in reverse order, so of two tensors with the same memory the first copy
remains.

Layers write the value of a variable through two methods of Keras' variables (`_keras.variables`),
optimizers write in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.optimizers import (
    TorchOptimizer,
    scaler_restorers,
    scheduler_restorer,
)
from keras_nanguard._keras import (
    attributes as keras_attributes,
    torch_tensors,
    variables as keras_variables,
)
from keras_nanguard._keras.all_or_none import finish
from keras_nanguard._keras.torch_tensors import local

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""A dtype for the bits of entries, by their number of bytes."""


def storage(tensor: Any) -> int:
    """Return the address of the memory of a tensor."""
    try:
        return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
    except (NotImplementedError, RuntimeError):  # a sparse tensor: only its parts have a storage
        return id(tensor)


def _place_of(tensor: Any) -> Any:
    """Return what is the same only for a tensor and its aliases of the same shape."""
    if tensor.layout != torch.strided:
        return id(tensor)
    return storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A tensor as it was before the step. A call restores it.

    Attributes:
        value, version: its value and version when it was kept.
        is_counted: whether torch counts every write of it.
    """

    tensor: Any
    value: Any
    version: int
    is_counted: bool = True

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

    def __call__(self) -> None:
        """Restore the value, unless it is the same."""
        # Torch does not count the writes of a fused optimizer, or through `.data`.
        if self.is_written or self.differs:
            torch_tensors.write_tensor(self.tensor, self.value)


class FoundGradients:
    """The gradients that a step finds. A refusal restores those that it adds to or uses.

    Args:
        holders: the tensors that have a gradient.
        may_add: whether the step may add to those that it finds.
        at_first: whether to keep them before the step.

    Attributes:
        kept: each of these tensors whose gradient is restored, with this gradient.
        added_by_hand: whether the step has written one before `choose`; `None` until then, and if
            it has found none.
    """

    def __init__(self, holders: Sequence[Any] = (), may_add: bool = True, at_first: bool = False):
        self._holders, self._at_first, self._is_chosen = holders, at_first, False
        pairs = [(p, p.grad) for p in holders if p.grad is not None] if may_add else []
        # A step that clears them first is to release their memory.
        self._found = [(p, TensorWeakRef(grad), _version_of(grad)) for p, grad in pairs]
        self.kept = pairs if at_first else []
        self.added_by_hand: bool | None = None

    @property
    def kept_ids(self) -> set[int]:
        """The `id` of each gradient, or shard of one, that is kept."""
        return {id(local(gradient)) for _, gradient in self.kept}

    def choose(self) -> list[tuple[Any, Any]]:
        """Return those to keep, each with its tensor: those that the step has neither cleared nor
        replaced when this is first called, at its first backward pass or update, or at its end. If
        they were kept before the step, also those that it has written until then.
        """
        if self._is_chosen:
            return self.kept
        self._is_chosen = True
        found = [(p, ref(), version) for p, ref, version in self._found]
        left = [(p, gradient, version) for p, gradient, version in found if gradient is not None]
        written = {id(gradient) for _, gradient, v in left if _version_of(gradient) != v}
        self.added_by_hand = bool(written) if found else None
        also = written if self._at_first else ()
        self.kept = [(p, g) for p, g, _ in left if p.grad is g or id(g) in also]
        return self.kept

    def give_back(self, was_finite: Callable[[Any], bool]) -> None:
        """Restore those that are kept; for all other tensors leave none.

        Args:
            was_finite: whether a gradient was finite before the step. A bad sum, which no later
                step could correct, is dropped.
        """
        for holder in self._holders:
            holder.grad = None
        for holder, gradient in self.kept:
            if was_finite(gradient):
                holder.grad = gradient


def _version_of(gradient: Any) -> int:
    """Return how many writes torch has counted: in `torch.inference_mode` it counts none."""
    tensor = local(gradient)
    return 0 if tensor.is_inference() else int(tensor._version)


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


class UndoLog:
    """The undo log of one step. Writes are recorded in it inside of `RECORDED_WRITES.entered`.

    The methods `keep*` keep what is about to be written, and `give_back` restores all of it.

    Args:
        kept: tensors to copy beforehand, because torch writes them in place.
        uncounted: the same, if torch may not even count the write, as for the running statistics of
            its own batch normalization.
        is_replay: whether writes of gradient scalers are undone, too.
        attributes: attributes of layers, as `give_back_tensors` takes them.
        restore_modes: restores modes, from `Modes`.
        gradients: those that the step finds.

    Attributes:
        kept: the tensors that are restored, by their `id`.
        writers: the variables through which Keras wrote some of them, by the `id` of the tensor.
        outside: whether it has changed anything else.
        created: the tensor of each variable that Keras has created meanwhile, with its first value.
    """

    def __init__(
        self,
        kept: Iterable[Any],
        uncounted: Iterable[Any] = (),
        is_replay: bool = False,
        attributes: Sequence[tuple[dict[str, Any], str, Any]] = (),
        restore_modes: Callable[[], None] = lambda: None,
        gradients: FoundGradients | None = None,
    ):
        self.kept: dict[int, Kept] = {}
        self.writers: dict[int, Any] = {}
        self.gradients = FoundGradients() if gradients is None else gradients
        self.outside = OutsideChanges()
        self.created: list[tuple[Any, Any]] = []
        self._is_replay, self._restore_modes = is_replay, restore_modes
        # The state of a generator takes a microsecond, and does not wait for a device.
        self._restorers: dict[Any, Callable[[], Any]] = {
            id(generator): partial(generator.set_state, generator.get_state())
            for generator in host.generators()
        }
        """Restores each tensor and each other object, in the order in which they were kept: by
        their `id`, tensors outside of the train state by their place.
        """
        self._restorers["attributes"] = partial(keras_attributes.give_back_tensors, attributes)
        for tensor in uncounted:
            self.keep(tensor, is_counted=False)
        for tensor in (*kept, *(local(gradient) for _, gradient in self.gradients.kept)):
            self.keep(tensor)

    def keep(self, tensor: Any, is_counted: bool = True) -> None:
        """Copy a tensor, unless it is kept already; `is_counted`: whether torch counts every write
        of it.
        """
        key = id(tensor)
        # One of `torch.inference_mode` counts no writes; torch writes it in that mode only.
        if not (key in self._restorers or tensor.is_inference()):
            value = tensor.detach().clone()
            kept = self.kept[key] = Kept(tensor, value, tensor._version, is_counted)
            self._restorers[key] = kept

    def keep_gradients(self) -> None:
        """Keep the gradients that the step has found, and neither cleared nor replaced."""
        for _, gradient in self.gradients.choose():
            self.keep(local(gradient))

    def keep_updated(self, optimizer: Any, tensors: Iterable[Any], copies: bool = False) -> None:
        """Keep what an update is about to write: these tensors, and the other state of an optimizer
        of torch; `copies` as in `TorchOptimizer.restorer`.
        """
        for tensor in tensors:
            self.keep(tensor)
        if isinstance(optimizer, TorchOptimizer) and id(optimizer.of) not in self._restorers:
            self._restorers[id(optimizer.of)] = optimizer.restorer(copies)

    def keep_outside(self, tensor: Any) -> None:
        """Copy a tensor outside of the train state that is about to be written in place."""
        place = _place_of(tensor)
        is_kept = id(tensor) in self._restorers or place in self._restorers
        if not (is_kept or tensor.is_inference()):
            self._restorers[place] = _tensor_restorer(tensor)
            self.outside.note_tensor(tensor)

    def keep_scheduler(self, scheduler: Any) -> None:
        """Keep the state of a scheduler that is about to change, and its optimizer's settings."""
        self.outside.note_object()
        self._restorers.setdefault(id(scheduler), scheduler_restorer(scheduler))

    def keep_scaler(self, scaler: Any) -> None:
        """Keep the state of a gradient scaler that is about to change."""
        if scaler.is_enabled():
            self.outside.note_object()
            for owner, restore in scaler_restorers(scaler, self._is_replay):
                self._restorers.setdefault(id(owner), restore)

    def before(self, tensor: Any) -> Any:
        """Return the value of a tensor before the step."""
        kept = self.kept.get(id(tensor))
        return tensor.detach() if kept is None else kept.value

    @property
    def written(self) -> list[Any]:
        """The kept tensors that were, or may have been, written."""
        return [kept.tensor for kept in self.kept.values() if kept.is_written]

    def note(self, variable: Any) -> None:
        """Keep the value of a variable that Keras is about to write."""
        tensor = variable.value
        if not tensor.is_meta:
            self.keep(tensor)
            if id(tensor) in self.kept:
                self.writers[id(tensor)] = variable

    def note_created(self, variable: Any) -> None:
        """Store the first value of a variable that Keras has created."""
        if not variable.value.is_meta:
            self.created.append((variable.value, keras_variables.read(variable)))

    def give_back(self, halfway: bool = False) -> None:
        """Restore everything.

        Args:
            halfway: whether modes, too: a step that has raised has not set them back itself.

        Raises:
            StateLostError: if a part could not be restored; all others are.
        """
        # Versions show which gradients were written, and restored values count as writes.
        parts = [self._give_back_gradients, *reversed(self._restorers.values())]
        try:
            with torch.no_grad():
                finish(parts)
        finally:
            if halfway:
                self._restore_modes()  # here, because `no_grad` sets back the mode of gradients

    def _give_back_gradients(self) -> None:
        """Restore the gradients that are kept, those of `torch.inference_mode` without their
        values; leave none for all other weights.
        """
        self.keep_gradients()
        self.gradients.give_back(lambda g: reductions.are_finite([self.before(local(g))]))


def _tensor_restorer(tensor: Any) -> Callable[[], None]:
    """Return a function that restores the value of a tensor, and its memory and shape, which `set_`
    and `resize_` change; copies and pickles of tensors are created by `set_`.
    """
    alias = tensor.detach() if tensor.layout == torch.strided else tensor
    value = alias.detach().clone()

    def restore() -> None:
        alias.copy_(value)
        if alias is not tensor and _place_of(alias) != _place_of(tensor):
            tensor.set_(alias)

    return restore
