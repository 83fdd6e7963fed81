"""What is said of a policy before the first step: what in it has no effect in this run, a line each."""

from __future__ import annotations

from typing import Any

from keras_nanguard._core import finiteness
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.no_effect import GuardOptions, ModelNames, warnings_about
from keras_nanguard._policy.policy import Policy

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
    """Return the Keras paths of a built model, by site; slots only where every optimizer is built."""
    train_state = TrainState.of(model, optimizers)
    trained, statistics, slots = (
        tuple(str(v.path) for v in variables) for variables in (train_state.trainable, train_state.statistics, train_state.slots)
    )
    scaled = tuple("loss_scale" for optimizer in train_state.optimizers if keras_optimizers.is_loss_scaled(optimizer))
    paths = {"weights": trained, "gradients": trained, "statistics": statistics, "loss_scale": scaled}
    if all(getattr(optimizer, "built", False) for optimizer in train_state.optimizers):
        floats = any(finiteness.is_float(v.dtype) for v in train_state.slots)
        paths |= {"slots": slots if floats else (), "state": (*trained, *statistics, *slots)}
    return ModelNames(str(getattr(model, "name", "")) or type(model).__name__, paths)
