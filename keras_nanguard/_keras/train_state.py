"""The whole train state of a model: its variables, by role.

Private to Keras, because there is no public way: ``Optimizer._learning_rate``, the rate that the
user passed. `tests/keras_internals/test_internals.py` fails when a release of Keras removes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from keras_nanguard._core import finiteness
from keras_nanguard._keras import (
    layers as keras_layers,
    optimizers as keras_optimizers,
    variables as keras_variables,
)

_PLAIN = frozenset((str, bytes, int, float, bool, type(None)))
"""Types of attributes that are no state."""


@dataclass(frozen=True)
class TrainState:
    """The whole train state of a model and its optimizers, by role.

    Attributes:
        trainable: weights that the optimizers update, including those that are not part of the
            model.
        other: every other variable of the model: BatchNorm statistics, frozen weights, seed
            generators, and the states of stateful RNNs, which Keras does not list.
        metrics: variables of the loss tracker and of the metrics.
        slots: variables of the optimizers apart from rate and loss scale: moments, iterations,
            accumulators, EMA.
        scales: `(dynamic_scale, step_counter)` of each `LossScaleOptimizer`.
        rates: learning-rate variables of optimizers whose rate is a number.
        optimizers: the outermost optimizers.
        unlisted: variables that a step may write although no list of Keras contains them: native
            variables of the backend in attributes of layers, and the generator that Keras uses if
            no seed is given.
        layers: the model and its layers at any depth.
        results: the tensors of PyTorch among `unlisted` that are no buffers: what earlier calls
            have left in layers.
    """

    trainable: tuple[Any, ...]
    other: tuple[Any, ...]
    metrics: tuple[Any, ...]
    slots: tuple[Any, ...]
    scales: tuple[tuple[Any, Any], ...]
    rates: tuple[Any, ...]
    optimizers: tuple[Any, ...]
    unlisted: tuple[Any, ...] = ()
    layers: tuple[Any, ...] = ()
    results: tuple[Any, ...] = ()

    @property
    def gradient_bytes(self) -> int:
        """How many bytes the gradients of a step take: one for each trainable weight."""
        return sum(map(keras_variables.bytes_of, self.trainable))

    @classmethod
    def of(cls, model: Any, optimizers: Iterable[Any] | None = None) -> TrainState:
        """Return the train state of a built model; optimizers that are not built yet contribute
        nothing.
        """
        optimizers = tuple(
            keras_optimizers.find_optimizers(model) if optimizers is None else optimizers
        )
        updated = [v for o in optimizers if o.built for v in keras_optimizers.trained_by(o)]
        trainable = keras_variables.unique([*model.trainable_variables, *updated])
        layers = keras_layers.layers_of(model)
        states = [s for layer in layers for s in keras_layers.recurrent_states(layer)]
        other = keras_variables.unique([*model.non_trainable_variables, *states])
        metrics = keras_variables.unique(getattr(model, "metrics_variables", ()))
        scales = tuple(filter(None, map(keras_optimizers.scales_of, optimizers)))
        inner = [keras_optimizers.inner(optimizer) for optimizer in optimizers]
        given = [getattr(o, "_learning_rate", None) for o in (*inner, *optimizers)]
        rates = tuple(filter(keras_variables.is_variable, given[: len(inner)]))
        apart = {id(v) for v in [*given, *itertools.chain(*scales), *trainable]}
        slots = [v for o in optimizers for v in o.variables if id(v) not in apart]
        return cls(
            tuple(trainable),
            tuple(v for v in other if id(v) not in {id(t) for t in trainable}),
            tuple(metrics),
            tuple(keras_variables.unique(slots)),
            scales,
            rates,
            optimizers,
            *_unlisted(model, layers),
        )

    @property
    def statistics(self) -> tuple[Any, ...]:
        """The float variables among `other`."""
        return tuple(v for v in self.other if finiteness.is_float(v.dtype))

    @property
    def constants(self) -> tuple[Any, ...]:
        """The float variables among `other` that are not running statistics: frozen weights, masks,
        "best so far" values.

        Such a variable may be infinite on purpose (a mask of -Inf). This is accepted if it is
        infinite from the start.
        """
        return tuple(v for v in self.statistics if not keras_variables.is_statistic(v))

    @property
    def restorable(self) -> tuple[Any, ...]:
        """The variables that a rollback restores: the train state without loss scale and rates."""
        return tuple(keras_variables.unique([*self.trainable, *self.other, *self.slots]))

    @property
    def kept(self) -> tuple[Any, ...]:
        """The variables in a snapshot: the restorable ones, and the loss scales."""
        return (*self.restorable, *itertools.chain(*self.scales))

    @property
    def everything(self) -> tuple[Any, ...]:
        """Every variable of the train state except the metrics."""
        return tuple(keras_variables.unique([*self.kept, *self.rates]))


def _unlisted(
    model: Any, layers: list[Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Return the last three fields of a `TrainState`."""
    attributes = [item for layer in layers for item in vars(layer).items()]
    values = [value for name, value in attributes if name != "_losses"]  # those of the last call
    every = (item for value in values for item in keras_variables.flat(value))
    held = [item for item in every if type(item) not in _PLAIN]  # a vocabulary may be long

    def of_kind(name: str) -> list[Any]:
        # The class is asked, because a property of an object of the user's may raise.
        return [item for item in held if hasattr(type(item), name)]

    held += [item.state for item in of_kind("from_key_counter")]  # a `tf.random.Generator`
    held += [v for module in of_kind("with_name_scope") for v in module.variables]  # a `tf.Module`
    assignable = [v for v in of_kind("assign") if not keras_variables.is_variable(v)]
    native = filter(keras_variables.has_handle, assignable)
    buffers = list(model.buffers()) if hasattr(model, "buffers") else []
    listed = {id(buffer) for buffer in buffers}
    tensors = [v for v in of_kind("untyped_storage") if id(v) not in listed]
    # Without history, and not those of the symbolic build.
    tensors = [v for v in tensors if v.grad_fn is None and v.device.type != "meta"]
    seeds = keras_variables.global_seed_variables()
    unlisted = keras_variables.unique([*native, *tensors, *buffers, *seeds])
    return tuple(unlisted), tuple(layers), tuple(tensors)
