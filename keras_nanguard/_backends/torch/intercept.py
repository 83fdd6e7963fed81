"""Intercepts the optimizer calls and the loss of a step on torch while its body runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

import keras
import torch

from keras_nanguard._backends.torch.reductions import can_be_bad
from keras_nanguard._backends.torch.updates import KerasUpdate, TorchUpdate, Update
from keras_nanguard._core.verdict import named_outputs, predicted
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras.overrides import Overrides


class Intercept:
    """Replaces the updates of optimizers and the loss computation of one model, and records what
    they are called with.

    The replacements are installed in `running`, once at a time, and are made again only if what
    they replace has changed.

    Args:
        model: the model whose `compute_loss` is recorded, or `None`.
        optimizers: the intercepted optimizers.

    Attributes:
        records: the calls of the optimizers, in order.
        losses: the results of `compute_loss`.
    """

    records: list[Update]
    losses: list[Any]

    def __init__(self, model: Any, optimizers: Iterable[Any]):
        self.model, self.optimizers = model, list(optimizers)
        self._made: dict[int, tuple[Any, Callable[..., Any]]] = {}
        self.release()

    @contextlib.contextmanager
    def running(self, on_update: Callable[[Update], None]) -> Iterator[Intercept]:
        """Return a context in which a step is recorded.

        Args:
            on_update: called with each record in place of the update.
        """
        self.release()
        self.on_update = on_update
        with Overrides() as overrides:
            for target, name, function in self.replacements():
                overrides.set(target, name, function)
            yield self

    def release(self) -> None:
        """Release what the last step has recorded."""
        self.records, self.losses = [], []
        self._predictions: list[Any] = []

    @property
    def outputs(self) -> list[tuple[str, Any]]:
        """`(name, tensor)` of the model's outputs that `compute_loss` received."""
        flat = map(keras.tree.flatten, self._predictions)
        named = [pair for outputs in flat for pair in named_outputs(self.model, outputs)]
        return [
            (name, value)
            for name, value in named
            if isinstance(value, torch.Tensor) and can_be_bad(value)
        ]

    def replacements(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """Return `(object, attribute, function)` of everything that is replaced."""
        places = []
        for optimizer in self.optimizers:
            of_torch: Any = getattr(optimizer, "of", None)
            if of_torch is not None:
                places.append(self._replacement(of_torch, "step", self._stepper, optimizer))
            else:
                places.append(self._replacement(optimizer, "apply", self._applier, optimizer))
        if hasattr(self.model, "compute_loss"):
            places.append(self._replacement(self.model, "compute_loss", self._noting))
        return places

    def _replacement(
        self, target: Any, name: str, make: Callable[..., Callable[..., Any]], *more: Any
    ) -> tuple[Any, str, Callable[..., Any]]:
        """Return a replacement made by `make(real, *more)`, where `real` is the current method."""
        real, known = getattr(target, name), self._made.get(id(target))
        if known is None or known[0] != real:
            known = self._made[id(target)] = real, make(real, *more)
        return target, name, known[1]

    def reporting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the form in which the step calls a function that records a call."""
        return function

    def update_of(self, optimizer: Any, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return the update of a Keras optimizer, given its method."""
        return real

    def _applier(self, apply: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
        real = self.update_of(optimizer, apply)

        def replaced(grads: Iterable[Any], trainable_variables: Any = None) -> Any:
            given = None if trainable_variables is None else list(trainable_variables)
            self._take(KerasUpdate(optimizer, real, list(grads), given))

        return self.reporting(replaced)

    def _stepper(self, real: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
        @functools.wraps(real)  # schedulers of torch mark the function
        def step(_: Any, closure: Any = None, **kwargs: Any) -> Any:
            args = () if closure is None else (closure,)
            record = TorchUpdate(optimizer, real, args, kwargs)
            self._take(record)
            optimizer.of._opt_called = True  # schedulers of torch check this
            return record.result

        return MethodType(self.reporting(step), optimizer.of)  # a scheduler wraps its `__func__`

    def _noting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        note = self.reporting(self._note)

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = real(*args, **kwargs)
            note(loss, args, kwargs)
            return loss

        return compute_loss

    def _note(self, loss: Any, args: Any, kwargs: Any) -> None:
        """Record the result of `compute_loss(*args, **kwargs)`."""
        if loss is not None:
            is_tensor = isinstance(loss, torch.Tensor)
            self.losses.append(loss if is_tensor else keras.ops.convert_to_tensor(loss))
            self._predictions.append(predicted(args, kwargs))

    def _take(self, record: Update) -> None:
        if record.is_immediate:  # its gradients are known only afterwards
            self.on_update(record)
            self.records.append(record)
        else:
            self.records.append(record)
            self.on_update(record)


class Compiled(Intercept):
    """A body compiled by `torch.compile`, as Keras does with `jit_compile=True`, and what it calls.

    Torch traces the Python code of a step, runs untraceable parts eagerly, and compiles again
    whenever a traced value has changed. So the replacements are created once, and
    work for the host (storing a loss, computing the verdict) is excluded from the trace. It runs
    between the backward pass and the update, where torch splits the step anyway. The update of a
    Keras optimizer is compiled separately. Updates of torch optimizers run eagerly, and so does
    Keras' `LossScaleOptimizer`, which names an operation differently in each step and would be
    compiled each time.

    Args:
        body: the step.
        model, optimizers: as for `Intercept`.
    """

    def __init__(self, body: Callable[..., Any], model: Any, optimizers: Iterable[Any]):
        super().__init__(model, optimizers)
        self.body = torch.compile(body)

    def reporting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        excluded: Callable[..., Any] = torch.compiler.disable(function)
        return excluded

    def update_of(self, optimizer: Any, real: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(real)
        return real if keras_optimizers.is_loss_scaled(optimizer) else compiled


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that `torch.compile` received, or the function itself if it is not
    compiled.

    Only a private attribute of torch has it. A compiled function cannot be inspected while it runs,
    so it is compiled again.
    """
    given: Callable[..., Any] = getattr(function, "_torchdynamo_orig_callable", function)
    return given
