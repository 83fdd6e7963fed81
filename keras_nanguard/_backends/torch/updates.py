"""Updates of a step on torch, by a Keras or a torch optimizer, to run now or later.

A deferred update must have the same effect as an immediate one. So a record holds everything that
the call depended on and that may change meanwhile: the gradients, whether autograd was on, and the
rates of a torch optimizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import torch

from keras_nanguard._backends.torch.modules import TensorVariable, first_value, settings_of
from keras_nanguard._backends.torch.tensors import local, local_parts
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables


class Update:
    """One call of an update.

    Attributes:
        optimizer: the optimizer.
        gradients: the gradients.
        tensors: the variables that it will write, one for each gradient, without slots.
        is_immediate: whether it cannot be deferred, because it evaluates the loss itself.
    """

    is_immediate = False
    optimizer: Any
    gradients: list[Any]
    tensors: list[Any]

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """`(gradient, variable)` of each gradient; the variable has a `path`."""
        raise NotImplementedError

    def state(self) -> list[Any]:
        """Return every tensor that the update reads and writes, or writes."""
        raise NotImplementedError

    def held(self) -> Callable[[], None] | None:
        """Return a function that restores the optimizer's state outside of tensors, or `None` if
        there is no such state.
        """
        return None

    def build(self) -> bool:
        """Build the optimizer as the update itself would; return whether it was not built yet."""
        return False

    def run(self) -> None:
        """Run the update."""
        with torch.set_grad_enabled(self._grad):
            self._call()

    def created(self) -> list[tuple[Any, Any]]:
        """Return the tensors that the update has created outside of Keras, each with its first
        value.
        """
        return []

    def _call(self) -> None:
        raise NotImplementedError


class KerasUpdate(Update):
    """One call of `apply` of a Keras optimizer.

    Args:
        optimizer: the optimizer.
        real: runs the update.
        grads: the gradients.
        variables: the variables, or `None` for those of the optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        real: Callable[..., Any],
        grads: list[Any],
        variables: Sequence[Any] | None,
    ):
        super().__init__()
        self.optimizer, self.real, self.grads, self.given = optimizer, real, grads, variables
        asked = variables if variables is not None else keras_optimizers.trained_by(optimizer)
        self._variables = [v for g, v in zip(grads, asked) if g is not None]
        self.gradients = [g for g, _ in zip(grads, asked) if g is not None]
        self.tensors = [keras_variables.stored(v) for v in self._variables]

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        return list(zip(self.gradients, self._variables))

    def state(self) -> list[Any]:
        optimizer, variables = self.optimizer, self._variables
        if optimizer.built:  # an average of the weights may write all of them
            variables = [*keras_optimizers.trained_by(optimizer), *optimizer.variables]
        tensors = [*map(keras_variables.stored, variables), *self.tensors]
        return list({id(tensor): tensor for tensor in tensors}.values())

    def build(self) -> bool:
        optimizer = self.optimizer
        if optimizer.built or not self.given:
            return False
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(self.given)
        optimizer.built = True  # where `build` leaves that to `apply`
        return True

    def _call(self) -> None:
        self.real(self.grads) if self.given is None else self.real(self.grads, self.given)


class TorchUpdate(Update):
    """One call of `step` of a `torch.optim.Optimizer`.

    Args:
        optimizer: the adapter of the optimizer.
        real: runs the update.
        args, kwargs: the arguments: none, or a closure that evaluates the loss.

    Attributes:
        result: what the update has returned.
    """

    def __init__(
        self,
        optimizer: Any,
        real: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ):
        super().__init__()
        self.optimizer, self.torch, self.real = optimizer, optimizer.of, real
        self._args, self._kwargs, self.result = args, kwargs or {}, None
        self.is_immediate = bool(args or kwargs)
        self.groups = settings_of(self.torch.param_groups)
        self._read_gradients()
        if self.is_immediate:  # it computes the gradients of all of them
            self.tensors = local_parts([p for p, _ in self.grads])

    def _read_gradients(self) -> None:
        groups = self.torch.param_groups
        self.grads = [(p, p.grad) for group in groups for p in group["params"]]
        self.gradients = local_parts([g for _, g in self.grads if g is not None])
        self.tensors = local_parts([p for p, g in self.grads if g is not None])

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        variables = [TensorVariable(p, self.optimizer.path_of(p)) for p in self.tensors]
        return list(zip(self.gradients, variables))

    def state(self) -> list[Any]:
        slots = [slot for slots in self.torch.state.values() for slot in slots.values()]
        return [*self.tensors, *local_parts([s for s in slots if isinstance(s, torch.Tensor)])]

    def held(self) -> Callable[[], None]:
        """All state of the optimizer but the values of its tensors, also entries that do not exist
        yet.
        """
        restore: Callable[[], None] = self.optimizer.held(copies=False)
        return restore

    def created(self) -> list[tuple[Any, Any]]:
        """Return the slots that the update has created, each with its first value."""
        found = []
        known = itertools.chain(self._names, itertools.repeat(()))
        for slots, names in zip(self.torch.state.values(), known):
            if len(slots) != len(names):
                new = {k: local(t) for k, t in slots.items() if k not in names}
                tensors = {k: t for k, t in new.items() if isinstance(t, torch.Tensor)}
                found += [(t, first_value(k, t)) for k, t in tensors.items()]
        return found

    def _call(self) -> None:
        """Step with the gradients and rates of the original call, or with its closure."""
        self._names = [tuple(slots) for slots in self.torch.state.values()]  # slots by parameter
        if self.is_immediate:
            self.result = self.real(*self._args, **self._kwargs)
            self._read_gradients()
            return
        now = [(p, p.grad) for p, _ in self.grads]
        groups = settings_of(self.torch.param_groups)
        self._place(self.grads, self.groups)
        try:
            if self.optimizer.global_clipnorm:
                written = [p for p, g in self.grads if g is not None]
                torch.nn.utils.clip_grad_norm_(written, self.optimizer.global_clipnorm)
            self.real()
        finally:
            self._place(now, groups)

    def _place(self, grads: Any, groups: Any) -> None:
        for p, grad in grads:
            if p.grad is not grad:
                p.grad = grad
        for group, values in zip(self.torch.param_groups, groups):
            group.update(values)
