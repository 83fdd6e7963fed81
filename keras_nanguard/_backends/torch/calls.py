"""What the code of a step on torch has called and done."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
import torch

from keras_nanguard._backends.torch.late_writes import LateWrites
from keras_nanguard._backends.torch.modules import tensors_in
from keras_nanguard._backends.torch.reductions import is_inexact
from keras_nanguard._backends.torch.updates import Update
from keras_nanguard._keras.layers import named_outputs

SOURCES = ("compute_loss", "scale", "backward")
"""Functions whose values are the losses of a step: of the first one that the step calls. Those of
the others are these losses once more, scaled, or parts of them.
"""


class Calls(NamedTuple):
    """What a step has called until now.

    Attributes:
        updates: its updates, in order.
        line_searches: the number of those that have evaluated the loss more than once.
        losses_of: the losses of each of `SOURCES` that it has called.
        predictions: the outputs of the model that each `compute_loss` has received.
    """

    updates: tuple[Update, ...] = ()
    line_searches: int = 0
    losses_of: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
    predictions: tuple[Any, ...] = ()

    def with_losses(self, source: str, losses: Iterable[Any]) -> Calls:
        """Return these calls and one of this function."""
        found = (*self.losses_of.get(source, ()), *losses)
        return self._replace(losses_of={**self.losses_of, source: found})

    @property
    def losses(self) -> tuple[Any, ...]:
        """The losses of the step, from the first of `SOURCES` that has any."""
        return next(filter(None, map(self.losses_of.get, SOURCES)), ())

    @property
    def loss_count(self) -> int:
        """The number of losses of all of `SOURCES`."""
        return sum(map(len, self.losses_of.values()))

    @property
    def is_scaled(self) -> bool:
        """Whether the losses are scaled."""
        return bool(self.losses_of.get("scale"))

    @property
    def has_only_line_searches(self) -> bool:
        """Whether each update, of at least one, has evaluated the loss more than once."""
        return 0 < self.line_searches == len(self.updates)

    def outputs(self, model: Any) -> list[tuple[str, Any]]:
        """Return `(name, tensor)` of the outputs of the model that `compute_loss` received."""
        flat = map(keras.tree.flatten, self.predictions)
        named = [pair for outputs in flat for pair in named_outputs(model, outputs)]
        tensors = [pair for pair in named if isinstance(pair[1], torch.Tensor)]
        return [pair for pair in tensors if is_inexact(pair[1])]


class Ran(NamedTuple):
    """What the body of a step has done.

    Attributes:
        losses_before: the number of its losses before its first update.
        written_before: the tensors of the train state that it had written past Keras until then.
        uncounted_before: those whose writes torch had not counted.
        updated: those of its updates that have run.
        created: the tensors that they have created, each with its first value.
        versions_after: `StepContext.versions_now` after the last one.
        continues: as in `LateWrites`.
        outputs: its outputs, `None` if it has not ended, or has raised.
        raised: whether torch has raised about a bad number.
    """

    calls: Calls = Calls()
    losses_before: int = 0
    written_before: Sequence[Any] = ()
    uncounted_before: Sequence[Any] = ()
    updated: tuple[Update, ...] = ()
    created: tuple[tuple[Any, Any], ...] = ()
    versions_after: Mapping[int, tuple[Any, int]] = MappingProxyType({})
    continues: bool = False
    outputs: Any = None
    raised: bool = False


class Recorder:
    """Records the calls of one run of a step. The overrides of `intercept` call it. A subclass says
    what happens in place of an update.

    Args:
        weights: the `id` of the weights of the step.

    Attributes:
        calls: the calls until now.
        late_writes: keeps what the step writes in place after its update.
    """

    def __init__(self, weights: Container[int]):
        self.calls, self.late_writes = Calls(), LateWrites(weights)

    def on_update(self, update: Update) -> Any:
        """Replace an update, after the calls until then; return its result."""
        raise NotImplementedError

    def around_backward(self) -> AbstractContextManager[None]:
        """Return a context for a backward pass of an eager step."""
        return self.late_writes.around_backward()

    def note_losses(self, source: str, values: Any) -> None:
        """Note those of these values that are real scalars, each of which counts as a loss."""
        tensors = [t for t in tensors_in([values]) if t.numel() == 1 and t.is_floating_point()]
        self.calls = self.calls.with_losses(source, [tensor.detach() for tensor in tensors])

    def note_loss_of_model(self, loss: Any, predictions: Any) -> None:
        """Note the result of `compute_loss`, and the outputs that it has received."""
        calls = self.calls.with_losses("compute_loss", [loss])
        self.calls = calls._replace(predictions=(*calls.predictions, predictions))

    def update(self, update: Update) -> Any:
        """Note an update and run it, unless `on_update` does not; return its result."""
        before = self.calls
        if not update.evaluates:
            self.calls = before._replace(updates=(*before.updates, update))
            return self.on_update(update)
        result = self.on_update(update)
        passes = len(self.calls.losses_of.get("backward", ()))
        is_search = passes > len(before.losses_of.get("backward", ())) + 1
        self.calls = self.calls._replace(
            updates=(*self.calls.updates, update),  # its gradients are known only now
            line_searches=self.calls.line_searches + is_search,
        )
        if isinstance(result, torch.Tensor):  # not the losses of its line search
            self.calls = self.calls._replace(losses_of=before.losses_of)
            self.note_losses("backward", result)
        return result
