"""The same step as it was compiled by JAX: what an eager replay does not show shows here, by site."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from keras_nanguard._backends.jax.outputs import LogOutputs
from keras_nanguard._backends.jax.step import Transaction
from keras_nanguard._backends.shared.replay import ReplayableStep, ReplayResult
from keras_nanguard._keras.jax_trainer import by_part, variables
from keras_nanguard._keras.train_state import TrainState

__all__ = ["MODES", "is_compiled", "mode_of", "run_compiled"]

MODES = ("eager", "graph", "xla")
"""The modes in which a step can be run again: JAX compiles with XLA whatever is asked for but `"eager"`."""


def mode_of(transaction: Any, model: Any) -> str:
    """Return the mode in which a guarded step runs."""
    if transaction.jit:
        return "xla"
    return "eager" if getattr(model, "run_eagerly", False) else "graph"


def is_compiled(step: ReplayableStep) -> bool:
    """Whether the step that training has compiled can be run with other values: no run of it has to be compiled anew then."""
    return hasattr(getattr(step.body, "__self__", None), "judged")


def run_compiled(step: ReplayableStep, args: Sequence[Any], jit: bool) -> ReplayResult:
    """Run a step once, compiled, and forget it; returns what it computed.

    Args:
        step: the step; its body is that of a transaction on JAX, or `body_of` its model.
        args: its arguments.
        jit: compile it, as JAX always does.
    """
    transaction: Any = getattr(step.body, "__self__", None)
    if not hasattr(transaction, "judged"):
        transaction = _of_model(step)
    try:
        verdict = transaction.judged(*args)
    except Exception as error:  # noqa: BLE001  whatever the user's step raises is evidence, not a crash
        return ReplayResult(error=f"{type(error).__name__}: {error}")
    sites = {"loss": verdict.loss, "statistics": verdict.statistics, "gradients": verdict.gradients}
    first = next((site for site, number in sites.items() if not math.isfinite(number)), "")
    return ReplayResult(first=first, loss=verdict.loss, norm=verdict.gradient_norm)


def _of_model(step: ReplayableStep) -> Transaction:
    """Return the transaction that guards the train step of a model."""
    model = step.model
    transaction = Transaction(
        model.train_step,
        lambda: TrainState.of(model, step.optimizers),
        lambda: variables(model),
        outputs=LogOutputs(model),
        model=model,
        jit=True,
    )
    transaction.tolerated = set(step.tolerated)
    transaction.adopt(tuple([v.value for v in part] for part in by_part(model)))
    return transaction
