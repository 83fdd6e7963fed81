"""Intercepts and records the updates and the losses of a step on torch while its body runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial, wraps
from types import MethodType
from typing import Any

import keras
import torch

from keras_nanguard._backends.torch.optimizers import TorchOptimizer, tensors_in
from keras_nanguard._backends.torch.reductions import is_inexact
from keras_nanguard._backends.torch.updates import KerasUpdate, TorchUpdate, Update
from keras_nanguard._backends.torch.watching import CALLS, LateWrites
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras.layers import named_outputs
from keras_nanguard._keras.losses import is_loss, predicted
from keras_nanguard._keras.overrides import Overrides

SOURCES = ("compute_loss", "scale", "backward")
"""Functions whose values are the losses of a step: of the first one that the step calls. Those of
the others are these losses once more, scaled, or parts of them.
"""


class Recorder:
    """Records the calls of one run of a step: `Intercept` and `CALLS` call it. A subclass says what
    happens in place of an update.

    Args:
        weights: the `id` of the weights of the step.

    Attributes:
        updates: its updates until now, in order.
        line_searches: the number of those that have evaluated the loss more than once.
        losses_of: the losses of each of `SOURCES` that it has called.
        predictions: the outputs of the model that each `compute_loss` has received.
        late_writes: keeps what the step writes in place after its update.
    """

    shows_losses = True
    """Whether to note which losses it scales and differentiates: a compiled step does not show it,
    and that of Keras calls `compute_loss`.
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

    def watch(self, stack: contextlib.ExitStack) -> None:
        """Record what an eager step calls that only its code knows, until the stack ends."""
        stack.enter_context(CALLS.entered(self))
        self.late_writes.wait(stack)

    def on_update(self, update: Update) -> Any:
        """Replace an update, after the calls until then; return its result."""
        raise NotImplementedError

    def around_backward(self) -> contextlib.AbstractContextManager[None]:
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


class Intercept:
    """Replaces the updates of optimizers and the loss computation of one model by functions that
    call the recorder of the step that runs.

    With `body` it belongs to a compiled step and is used again in each run of it: torch would
    compile the step again if a function that it calls were another one. Two kinds of functions are
    not part of the compiled step. What records a call runs as plain Python, since it computes the
    verdict. An update of a Keras optimizer is compiled separately; one of a torch optimizer is not
    compiled, nor one of `LossScaleOptimizer`, which would be compiled again in each step, because
    it names an operation differently each time.

    Args:
        model: the model whose `compute_loss` is recorded, or `None`.
        body: a step to compile, as Keras does with `jit_compile=True`; `None` if it runs eagerly.

    Attributes:
        compiled: the compiled step, or `None`.
    """

    _recorder: Recorder

    def __init__(
        self, model: Any, optimizers: Iterable[Any], body: Callable[..., Any] | None = None
    ):
        self.compiled = None if body is None else torch.compile(body)
        optimizers = list(optimizers)
        self._replacements = [self._replacement(optimizer) for optimizer in optimizers]
        self._scaled = list(filter(keras_optimizers.is_loss_scaled, optimizers))
        if hasattr(model, "compute_loss"):
            self._replacements.append((model, "compute_loss", self._noting(model.compute_loss)))

    @contextlib.contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Record the step that runs in this context."""
        self._recorder = recorder
        try:
            with Overrides() as overrides:
                for target, name, function in self._replacements:
                    overrides.set(target, name, function)
                for optimizer in self._scaled if recorder.shows_losses else ():
                    overrides.set(optimizer, "scale_loss", self._scaling(optimizer.scale_loss))
                yield
        finally:
            del self._recorder  # it refers to the run of the step

    def _excluded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that a compiled step calls without compiling it."""
        return function if self.compiled is None else torch.compiler.disable(function)

    def _replacement(self, optimizer: Any) -> tuple[Any, str, Callable[..., Any]]:
        """Return the object, the name of its method that updates, and what replaces it."""
        if isinstance(optimizer, TorchOptimizer):
            return optimizer.of, "step", self._stepper(optimizer.of.step, optimizer)
        real = optimizer.apply
        if self.compiled is not None and not keras_optimizers.is_loss_scaled(optimizer):
            real = torch.compile(real)

        def apply(grads: Iterable[Any], trainable_variables: Any = None) -> Any:
            variables = () if trainable_variables is None else (list(trainable_variables),)
            self._recorder.update(KerasUpdate(optimizer, real, list(grads), *variables))

        return optimizer, "apply", self._excluded(apply)

    def _stepper(self, real: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
        @wraps(real)  # schedulers of torch mark the function
        def step(_: Any, closure: Any = None, **kwargs: Any) -> Any:
            args = () if closure is None else (closure,)
            has_closure = bool(args or kwargs)
            update = TorchUpdate(optimizer, partial(real, *args, **kwargs), has_closure)
            result = self._recorder.update(update)
            optimizer.of._opt_called = True  # schedulers of torch check this
            return result

        return MethodType(self._excluded(step), optimizer.of)  # a scheduler wraps its `__func__`

    def _scaling(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def scale_loss(loss: Any) -> Any:
            self._recorder.note_losses("scale", loss)
            return real(loss)

        return scale_loss

    def _noting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def note(loss: Any, args: Any, kwargs: Any) -> None:
            if is_loss(loss):
                is_tensor = isinstance(loss, torch.Tensor)
                loss = loss if is_tensor else keras.ops.convert_to_tensor(loss)
                self._recorder.note_loss_of_model(loss, predicted(args, kwargs))

        note = self._excluded(note)

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = real(*args, **kwargs)
            note(loss, args, kwargs)
            return loss

        return compute_loss
