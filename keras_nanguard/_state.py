"""Anatomy of a model: which variables make up the train state, and what each of them is for.

The only file that knows Keras internals. Names private to Keras that are used here, each because no public way exists:

- ``Layer._flatten_layers()``: all layers at any depth; ``Model.layers`` stops at the first level.
- ``Optimizer._get_current_learning_rate()``: the rate of this step whether it is a number, a schedule or a callable;
  the public property hands out the variable itself where the rate is plain.
- ``keras.src.utils.io_utils.print_msg``: prints where Keras prints, to the screen or to the log.
- ``Optimizer._trainable_variables``, ``Optimizer._model_variables_moving_average``: what an optimizer was built for, and the
  averages that it keeps of that.
- ``Model._compile_config``: made anew by each ``compile``.
- ``LossScaleOptimizer.inner_optimizer`` is public; ``dynamic_scale`` and ``step_counter`` are public but undocumented.

``tests/test_keras_internals.py`` fails when a release of Keras takes one of them away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras.src.utils import io_utils

from keras_nanguard import _native, _probes, _processes

__all__ = [
    *("Anatomy", "as_built", "averages_of", "built_in", "find_optimizers", "fresh_like", "inner", "is_loss_scaled"),
    *("is_statistic", "layers_of", "learning_rate", "named_arrays", "print_line", "read", "savers"),
    *("scales_of", "seeds", "trained_by", "view", "write"),
]

FLOOR = 2.0**-14
"""Smallest loss scale that a refusal leaves behind: the smallest normal float16 number.

Below it a gradient of 1 is subnormal in float16, so a lower scale cannot save any step that this one does not.
"""


VARIABLE = keras.src.backend.Variable
"""Class of every variable of Keras' own. In Keras 3.6 `keras.Variable` is a class of its own, which no layer uses."""


def print_line(text: str) -> None:
    """Print a line the way Keras prints: on the screen, or into the log; of several processes the first one does."""
    if _processes.index() == 0:
        io_utils.print_msg(text)


def built_in(model: Any, anatomy: Anatomy) -> tuple[Any, ...]:
    """Return what a trace of a train step has built in: the call of `compile`, the optimizers, their rates, all variables.

    Which of them are trainable is no part of it: Keras goes on with the train function it has until `compile` is called.
    """
    rates = [getattr(inner(optimizer), "_learning_rate", None) for optimizer in anatomy.optimizers]
    return (compiled_as(model) or object(), *anatomy.optimizers, *rates, *sorted(anatomy.everything, key=id))


def compiled_as(model: Any) -> Any:
    """Return what the last call of `compile` has left, `None` where it was never called.

    `Model._compile_config` is private; `compile` makes a new one each time, and nothing public tells that it was called.
    """
    return getattr(model, "_compile_config", None)


def savers(callbacks: Iterable[Any]) -> list[tuple[Any, str]]:
    """Return `(callback, method)` of callbacks that save a model past `Model.save` and `Model.save_weights`.

    `OrbaxCheckpoint._save_checkpoint` is private; all of its saves go through it, and it reads the state by itself.
    """
    orbax = getattr(keras.callbacks, "OrbaxCheckpoint", None)
    return [(c, "_save_checkpoint") for c in callbacks if orbax is not None and isinstance(c, orbax)]


def layers_of(model: Any) -> list[Any]:
    """Return the model and all of its layers at any depth, in the order in which Keras lists them."""
    return list(model._flatten_layers(include_self=True, recursive=True))


def inner(optimizer: Any) -> Any:
    """Return the optimizer that updates the weights: the wrapped one of a `LossScaleOptimizer`, else itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def trained_by(optimizer: Any) -> list[Any]:
    """Return the variables that the optimizer was built to update; a list that only its private attribute tells."""
    return [_native.as_keras(v) for v in getattr(inner(optimizer), "_trainable_variables", ())]


@contextmanager
def as_built(model: Any, optimizers: Iterable[Any]) -> Iterator[None]:
    """Let those variables be trainable that the optimizers were built to update, and no others.

    Stock Keras goes on with the train function that it has where `trainable` is changed and `compile` is not called.
    """
    trained = {id(_native.unwrapped(v)) for o in optimizers if o.built for v in trained_by(o)}
    changed = [v for v in model.variables if trained and v.trainable != (id(v) in trained)]
    for variable in changed:
        variable.trainable = not variable.trainable
    try:
        yield
    finally:
        for variable in changed:
            variable.trainable = not variable.trainable


def averages_of(optimizer: Any) -> list[tuple[Any, Any]]:
    """Return `(average, weight)` of each moving average of a weight that the optimizer keeps; only a private list tells."""
    return list(zip(getattr(inner(optimizer), "_model_variables_moving_average", ()), trained_by(optimizer)))


def fresh_like(optimizer: Any) -> Any:
    """Return a new optimizer of the same configuration, built for the same variables."""
    fresh = type(optimizer).from_config(optimizer.get_config())
    fresh.build([_native.unwrapped(v) for v in trained_by(optimizer)])
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
        for item in _flat(value):
            if isinstance(item, keras.optimizers.Optimizer):
                found[id(item)] = item
    wrapped = {id(inner(item)) for item in found.values() if inner(item) is not item}
    return [item for key, item in found.items() if key not in wrapped]


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return iter((value,))
    return iter(value)


def _unique(variables: Iterable[Any]) -> list[Any]:
    return list({id(v): v for v in variables}.values())


@dataclass(frozen=True)
class Anatomy:
    """The whole train state of a model and its optimizers, by role.

    Attributes:
        trainable: weights that the optimizers update, those that are no part of the model included.
        other: every other variable of the model: BatchNorm statistics, frozen weights, seed generators, and the states
            of stateful RNNs, which stand in no list of Keras' own.
        metrics: variables of the loss tracker and of the metrics.
        slots: variables of the optimizers apart from rate and loss scale: moments, iterations, accumulators, EMA.
        scales: `(dynamic_scale, step_counter)` of each `LossScaleOptimizer`.
        rates: learning-rate variables of optimizers whose rate is a plain number.
        optimizers: the outermost optimizers.
        unlisted: what a step may write although it stands in no list of Keras' own: variables of the backend's own that
            a layer holds, and the generator that Keras falls back to where no seed is given.
    """

    trainable: tuple[Any, ...]
    other: tuple[Any, ...]
    metrics: tuple[Any, ...]
    slots: tuple[Any, ...]
    scales: tuple[tuple[Any, Any], ...]
    rates: tuple[Any, ...]
    optimizers: tuple[Any, ...]
    unlisted: tuple[Any, ...] = ()

    @classmethod
    def of(cls, model: Any, optimizers: Iterable[Any] | None = None) -> Anatomy:
        """Read the anatomy of a built model; optimizers that are not built yet contribute nothing."""
        optimizers = tuple(find_optimizers(model) if optimizers is None else optimizers)
        trainable = _unique([*model.trainable_variables, *(v for o in optimizers if o.built for v in trained_by(o))])
        states = [s for layer in layers_of(model) for s in _recurrent_states(layer)]
        other = _unique([*model.non_trainable_variables, *states])
        metrics = _unique(model.metrics_variables) if hasattr(model, "metrics_variables") else []
        scales = [(o.dynamic_scale, o.step_counter) for o in optimizers if is_loss_scaled(o) and o.built]
        rates = [r for o in optimizers if _is_variable(r := getattr(inner(o), "_learning_rate", None))]
        apart = {id(v) for v in [*rates, *(v for pair in scales for v in pair), *trainable]}
        apart |= {id(o._learning_rate) for o in optimizers if _is_variable(getattr(o, "_learning_rate", None))}
        slots = [v for o in optimizers for v in o.variables if id(v) not in apart]
        return cls(
            tuple(trainable),
            tuple(v for v in other if id(v) not in {id(t) for t in trainable}),
            tuple(metrics),
            tuple(_unique(slots)),
            tuple(scales),
            tuple(rates),
            optimizers,
            tuple(_unlisted(model)),
        )

    @property
    def statistics(self) -> tuple[Any, ...]:
        """The float variables among `other`."""
        return tuple(v for v in self.other if _probes.is_float(v.dtype))

    @property
    def constants(self) -> tuple[Any, ...]:
        """The float variables among `other` that are no running statistic: frozen weights, masks, "best so far" values.

        Such a variable may be infinite on purpose (a mask of -Inf), which is tolerated where it is so from the start.
        """
        return tuple(v for v in self.statistics if not is_statistic(v))

    @property
    def restorable(self) -> tuple[Any, ...]:
        """What a rollback puts back: all of the train state but the loss scale, which has learned, and the rates."""
        return tuple(_unique([*self.trainable, *self.other, *self.slots]))

    @property
    def everything(self) -> tuple[Any, ...]:
        """Every variable of the train state but the metrics."""
        scales = [v for pair in self.scales for v in pair]
        return tuple(_unique([*self.trainable, *self.other, *self.slots, *scales, *self.rates]))


def native(variable: Any) -> Any:
    """Return the backend's own variable behind one of Keras', and any other one as it is."""
    return variable.value if isinstance(variable, (VARIABLE, _native.NativeVariable)) else variable


def _unlisted(model: Any) -> list[Any]:
    """`keras.src.random.seed_generator.global_seed_generator` keeps its generator under this name in Keras' global state."""
    generator = keras.src.backend.common.global_state.get_global_attribute("global_seed_generator")
    held = [item for layer in layers_of(model) for value in vars(layer).values() for item in _flat(value)]
    held += [getattr(item, "state", None) for item in held]  # of a `tf.random.Generator`
    held += [v for item in held if hasattr(item, "with_name_scope") for v in item.variables]  # of a `tf.Module`
    native = [v for v in held if not isinstance(v, VARIABLE) and hasattr(v, "assign") and _has_handle(v)]
    native += [v for v in held if hasattr(v, "untyped_storage")]  # tensors and buffers of torch
    native += list(model.buffers()) if hasattr(model, "buffers") else []
    return _unique([*native, *([generator.state] if generator is not None else [])])


def _has_handle(value: Any) -> bool:
    """Whether it is a `tf.Variable` of one device; one that is spread over several raises when it is asked."""
    try:
        return hasattr(value, "handle")
    except ValueError:
        return False


def _is_variable(value: Any) -> bool:
    return isinstance(value, VARIABLE)


def _recurrent_states(layer: Any) -> list[Any]:
    states = getattr(layer, "states", None) if getattr(layer, "stateful", False) else None
    return [s for s in keras.tree.flatten(states) if _is_variable(s)] if states is not None else []


def read(variable: Any) -> np.ndarray[Any, Any]:
    """Return the variable's value as a NumPy array that shares no memory with it."""
    return np.array(keras.ops.convert_to_numpy(_processes.whole(variable.value)))


def view(variable: Any) -> np.ndarray[Any, Any]:
    """Return the variable's value as a NumPy array that may share its memory: read it at once, never write it."""
    value = variable.value
    if _has_handle(value):  # a tf.Variable: the bare operation takes a quarter of the time of `.numpy()`
        value = keras.src.utils.module_utils.tensorflow.raw_ops.ReadVariableOp(resource=value.handle, dtype=value.dtype)
    return _as_numpy(value)


def _as_numpy(value: Any) -> np.ndarray[Any, Any]:
    """Return a tensor's numbers, in its own memory where that can be read."""
    if hasattr(value, "detach"):  # torch: NumPy knows neither its gradients, nor its devices, nor its bfloat16
        value = value.detach().cpu()
        return np.asarray(keras.ops.convert_to_numpy(value) if "bfloat16" in str(value.dtype) else value.numpy())
    if hasattr(value, "numpy"):  # TensorFlow: `.numpy()` makes a copy of a tensor; a mirrored variable is no array by itself
        value = value.read_value() if hasattr(value, "read_value") else value
        return np.asarray(value if len(value.shape) else value.numpy())  # a scalar of bfloat16 is no array by itself either
    return np.asarray(keras.ops.convert_to_numpy(_processes.whole(value)))


def is_statistic(variable: Any) -> bool:
    """Whether the variable is a running statistic that has to be finite: of BatchNorm, Normalization and the like."""
    name = str(getattr(variable, "name", ""))
    return not variable.trainable and ("mean" in name or "variance" in name)


def write(variable: Any, array: Any) -> None:
    """Give the variable a value, from outside of any step: a copy, for some backends work on in the array they are given."""
    variable.assign(np.array(array))


def seeds(variables: Iterable[Any]) -> list[Any]:
    """Return the states of seed generators among these variables."""
    return [v for v in variables if str(v.name).endswith("seed_generator_state")]


def learning_rate(optimizer: Any) -> float:
    """Return the rate that the optimizer's next step uses, whether it is a number, a schedule or a callable."""
    return float(keras.ops.convert_to_numpy(inner(optimizer)._get_current_learning_rate()))


def scales_of(optimizer: Any) -> tuple[Any, ...]:
    """Return the variables of the optimizer's loss scale; none where it has none."""
    return (optimizer.dynamic_scale, optimizer.step_counter) if is_loss_scaled(optimizer) and optimizer.built else ()


def named_arrays(data: Any) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield `(path, array)` for every tensor of nested data, as `0`, `0/1` or `0/name`; text and `None` are left out."""
    yield from _named("", data)


def _named(path: str, data: Any) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(data, dict):
        children = data.items()
    elif isinstance(data, (list, tuple)):
        children = enumerate(data)
    elif data is not None:
        array = dense(data)
        if array.dtype.kind not in "OSU":
            yield path, array
    for key, value in children:
        yield from _named(f"{path}/{key}" if path else str(key), value)


def dense(value: Any) -> np.ndarray[Any, Any]:
    """Return the numbers of a tensor as a NumPy array: of a sparse one its values, of a ragged one its flat values."""
    for name in ("flat_values", "values"):
        inner_values = getattr(value, name, None)
        if inner_values is not None and not callable(inner_values):
            return dense(inner_values)
    if hasattr(value, "detach"):
        return _as_numpy(value)
    return _processes.as_array(value)


def batchnorms(model: Any) -> list[Any]:
    """Return the BatchNormalization layers at any depth."""
    return [layer for layer in layers_of(model) if isinstance(layer, keras.layers.BatchNormalization)]


def batchnorm_statistics(model: Any) -> list[Any]:
    """Return the moving means and variances of all BatchNormalization layers."""
    return [v for layer in batchnorms(model) if layer.built for v in (layer.moving_mean, layer.moving_variance)]


def initial_value(model: Any, variable: Any) -> np.ndarray[Any, Any]:
    """Return a first value for a variable: drawn anew by its layer's initializer."""
    shape = tuple(variable.shape)
    for layer in layers_of(model):
        if any(v is variable for v in layer.weights) and variable.path == f"{layer.path}/{variable.name}":
            initializer = getattr(layer, f"{variable.name}_initializer", None)
            if initializer is not None:
                return read_tensor(initializer(shape, dtype=variable.dtype))
            return np.full(shape, 1.0 if variable.name in ("gamma", "variance", "moving_variance") else 0.0)
    return np.zeros(shape)


def read_tensor(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a tensor's value as a NumPy array of its own."""
    return np.array(keras.ops.convert_to_numpy(tensor))
