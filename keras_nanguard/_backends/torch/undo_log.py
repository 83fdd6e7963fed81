"""An undo log: the old values of everything that one step writes on torch.

An eager step cannot be inspected before it runs, so its writes are recorded, in its thread only:

- Before the step, `UndoLog.of` keeps modes, torch's random generators, attributes of layers,
  buffers, and tensors that a step was seen to write past Keras; in the first steps all tensors of
  the train state.
- Variables that Keras writes are kept before their first write, through `RECORDED_WRITES`. So are
  learning rate schedulers and gradient scalers of torch.
- The gradients that the step finds are kept before it first adds to them, or uses them.
- If the step continues after its update, the update keeps weights and slots before it runs.
- `LateWrites` keeps other tensors that the step writes in place after its update.

So a healthy step mostly copies its small state (statistics, seeds, metrics), each once.

Layers write the value of a variable through two methods of Keras' variables (`_keras.variables`),
optimizers write in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from keras_nanguard._backends.shared.thread_overrides import ThreadOverrides
from keras_nanguard._backends.torch import host, reductions
from keras_nanguard._backends.torch.found_gradients import FoundGradients
from keras_nanguard._backends.torch.learned import Learned
from keras_nanguard._backends.torch.optimizers import TorchOptimizer
from keras_nanguard._backends.torch.outside_state import (
    OutsideChanges,
    place_of,
    scaler_restorers,
    scheduler_restorer,
    tensor_restorer,
)
from keras_nanguard._backends.torch.state_tensors import StateTensors
from keras_nanguard._keras import (
    attributes as keras_attributes,
    torch_tensors,
    variables as keras_variables,
)
from keras_nanguard._keras.all_or_none import finish
from keras_nanguard._keras.torch_tensors import local

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""A dtype for the bits of entries, by their number of bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A tensor as it was before the step.

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

    def give_back(self) -> None:
        """Restore the value, unless it is the same."""
        # Torch does not count the writes of a fused optimizer, or through `.data`.
        if self.is_written or self.differs:
            torch_tensors.write_tensor(self.tensor, self.value)


class UndoLog:
    """The undo log of one step. Writes are recorded in it inside of `RECORDED_WRITES.entered`.

    `of` keeps what has to be kept before the step, the methods `keep*` what is about to be written,
    and `give_back` restores all of it.

    Args:
        kept: tensors to copy beforehand, because torch writes them in place.
        uncounted: the same, if torch may not even count the write, as for the running statistics of
            its own batch normalization.
        is_replay: whether writes of gradient scalers are undone, too.
        restored_elsewhere: tensors that other code restores.
        attributes: attributes of layers, as `give_back_tensors` takes them.
        restore_modes: restores modes, from `Modes`.

    Attributes:
        kept: the tensors that are restored, by their `id`.
        writers: the variables through which Keras wrote some of them, by the `id` of the tensor.
        gradients: those that the step has found.
        outside: whether it has changed anything else.
        created: the tensor of each variable that Keras has created meanwhile, with its first value.
    """

    def __init__(
        self,
        kept: Iterable[Any],
        uncounted: Iterable[Any] = (),
        is_replay: bool = False,
        restored_elsewhere: Iterable[Any] = (),
        attributes: Iterable[tuple[dict[str, Any], str, Any]] = (),
        restore_modes: Callable[[], None] = lambda: None,
    ):
        self.kept: dict[int, Kept] = {}
        self.writers: dict[int, Any] = {}
        self.gradients = FoundGradients()
        self.outside = OutsideChanges()
        self.created: list[tuple[Any, Any]] = []
        self._is_replay = is_replay
        self._restored_elsewhere = set(map(id, restored_elsewhere))
        # The state of a generator takes a microsecond, and does not wait for a device.
        self._generators = [partial(g.set_state, g.get_state()) for g in host.generators()]
        self._attributes, self._restore_modes = list(attributes), restore_modes
        self._others: dict[Any, Callable[[], None]] = {}
        """Restores each other object, by its `id`, and other tensors, by their place."""
        for tensor in uncounted:
            self.keep(tensor, is_counted=False)
        for tensor in kept:
            self.keep(tensor)

    @classmethod
    def of(
        cls, state: StateTensors, learned: Learned, undoes_updates: bool, is_compiled: bool
    ) -> UndoLog:
        """Return the log of a step that is about to run, with copies of what it may write
        unnoticed.

        Args:
            learned: what earlier steps have shown.
            undoes_updates: whether it may be updated before its verdict.
            is_compiled: whether its writes are not recorded.
        """
        uncounted = [*state.unlisted, *state.buffers(), *learned.uncounted.values()]
        kept = list(learned.untracked.values())
        if learned.is_fresh:
            kept += state.other
            kept += state.weights_and_slots if undoes_updates else ()
        if is_compiled:
            uncounted, kept = [*uncounted, *state.small_state, *kept], []
        attributes, restore_modes = state.attributes(learned.is_fresh), state.modes.restorer()
        log = cls(kept, uncounted, attributes=attributes, restore_modes=restore_modes)
        at_first = learned.adds_by_hand.is_possible
        log.gradients = FoundGradients(state.gradient_holders, undoes_updates, at_first)
        for _, gradient in log.gradients.kept or ():
            log.keep(local(gradient))
        # `LateWrites` keeps those of an eager step when they update.
        for optimizer in state.unlisted_optimizers if undoes_updates and is_compiled else ():
            log.keep_updated(optimizer, (), copies=True)
        return log

    def keep(self, tensor: Any, is_counted: bool = True) -> None:
        """Copy a tensor, unless it is kept already; `is_counted`: whether torch counts every write
        of it.
        """
        # One of `torch.inference_mode` counts no writes; torch writes it in that mode only.
        if not (id(tensor) in self.kept or tensor.is_inference()):
            value = tensor.detach().clone()
            self.kept[id(tensor)] = Kept(tensor, value, tensor._version, is_counted)

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
        if isinstance(optimizer, TorchOptimizer) and id(optimizer.of) not in self._others:
            self._others[id(optimizer.of)] = optimizer.restorer(copies)

    def keep_outside(self, tensor: Any) -> None:
        """Copy a tensor outside of the train state that is about to be written in place."""
        key = place_of(tensor)
        known = (
            id(tensor) in self._restored_elsewhere or id(tensor) in self.kept or key in self._others
        )
        if not (known or tensor.is_inference()):
            self._others[key] = tensor_restorer(tensor)
            self.outside.note_tensor(tensor)

    def keep_scheduler(self, scheduler: Any) -> None:
        """Keep the state of a scheduler that is about to change, and its optimizer's settings."""
        self.outside.note_object()
        self._others.setdefault(id(scheduler), scheduler_restorer(scheduler))

    def keep_scaler(self, scaler: Any) -> None:
        """Keep the state of a gradient scaler that is about to change."""
        if scaler.is_enabled():
            self.outside.note_object()
            for key, restore in scaler_restorers(scaler, self._is_replay):
                self._others.setdefault(key, restore)

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
        if not (tensor.is_meta or id(tensor) in self._restored_elsewhere):
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
        parts: list[Callable[[], Any]] = [
            # The last one first: a scheduler and an optimizer both have the rate, and that of the
            # earlier copy is to stay.
            *reversed(self._others.values()),
            # Before the tensors: versions show which gradients were written, and restored values
            # count as writes.
            self._give_back_gradients,
            partial(keras_attributes.give_back_tensors, self._attributes),
            *self._generators,
            # After the others, which may have later values of an alias.
            *(kept.give_back for kept in self.kept.values()),
        ]
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

    def release(self) -> None:
        self.gradients.release()
        self.kept.clear()
        self.writers.clear()
        self._others.clear()
        self._attributes.clear()
        self._generators.clear()


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


def _with_subclasses(base: Any) -> list[Any]:
    """Return a class and all of its subclasses, each once."""
    found = {base: None}
    for kind in base.__subclasses__():
        found |= dict.fromkeys(_with_subclasses(kind))
    return list(found)


def where_defined(
    base: Any, functions: Mapping[str, Callable[..., Any]]
) -> Iterator[tuple[type, dict[str, Callable[..., Any]]]]:
    """Yield a class and its subclasses, each with those of these functions that it defines."""
    for kind in _with_subclasses(base):
        yield kind, {name: f for name, f in functions.items() if name in vars(kind)}


def _companions() -> Iterator[tuple[type, dict[str, Callable[..., Any]]]]:
    """Yield what writes schedulers and scalers, by class."""
    yield from where_defined(LRScheduler, {"step": _keeping(UndoLog.keep_scheduler)})
    methods = dict.fromkeys(("unscale_", "step", "update"), _keeping(UndoLog.keep_scaler))
    yield from where_defined(torch.amp.GradScaler, methods)


RECORDED_WRITES = ThreadOverrides(
    keras_variables.VARIABLE,
    {keras_variables.ASSIGN: _keeping(UndoLog.note), keras_variables.INITIALIZE: _initialize},
    _companions,
)
"""The override through which the undo logs record writes."""


def is_undone_as_a_whole() -> bool:
    """Whether an undo log around that of an eager step restores everything that it writes."""
    return len(RECORDED_WRITES.inside()) > 1
