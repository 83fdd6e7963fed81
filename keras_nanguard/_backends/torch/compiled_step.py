"""A step compiled by `torch.compile`, as Keras does with `jit_compile=True`.

Torch traces the Python code of a step, runs untraceable parts eagerly, and compiles again whenever
a traced value has changed. So the replacements of optimizers and loss are created once, not in each
step, and work for the host (storing a loss, computing the verdict) is excluded from the trace. It
runs between the backward pass and the update, where torch splits the step anyway. The update of a
Keras optimizer is compiled separately. Updates of torch optimizers run eagerly, and so does Keras'
`LossScaleOptimizer`, which names an operation differently in each step and would be compiled each
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from keras_nanguard._backends.torch.intercept import StandIns
from keras_nanguard._keras import optimizers as keras_optimizers

__all__ = ["Compiled", "uncompiled"]


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that `torch.compile` received, or the function itself if it is not
    compiled.

    Only a private attribute of torch has it. A compiled function cannot be inspected while it runs,
    so it is compiled again.
    """
    given: Callable[..., Any] = getattr(function, "_torchdynamo_orig_callable", function)
    return given


class Compiled:
    """The compiled body of a step, with its replacements.

    Args:
        body: the step.
        model: the model whose `compute_loss` returns the loss, or `None`.
        optimizers: the intercepted optimizers.
    """

    def __init__(self, body: Callable[..., Any], model: Any, optimizers: Iterable[Any]):
        self.body = torch.compile(body)
        self.stand_ins = StandIns(model, optimizers, torch.compiler.disable, _update)


def _update(optimizer: Any) -> Callable[..., Any]:
    scaled = keras_optimizers.is_loss_scaled(optimizer)
    update: Callable[..., Any] = optimizer.apply if scaled else torch.compile(optimizer.apply)
    return update
