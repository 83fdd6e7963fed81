"""What is said of a policy before the first step: what in it has no effect in this run, a line each."""

from __future__ import annotations

from typing import Any

from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.policy import Policy
from keras_nanguard._policy.warnings import GuardOptions, ModelNames, warnings_about

__all__ = ["model_names", "policy_lines"]


def policy_lines(policy: Policy, setting: GuardOptions, model: Any, optimizers: Any = None) -> tuple[str, ...]:
    """Return a line for each rule and setting of a policy that has no effect with this model and this guard.

    Args:
        policy: the policy.
        setting: what the guard has.
        model: the model that is about to be trained; one that is not built says nothing of itself yet.
        optimizers: the optimizers of a loop with no trainer; those of the model by default.
    """
    names = model_names(model, optimizers) if getattr(model, "built", False) else None
    return tuple(f"NanGuard: {line}" for line in warnings_about(policy, names, setting))


def model_names(model: Any, optimizers: Any = None) -> ModelNames:
    """Return the Keras paths of a built model; those of its optimizers as far as they are built."""
    train_state = TrainState.of(model, optimizers)
    variables = (*train_state.trainable, *train_state.statistics, *train_state.slots)
    name = str(getattr(model, "name", "")) or type(model).__name__
    return ModelNames(name, tuple(str(variable.path) for variable in variables))
