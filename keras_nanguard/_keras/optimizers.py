"""Keras' optimizers: which a model has, what each of them updates and keeps, its learning rate and its loss scale.

Names private to Keras that are used here, each because no public way exists:

- ``Optimizer._get_current_learning_rate()``: the rate of this step whether it is a number, a schedule or a callable;
  the public property hands out the variable itself where the rate is plain.
- ``Optimizer._learning_rate``: the rate as it was given; the public property hides which of them it is.
- ``Optimizer._trainable_variables``, ``Optimizer._model_variables_moving_average``: what an optimizer was built for, and the
  averages that it keeps of that.
- ``LossScaleOptimizer.inner_optimizer`` is public; ``dynamic_scale`` and ``step_counter`` are public but undocumented.

``tests/keras_internals/test_internals.py`` fails when a release of Keras takes one of them away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_nanguard._keras import layers as keras_layers
from keras_nanguard._keras import native_variables
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._keras.overrides import Overrides

__all__ = [
    *("averages_of", "find_optimizers", "fresh_like", "inner", "is_loss_scaled", "know_twins", "learning_rate"),
    *("rate_before", "rate_variable", "scales_of", "set_rate", "trained_by"),
]


def inner(optimizer: Any) -> Any:
    """Return the optimizer that updates the weights: the wrapped one of a `LossScaleOptimizer`, else itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def trained_by(optimizer: Any) -> list[Any]:
    """Return the variables that the optimizer was built to update; a list that only its private attribute tells."""
    return [native_variables.as_keras(v) for v in getattr(inner(optimizer), "_trainable_variables", ())]


def averages_of(optimizer: Any) -> list[tuple[Any, Any]]:
    """Return `(average, weight)` of each moving average of a weight that the optimizer keeps; only a private list tells."""
    return list(zip(getattr(inner(optimizer), "_model_variables_moving_average", ()), trained_by(optimizer)))


def fresh_like(optimizer: Any) -> Any:
    """Return a new optimizer of the same configuration, built for the same variables."""
    fresh = type(optimizer).from_config(optimizer.get_config())
    fresh.build([native_variables.unwrapped(v) for v in trained_by(optimizer)])
    return fresh


def is_loss_scaled(optimizer: Any) -> bool:
    """Whether the optimizer scales the loss dynamically."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def find_optimizers(model: Any) -> list[Any]:
    """Return every optimizer that a step of this model may use, outermost wrappers only.

    These are `model.optimizer` and every optimizer that is an attribute of the model, or an element of a list, tuple or
    dict that is one (a GAN keeps its two there, and leaves `model.optimizer` unused).
    """
    found: dict[int, Any] = {}
    for value in [getattr(model, "optimizer", None), *vars(model).values()]:
        for item in keras_variables.flat(value):
            if isinstance(item, keras.optimizers.Optimizer):
                found[id(item)] = item
    wrapped = {id(inner(item)) for item in found.values() if inner(item) is not item}
    return [item for key, item in found.items() if key not in wrapped]


def learning_rate(optimizer: Any) -> float:
    """Return the rate that the optimizer's next step uses, whether it is a number, a schedule or a callable."""
    return float(keras.ops.convert_to_numpy(inner(optimizer)._get_current_learning_rate()))


def rate_variable(optimizer: Any) -> Any:
    """Return the variable that holds a plain learning rate; a schedule or a callable has none.

    ``Optimizer._learning_rate`` is private; the public property calls a schedule and hides which of them it is.
    """
    given = inner(optimizer)._learning_rate
    return given if hasattr(given, "assign") else None


def set_rate(optimizer: Any, changed: Callable[[Callable[[], Any]], Any], overrides: Overrides) -> None:
    """Let an optimizer go by `changed(rate)` in place of its learning rate, where `rate()` returns that.

    ``Optimizer._get_current_learning_rate`` is private, and the only place through which a step reads schedules, too.
    """
    real = inner(optimizer)._get_current_learning_rate
    overrides.set(inner(optimizer), "_get_current_learning_rate", lambda: changed(real))


def scales_of(optimizer: Any) -> tuple[Any, ...]:
    """Return the variables of the optimizer's loss scale; none where it has none."""
    return (optimizer.dynamic_scale, optimizer.step_counter) if is_loss_scaled(optimizer) and optimizer.built else ()


def know_twins(optimizer: Any, twins: list[tuple[Any, Any]], undo: list[tuple[Any, str, Any]]) -> None:
    """Let an optimizer take the twin of a variable for the variable itself.

    `Optimizer._trainable_variables_indices` is private; it knows the variables by a key of the backend's own variables,
    and `apply` refuses any other.
    """
    for part in {id(o): o for o in (optimizer, inner(optimizer))}.values():
        known = getattr(part, "_trainable_variables_indices", None)
        if isinstance(known, dict):
            keys = [(part._var_key(native_variables.unwrapped(old)), part._var_key(twin)) for old, twin in twins]
            more = {twin: known[old] for old, twin in keys if old in known}
            keras_layers.exchange(part, "_trainable_variables_indices", {**known, **more}, undo)


def rate_before(optimizer: Any) -> float:
    """Return the rate that the last step used: under a schedule the one at the iteration before this.

    `Optimizer._learning_rate` is private; the public property evaluates it at the iteration that comes next.
    """
    optimizer = inner(optimizer)
    schedule = getattr(optimizer, "_learning_rate", None)
    if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
        return learning_rate(optimizer)
    return float(keras.ops.convert_to_numpy(schedule(optimizer.iterations.value - 1)))
