"""Updates of a step on torch, by a Keras or a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import torch

from keras_nanguard._backends.torch.optimizers import settings_of, slots_of
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.torch_tensors import local

HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Attributes of a torch optimizer that have the hooks of its updates; names private to torch."""


class Update:
    """One call of an update.

    Attributes:
        pairs: each gradient with the variable that the update will write; it has a `path`.
        evaluates: whether it evaluates the loss itself, so that its gradients are known only after
            it.
        has_hooks: whether it calls the user's code, which may write other tensors.
        of_torch: the optimizer of torch that updates, or `None`.
    """

    evaluates = has_hooks = False
    of_torch: Any = None
    pairs: list[tuple[Any, Any]]

    def __init__(self, optimizer: Any, call: Callable[[], Any]):
        self.optimizer, self._call, self._grad_mode = optimizer, call, torch.is_grad_enabled()

    def written(self) -> list[Any]:
        """Return every tensor that the update writes."""
        updated = [*(variable for _, variable in self.pairs), *self.optimizer.variables]
        return list(map(keras_variables.stored, updated))

    def build(self) -> None:
        """Build the optimizer as the update itself would."""

    def run(self) -> tuple[Any, Sequence[tuple[Any, Any]]]:
        """Run the update. Return its result, and the tensors that it has created outside of Keras,
        each with its first value.
        """
        with torch.set_grad_enabled(self._grad_mode):  # a replay runs it after the step
            return self._call(), ()


class KerasUpdate(Update):
    """One call `apply(grads)` or `apply(grads, variables)` of a Keras optimizer."""

    def __init__(self, optimizer: Any, apply: Callable[..., Any], grads: Any, *variables: Any):
        super().__init__(optimizer, partial(apply, grads, *variables))
        self._variables = variables[0] if variables else keras_optimizers.trained_by(optimizer)
        self.pairs = [(g, v) for g, v in zip(grads, self._variables) if g is not None]

    def written(self) -> list[Any]:
        trained = keras_optimizers.trained_by(self.optimizer)  # an average may write all of them
        return [*map(keras_variables.stored, trained), *super().written()]

    def build(self) -> None:
        optimizer = self.optimizer
        if self._variables and not optimizer.built:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(self._variables)
            optimizer.built = True  # where `build` leaves that to `apply`


class TorchUpdate(Update):
    """One call of `step` of a `torch.optim.Optimizer`, given by its adapter. It evaluates the loss
    if it has a closure.
    """

    def __init__(self, optimizer: Any, call: Callable[[], Any], evaluates: bool):
        super().__init__(optimizer, call)
        self.of_torch, self.evaluates = optimizer.of, evaluates
        self.has_hooks = any(vars(self.of_torch).get(name) for name in HOOKS)
        self._read()
        if evaluates:  # it computes the gradients of all of them
            self.pairs = [(None, optimizer.variable_of(p)) for p, _ in self._grads]

    def written(self) -> list[Any]:
        return [*(variable.value for _, variable in self.pairs), *self.optimizer.slots]

    def _read(self) -> None:
        self._grads = [(p, p.grad) for p in self.optimizer.parameters]
        written = [(p, g) for p, g in self._grads if g is not None]
        self.pairs = [(local(g), self.optimizer.variable_of(p)) for p, g in written]

    def run(self) -> tuple[Any, Sequence[tuple[Any, Any]]]:
        """Step with the gradients of the original call, which a replay may have dropped since, or
        with its closure.
        """
        before = {p: set(slots) for p, slots in slots_of(self.of_torch)}
        settings = settings_of(self.of_torch.param_groups)
        if not self.evaluates:
            for p, grad in self._grads:
                if p.grad is not grad:
                    p.grad = grad
            if self.optimizer.global_clipnorm:
                written = [p for p, g in self._grads if g is not None]
                torch.nn.utils.clip_grad_norm_(written, self.optimizer.global_clipnorm)
        result, _ = super().run()
        if self.evaluates:
            self._read()
        return result, self.optimizer.created_since(before, settings)
