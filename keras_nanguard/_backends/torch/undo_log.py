"""What one step writes on torch, with the values from before: an undo log.

An eager step cannot be read beforehand, so it is watched while it runs. Every write to a Keras variable, listed
anywhere or not, passes through `Variable._direct_assign`; while a step runs, that method first copies what it is about
to overwrite, in the thread of that step alone. A healthy step so copies its small state (statistics, seeds, metrics),
each once, and nothing else. What earlier steps have written so is copied at once before the next one: `Expected`.

What does not pass through it is written in place by torch itself: the updates of optimizers, which the transaction
calls itself; buffers of torch modules and torch's own random generators, which are kept before each step; and what a
user's code writes in place, which shows in the version that torch counts for each tensor: from the first step on, in
which everything is kept, whatever was written so once is kept before each step.

Names private to Keras: ``Variable._direct_assign`` and ``Variable._initialize``, the only two places that write the
value of a variable on this backend; there is no public hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._keras.overrides import ThreadOverrides

__all__ = ["WRITES", "Expected", "UndoLog", "generators"]


class Expected:
    """The variables that earlier steps have written, and the values that they had before the step that runs.

    They are copied in one call, into tensors that are used again.
    """

    def __init__(self) -> None:
        self.variables: dict[int, Any] = {}
        self.owner: dict[int, Any] = {}
        self._tensors: list[Any] = []
        self._copies: list[Any] = []

    def add(self, owner: dict[int, Any]) -> None:
        """Expect these variables, given by the `id` of their tensors, to be written by later steps, too."""
        for key, variable in owner.items():
            if key not in self.owner:
                self.owner[key] = self.variables[id(variable)] = variable
                self._tensors.append(variable.value)
                self._copies.append(self._tensors[-1].detach().clone())

    def copy(self) -> dict[int, tuple[Any, Any, Any]]:
        """Copy the values of now; return tensor, value and version by the `id` of each tensor."""
        if self._tensors:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._tensors)
        return {id(tensor): (tensor, copied, tensor._version) for tensor, copied in zip(self._tensors, self._copies)}


class UndoLog:
    """The undo log of one step; a context in which writes are noted.

    Args:
        kept: tensors to be copied beforehand, as torch writes them in place.
        uncounted: the same, where torch may not even count the write, as it does not for the running statistics of its
            own batch normalization.
        note_created: called with each Keras variable that is created meanwhile.
        watch: whether writes of Keras are noted; a compiled step makes them in its own way.
        writes: called with each tensor that Keras is about to write.
        expected: the variables that the step will probably write.
    """

    def __init__(
        self,
        kept: Iterable[Any],
        note_created: Callable[[Any], None],
        uncounted: Iterable[Any] = (),
        watch: bool = True,
        writes: Callable[[Any], None] | None = None,
        expected: Expected | None = None,
    ):
        self.note_created, self.watch, self.writes = note_created, watch, writes
        uncounted = list(uncounted)
        self.uncounted = {id(tensor) for tensor in uncounted}
        self._expected = {} if expected is None else expected.variables
        self.old: dict[int, tuple[Any, Any, Any]] = {} if expected is None else expected.copy()
        self.owner: dict[int, Any] = {} if expected is None else dict(expected.owner)
        self._generators = generators()
        self.keep([*uncounted, *kept])

    def keep(self, tensors: Iterable[Any]) -> None:
        """Copy tensors as they are now, those that are not kept yet."""
        with torch.no_grad():
            for tensor in tensors:
                if id(tensor) not in self.old:
                    self.old[id(tensor)] = (tensor, tensor.detach().clone(), tensor._version)

    @property
    def written(self) -> list[Any]:
        """The tensors that were written since they were kept, or may have been."""
        held, uncounted = self.old.items(), self.uncounted
        return [tensor for key, (tensor, _, version) in held if tensor._version != version or key in uncounted]

    def __enter__(self) -> UndoLog:
        if self.watch:
            WRITES.enter(self)
        return self

    def __exit__(self, *details: Any) -> None:
        if self.watch:
            WRITES.leave(self)

    def note(self, variable: Any) -> None:
        """Keep the value of a variable that is about to be written."""
        if self.writes is not None:
            self.writes(variable.value)
        if id(variable) in self._expected:
            return
        tensor = variable.value
        if id(tensor) not in self.owner and not tensor.is_meta:
            self.owner[id(tensor)] = variable
            self.keep([tensor])

    def give_back(self, unseen: bool = False) -> None:
        """Undo every write; `unseen` also such as torch does not count (fused ones, under a mode that watches them)."""
        with torch.no_grad():
            for key, (tensor, value, version) in self.old.items():
                if unseen or key in self.uncounted or tensor._version != version:
                    _without_repeats(tensor).copy_(_without_repeats(value, tensor))
        for give, state in self._generators:
            give(state)


def _without_repeats(tensor: Any, of: Any = None) -> Any:
    """Return the part of a tensor that is in memory once: PyTorch writes into no tensor that was expanded (`Normalization(mean=0.0)`).

    Args:
        of: the tensor whose memory counts, itself by default.
    """
    of = tensor if of is None else of
    strides = of.stride() if of.layout == torch.strided else ()
    for dim, stride in enumerate(strides):
        if stride == 0 and of.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _direct_assign(real: Callable[..., Any], journals: list[UndoLog], variable: Any, value: Any) -> Any:
    for undo_log in journals:
        undo_log.note(variable)
    return real(variable, value)


def _initialize(real: Callable[..., Any], journals: list[UndoLog], variable: Any, value: Any) -> None:
    real(variable, value)
    for undo_log in journals:
        undo_log.note_created(variable)


WRITES = ThreadOverrides(keras_variables.VARIABLE, {"_direct_assign": _direct_assign, "_initialize": _initialize})
"""What the undo logs hear writes by."""


def generators() -> list[tuple[Callable[[Any], None], Any]]:
    """Return the states of torch's global generators, each with what sets it.

    Unseeded dropout and noise draw from them. A copy takes a microsecond; no device is waited for.
    """
    held: list[tuple[Callable[[Any], None], Any]] = [(torch.set_rng_state, torch.get_rng_state())]
    if torch.cuda.is_initialized():
        device = torch.cuda.current_device()
        held.append((lambda state: torch.cuda.set_rng_state(state, device), torch.cuda.get_rng_state(device)))
    return held
