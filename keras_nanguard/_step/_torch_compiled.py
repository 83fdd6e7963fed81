"""A step that `torch.compile` has compiled, as Keras does with `jit_compile=True`.

Torch traces the Python of a step, runs what it cannot trace as it is, and compiles anew wherever something that it has
traced is another. So what stands in for optimizers and loss is made once, not for each step, and what only the host can
do (take a loss down, give the verdict) is kept out of the trace: it falls between the backward pass and the update,
where torch parts the step anyway. The update of a Keras optimizer is compiled by itself. One of torch's runs as it is, and
so does Keras' `LossScaleOptimizer`, which gives an operation a new name in each step and would be compiled for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from keras_nanguard import _state
from keras_nanguard._step._torch_intercept import Intercept

__all__ = ["Compiled", "uncompiled"]


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what `torch.compile` was given to make this function, the function itself where it did not.

    Only a name private to torch tells: a compiled function cannot be seen into while it runs, so it is compiled anew.
    """
    given: Callable[..., Any] = getattr(function, "_torchdynamo_orig_callable", function)
    return given


class Compiled:
    """The body of a step, compiled, with its stand-ins.

    Args:
        body: the step.
        model: the model whose `compute_loss` tells the loss, or `None`.
        optimizers: the optimizers to stand in for.

    Attributes:
        seen: the interception of the step that runs.
        stand_ins: `(object, attribute, function)` of each of them.
    """

    def __init__(self, body: Callable[..., Any], model: Any, optimizers: Iterable[Any]):
        self.body = torch.compile(body)
        self.seen: Intercept | None = None
        self.stand_ins: list[tuple[Any, str, Any]] = []
        for optimizer in optimizers:
            of_torch: Any = getattr(optimizer, "of", None)
            if of_torch is not None:
                self.stand_ins.append((of_torch, "step", self._stepper(optimizer, of_torch.step)))
            else:
                update = optimizer.apply if _state.is_loss_scaled(optimizer) else torch.compile(optimizer.apply)
                self.stand_ins.append((optimizer, "apply", self._applier(optimizer, update)))
        if hasattr(model, "compute_loss"):
            self.stand_ins.append((model, "compute_loss", self._noting(model.compute_loss)))

    def _applier(self, optimizer: Any, real: Callable[..., Any]) -> Callable[..., Any]:
        def apply(grads: Iterable[Any], trainable_variables: Any = None) -> Any:
            assert self.seen is not None
            self.seen.take(optimizer, real, grads, trainable_variables)

        return _untraced(apply)

    def _stepper(self, optimizer: Any, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)  # a scheduler of torch's marks the function
        def step(closure: Any = None, **kwargs: Any) -> Any:
            assert self.seen is not None
            return self.seen.take_step(optimizer, real, closure, kwargs)

        return _untraced(step)

    def _noting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def noted(loss: Any, args: Any, kwargs: Any) -> None:
            assert self.seen is not None
            self.seen.note(loss, args, kwargs)

        note = _untraced(noted)

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            loss = real(*args, **kwargs)
            note(loss, args, kwargs)
            return loss

        return compute_loss


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as one that torch calls from a trace instead of tracing it."""
    untraced: Callable[..., Any] = torch.compiler.disable(function)
    return untraced
