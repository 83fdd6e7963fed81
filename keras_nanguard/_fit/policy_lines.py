"""Warnings before the first step about parts of a policy without effect in this run."""

from __future__ import annotations

from typing import Any

from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.policy import Policy
from keras_nanguard._policy.warnings import GuardOptions, ModelNames, warnings_about

__all__ = ["model_names", "policy_lines"]


def policy_lines(
    policy: Policy, setting: GuardOptions, model: Any, optimizers: Any = None
) -> tuple[str, ...]:
    """Return a line for each rule and setting of a policy without effect for this model and guard.

    Args:
        policy: the policy.
        setting: the options of the guard.
        model: the model to be trained; an unbuilt one has no names yet.
        optimizers: the optimizers of a loop without a trainer; by default those of the model.
    """
    names = model_names(model, optimizers) if getattr(model, "built", False) else None
    return tuple(f"NanGuard: {line}" for line in warnings_about(policy, names, setting))


def model_names(model: Any, optimizers: Any = None) -> ModelNames:
    """Return the Keras paths of a built model, including built optimizers."""
    train_state = TrainState.of(model, optimizers)
    variables = (*train_state.trainable, *train_state.statistics, *train_state.slots)
    name = str(getattr(model, "name", "")) or type(model).__name__
    return ModelNames(name, tuple(str(variable.path) for variable in variables))
