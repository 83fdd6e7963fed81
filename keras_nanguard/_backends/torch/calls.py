"""What the code of a step on torch calls."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

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


class Recorder:
    """Records the calls of one run of a step. The overrides of `intercept` call it. A subclass says
    what happens in place of an update.

    Args:
        weights: the `id` of the weights of the step.

    Attributes:
        updates: its updates until now, in order.
        line_searches: the number of those that have evaluated the loss more than once.
        losses_of: the losses of each of `SOURCES` that it has called.
        predictions: the outputs of the model that each `compute_loss` has received.
        late_writes: keeps what the step writes in place after its update.
    """

    def __init__(self, weights: Container[int]):
        self.updates: list[Update] = []
        self.line_searches = 0
        self.losses_of: dict[str, tuple[Any, ...]] = {}
        self.predictions: list[Any] = []
        self.late_writes = LateWrites(weights)

    @property
    def losses(self) -> Sequence[Any]:
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

    def outputs_of(self, model: Any) -> list[tuple[str, Any]]:
        """Return `(name, tensor)` of the outputs of the model that `compute_loss` received."""
        flat = map(keras.tree.flatten, self.predictions)
        named = [pair for outputs in flat for pair in named_outputs(model, outputs)]
        tensors = [pair for pair in named if isinstance(pair[1], torch.Tensor)]
        return [pair for pair in tensors if is_inexact(pair[1])]

    def on_update(self, update: Update) -> Any:
        """Replace an update, after the calls until then; return its result."""
        raise NotImplementedError

    def around_backward(self) -> AbstractContextManager[None]:
        """Return a context for a backward pass of an eager step."""
        return self.late_writes.around_backward()

    def note_losses(self, source: str, values: Any) -> None:
        """Note those of these values that are real scalars, each of which counts as a loss."""
        tensors = [t for t in tensors_in([values]) if t.numel() == 1 and t.is_floating_point()]
        self._add_losses(source, [tensor.detach() for tensor in tensors])

    def note_loss_of_model(self, loss: Any, predictions: Any) -> None:
        """Note the result of `compute_loss`, and the outputs that it has received."""
        self._add_losses("compute_loss", [loss])
        self.predictions.append(predictions)

    def _add_losses(self, source: str, losses: Iterable[Any]) -> None:
        self.losses_of[source] = (*self.losses_of.get(source, ()), *losses)

    def update(self, update: Update) -> Any:
        """Note an update and run it, unless `on_update` does not; return its result."""
        if not update.evaluates:
            self.updates.append(update)
            return self.on_update(update)
        before = dict(self.losses_of)
        result = self.on_update(update)
        passes = [len(losses.get("backward", ())) for losses in (before, self.losses_of)]
        self.line_searches += passes[1] > passes[0] + 1
        self.updates.append(update)  # its gradients are known only now
        if isinstance(result, torch.Tensor):  # not the losses of its line search
            self.losses_of = before
            self.note_losses("backward", result)
        return result
