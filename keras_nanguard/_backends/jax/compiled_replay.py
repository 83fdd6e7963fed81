"""Replays a step in its compiled form, and finds the first bad site."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from keras_nanguard._backends.jax.outputs import LogOutputs
from keras_nanguard._backends.jax.step import Transaction
from keras_nanguard._backends.shared.replay import ReplayableStep, ReplayResult
from keras_nanguard._keras.jax_trainer import by_part, variables
from keras_nanguard._keras.train_state import TrainState

__all__ = ["MODES", "run_compiled"]

MODES = ("eager", "graph", "xla")
"""The modes in which a step can be replayed. JAX compiles all but `"eager"` with XLA."""


def run_compiled(step: ReplayableStep, args: Sequence[Any], jit: bool) -> ReplayResult:
    """Run a step once, compiled, without side effects; return its result.

    Args:
        step: the step; if it has no transaction, it is guarded as the train step of its model.
        args: its arguments.
        jit: compile it, as JAX always does.
    """
    judged = step.judged or _of_model(step).judged
    try:
        verdict = judged(*args)
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
