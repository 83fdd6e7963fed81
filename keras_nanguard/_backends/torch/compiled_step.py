"""A step that `torch.compile` has compiled, as Keras does with `jit_compile=True`.

Torch traces the Python of a step, runs what it cannot trace as it is, and compiles anew wherever something that it has
traced is another. So what stands in for optimizers and loss is made once, not for each step, and what only the host can
do (note a loss, compute the verdict) is kept out of the trace: it falls between the backward pass and the update,
where torch parts the step anyway. The update of a Keras optimizer is compiled by itself. One of torch's runs as it is, and
so does Keras' `LossScaleOptimizer`, which gives an operation a new name in each step and would be compiled for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from keras_nanguard._backends.torch.intercept import StandIns
from keras_nanguard._keras import optimizers as keras_optimizers

__all__ = ["Compiled", "uncompiled"]


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what `torch.compile` was given to make this function, the function itself where it did not.

    Only a name private to torch holds it: a compiled function cannot be seen into while it runs, so it is compiled anew.
    """
    given: Callable[..., Any] = getattr(function, "_torchdynamo_orig_callable", function)
    return given


class Compiled:
    """The body of a step, compiled, with its stand-ins.

    Args:
        body: the step.
        model: the model whose `compute_loss` returns the loss, or `None`.
        optimizers: the optimizers to stand in for.
    """

    def __init__(self, body: Callable[..., Any], model: Any, optimizers: Iterable[Any]):
        self.body = torch.compile(body)
        self.stand_ins = StandIns(model, optimizers, torch.compiler.disable, _update)


def _update(optimizer: Any) -> Callable[..., Any]:
    update: Callable[..., Any] = optimizer.apply if keras_optimizers.is_loss_scaled(optimizer) else torch.compile(optimizer.apply)
    return update
