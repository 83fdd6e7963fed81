"""Optimizers: those of a model, the variables and averages of each, its learning rate, its loss
scale, and its second moments.

Private names of Keras:

- ``Optimizer._get_current_learning_rate()``: the rate of this step, be it a number, a schedule or a
  callable; every step reads the rate through it. The public property returns the variable itself if
  the rate is a number.
- ``Optimizer._learning_rate``: the rate that the user passed; the public property does not
  distinguish a number, a schedule and a callable, and evaluates a schedule at the next iteration.
- ``Optimizer._iterations``: the steps that a schedule sees; the public property divides them if
  gradients are accumulated.
- ``Optimizer._trainable_variables``, ``Optimizer._model_variables_moving_average``: the variables
  that an optimizer was built for, and their moving averages.
- "Unknown variable": how the error begins that an optimizer raises for any other variable.
- ``Optimizer._distribution_strategy``: the strategy in which an optimizer was created.
- The lists of second moments of each optimizer (``_velocities``, ``_u``, ``_accumulators``,
  ``_accumulated_grads``), one for each variable that it trains.
- ``LossScaleOptimizer.inner_optimizer`` is public; ``dynamic_scale`` and ``step_counter`` are
  public but undocumented.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import keras

from keras_nanguard._core.variable_names import is_second_moment
from keras_nanguard._keras import (
    arrays as keras_arrays,
    variables as keras_variables,
)
from keras_nanguard._keras.layers import held_by
from keras_nanguard._keras.overrides import Overrides


def inner(optimizer: Any) -> Any:
    """Return the inner optimizer of a `LossScaleOptimizer`, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def class_of_keras(optimizer: Any) -> str:
    """Return the name of the class of an optimizer, the inner one; `""` if it is a custom class."""
    own = type(inner(optimizer))
    return own.__name__ if own.__module__.startswith("keras.") else ""


def trained_by(optimizer: Any) -> list[Any]:
    """Return the variables that the optimizer was built to update."""
    return [*map(keras_variables.as_keras, getattr(inner(optimizer), "_trainable_variables", ()))]


def rejects_variable(error: ValueError) -> bool:
    """Whether an optimizer raised this error for a variable that it was not built to update."""
    return "Unknown variable" in str(error)


def first_values(optimizer: Any) -> dict[int, Any]:
    """Return by the `id` of each slot the variable with its first value: the slot of a new
    optimizer of the same configuration, and for a moving average the weight.

    A new one has other slots if its class has a setting that its configuration lacks. Then no first
    value is known."""
    trained = trained_by(optimizer)
    averages = zip(getattr(inner(optimizer), "_model_variables_moving_average", ()), trained)
    fresh = type(optimizer).from_config(optimizer.get_config())
    fresh.build([keras_variables.unwrapped(v) for v in trained])
    slots, first = optimizer.variables, fresh.variables
    pairs = zip(slots, first) if len(slots) == len(first) else ()
    return {id(slot): value for slot, value in (*pairs, *averages)}


def is_loss_scaled(optimizer: Any) -> bool:
    """Whether the optimizer scales the loss dynamically."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def find_optimizers(model: Any) -> list[Any]:
    """Return the optimizers of a model, outermost wrappers only.

    These are `model.optimizer` and every optimizer that is an attribute of the model, or an element
    of a list, tuple or dict attribute (a GAN has two of them, and leaves `model.optimizer` unused).
    """
    return outermost((*keras_variables.flat(getattr(model, "optimizer", None)), *held_by([model])))


def outermost(items: Iterable[Any]) -> list[Any]:
    """Return the optimizers among these objects, each once, without those that others wrap."""
    optimizers = (item for item in items if isinstance(item, keras.optimizers.Optimizer))
    found = keras_variables.unique(optimizers)
    wrapped = {id(inner(item)) for item in found if inner(item) is not item}
    return [item for item in found if id(item) not in wrapped]


_USED: WeakKeyDictionary[Any, WeakSet[Any]] = WeakKeyDictionary()
"""For each model the optimizers that belong to its layers, such as `gan.critic.optimizer`, and with
which a step of the model has updated.
"""


def note_use(model: Any, optimizer: Any) -> bool:
    """Note that a step of a model uses an optimizer that belongs to one of its layers; return
    whether this was unknown.
    """
    used = _USED.setdefault(model, WeakSet())
    is_new = optimizer not in used
    used.add(optimizer)
    return is_new


def is_used(model: Any, optimizer: Any) -> bool:
    """Whether a step of a model has used an optimizer that belongs to one of its layers. If steps
    are functions of the state, its slots are variables of the model.
    """
    listed = set(map(id, model.non_trainable_variables))
    return optimizer in _USED.get(model, ()) or any(id(v) in listed for v in optimizer.variables)


def given_rate(optimizer: Any) -> Any:
    """Return the learning rate that was passed: a variable, a schedule or a callable."""
    return getattr(optimizer, "_learning_rate", None)


def schedule_of(optimizer: Any) -> Any:
    """Return the learning rate schedule of an optimizer, `None` if it has none."""
    given = given_rate(inner(optimizer))
    return given if isinstance(given, keras.optimizers.schedules.LearningRateSchedule) else None


def custom_schedules(optimizers: Iterable[Any]) -> list[Any]:
    """Return the schedules of optimizers that are of custom classes: a call may change them."""
    schedules = filter(None, map(schedule_of, optimizers))
    return [
        schedule for schedule in schedules if not type(schedule).__module__.startswith("keras.")
    ]


def passed(optimizer: Any) -> tuple[Any, Any]:
    """Return the optimizer, without an adapter, and its rate as they were passed."""
    own = inner(optimizer)
    rate = given_rate(own)
    return getattr(own, "of", own), getattr(rate, "of", rate)


def learning_rate(optimizer: Any) -> float:
    """Return the rate of the optimizer's next step, from a number, a schedule or a callable."""
    rate = inner(optimizer)._get_current_learning_rate()
    return float(keras_arrays.read_tensor(keras_variables.native(rate)))


def rate_variable(optimizer: Any) -> Any:
    """Return the variable of a rate that is a number; `None` for a schedule or a callable."""
    given = given_rate(inner(optimizer))
    return given if hasattr(given, "assign") else None


def rate_is_readable(optimizer: Any) -> bool:
    """Whether the rate is a number or an object, not a function: that may count its calls."""
    return any(held is not None for held in (schedule_of(optimizer), rate_variable(optimizer)))


def set_rate(
    optimizer: Any, changed: Callable[[Callable[[], Any]], Any], overrides: Overrides
) -> None:
    """Use `changed(rate)` as the learning rate, where `rate()` returns the original one."""
    real = inner(optimizer)._get_current_learning_rate
    overrides.set(inner(optimizer), "_get_current_learning_rate", lambda: changed(real))


def scales_of(optimizer: Any) -> tuple[Any, ...]:
    """Return the variables of the optimizer's loss scale, `()` if it has none."""
    has_scale = is_loss_scaled(optimizer) and optimizer.built
    return (optimizer.dynamic_scale, optimizer.step_counter) if has_scale else ()


def rate_before(optimizer: Any, ago: int = 1) -> float:
    """Return the rate of the last or an earlier step: without a schedule, the current one."""
    iteration = scheduled_iteration(optimizer, ago)
    return learning_rate(optimizer) if iteration is None else scheduled_rate(optimizer, iteration)


def iterations(optimizer: Any) -> Any:
    """Return the variable that counts the steps of an optimizer; a schedule reads it."""
    return inner(optimizer)._iterations


def scheduled_iteration(optimizer: Any, ago: int = 0) -> int | None:
    """Return the iteration of the next or an earlier step; `None` without a schedule."""
    if schedule_of(optimizer) is None:
        return None
    return max(int(keras_variables.read(iterations(optimizer))) - ago, 0)


def scheduled_rate(optimizer: Any, iteration: int) -> float:
    """Return the rate that the schedule of an optimizer gives at an iteration."""
    step = keras.ops.convert_to_tensor(iteration, dtype=iterations(optimizer).dtype)
    return float(keras_arrays.read_tensor(schedule_of(optimizer)(step)))


@contextmanager
def without_strategy(optimizers: Iterable[Any], default: Any) -> Iterator[None]:
    """Let optimizers update outside of the strategy in which they were created."""
    with Overrides() as overrides:
        for optimizer in map(inner, optimizers):
            if getattr(optimizer, "_distribution_strategy", default) is not default:
                overrides.set(optimizer, "_distribution_strategy", default)
        yield


def second_moments(optimizers: Iterable[Any]) -> list[Any]:
    """Return the slots that only squared gradients change; none for custom classes."""
    found: list[Any] = []
    for optimizer in optimizers:
        kind = class_of_keras(optimizer)
        found += [v for v in inner(optimizer).variables if is_second_moment(v.name, kind)]
    return found
