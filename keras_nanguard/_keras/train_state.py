"""The whole train state of a model: its variables, by role."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import keras

from keras_nanguard._core import finiteness
from keras_nanguard._keras import (
    layers as keras_layers,
    losses as keras_losses,
    optimizers as keras_optimizers,
    torch_tensors,
    variables as keras_variables,
)
from keras_nanguard._keras.variables import unique

_PLAIN = frozenset((str, bytes, int, float, bool, type(None)))
"""Types of attributes that are not state."""

_MAX_SHARE, _ALWAYS = 0.1, 1024
"""Copies of `unlisted` may take this share of the other state, or this many bytes more."""


@dataclass(frozen=True)
class TrainState:
    """The whole train state of a model and its optimizers, by role.

    Attributes:
        trainable: weights that the optimizers update, including those that are not part of the
            model.
        other: every other variable of the model: BatchNorm statistics, frozen weights, seed
            generators, and, which Keras does not list, states of stateful RNNs and buffers of torch
            modules.
        metrics: variables of the loss tracker and of the metrics, also of those that layers, such
            as a model within the model, and losses have.
        slots: variables of the optimizers apart from rate and loss scale: moments, iterations,
            accumulators, EMA.
        scales: `(dynamic_scale, step_counter)` of each `LossScaleOptimizer`.
        rates: learning-rate variables of optimizers whose rate is a number.
        optimizers: the outermost optimizers: those of the model, and those of its layers that a
            step of the model has used.
        unlisted: further variables that a step may write although no list of Keras contains them:
            native variables of the backend in attributes of layers, the generator that Keras uses
            if no seed is given, and variables in attributes of optimizers (the `_u_product` of
            Nadam within a `LossScaleOptimizer`).
        layers: the model and its layers at any depth.
        results: the tensors of PyTorch among `unlisted` that are no buffers: what earlier calls
            have left in layers.
        found: `optimizers`, and the others in attributes of layers, such as that of a frozen model
            which was compiled; in an order that does not depend on their use.
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
    found: tuple[Any, ...] = ()

    @classmethod
    def of(cls, model: Any, optimizers: Iterable[Any] | None = None) -> TrainState:
        """Return the train state of a built model, with what its built optimizers have."""
        layers = keras_layers.layers_of(model)
        # without plain values: a vocabulary may be long
        held = [item for item in keras_layers.held_by(layers) if type(item) not in _PLAIN]
        first = keras_optimizers.find_optimizers(model) if optimizers is None else list(optimizers)
        others = unique(keras_optimizers.outermost([*first, *held]), first)
        optimizers = (*first, *(o for o in others if keras_optimizers.is_used(model, o)))
        updated = [v for o in optimizers if o.built for v in keras_optimizers.trained_by(o)]
        trainable = unique([*model.trainable_variables, *updated])
        states = [s for layer in layers for s in keras_layers.recurrent_states(layer)]
        own = filter(keras_variables.is_variable, states)
        modules = [layer for layer in layers if hasattr(layer, "named_modules")]  # on PyTorch
        buffers, passing = torch_tensors.buffers_of(modules) if modules else ((), ())
        other = unique([*model.non_trainable_variables, *own, *buffers], trainable)
        scales = tuple(filter(None, map(keras_optimizers.scales_of, optimizers)))
        inner = [keras_optimizers.inner(optimizer) for optimizer in optimizers]
        rates = [keras_optimizers.given_rate(o) for o in (*inner, *optimizers)]
        results = _results(held, [*(v.of for v in buffers), *passing])
        seeds = keras_variables.global_seed_variables()
        no_slots = [*rates, *itertools.chain(*scales), *trainable]
        slots = unique((v for o in optimizers for v in o.variables), no_slots)
        attributes = [value for o in (*inner, *optimizers) for value in vars(o).values()]
        own_slots = unique(filter(keras_variables.is_variable, attributes), [*slots, *no_slots])
        losses = [loss for loss in keras_losses.losses_of(model) if hasattr(loss, "__dict__")]
        measured = [
            v
            for item in (*held, *keras_layers.held_by(losses))
            if isinstance(item, keras.metrics.Metric)
            for v in item.variables
        ]
        metrics = unique([*getattr(model, "metrics_variables", ()), *measured])
        return cls(
            trainable=trainable,
            other=other,
            metrics=metrics,
            slots=slots,
            scales=scales,
            rates=tuple(filter(keras_variables.is_variable, rates[: len(inner)])),
            optimizers=optimizers,
            unlisted=unique([*_native_variables(held), *results, *passing, *seeds, *own_slots]),
            layers=tuple(layers),
            results=results,
            found=(*first, *others),
        )

    def unlisted_restorers(self) -> list[Callable[[], Any]]:
        """Return functions that restore the current values of `unlisted`; none if copies of these
        take too much memory, or if one cannot be read.
        """
        written = [v for v in self.unlisted if not torch_tensors.is_inference(v)]
        size, others = (sum(map(keras_variables.bytes_of, some)) for some in (written, self.kept))
        if size > _MAX_SHARE * others + _ALWAYS:
            return []
        try:
            return [keras_variables.restorer(v) for v in written]
        except Exception:  # noqa: BLE001  other code made these variables
            return []

    @property
    def statistics(self) -> tuple[Any, ...]:
        """The float variables among `other`."""
        return tuple(v for v in self.other if finiteness.is_float(v.dtype))

    @property
    def constants(self) -> tuple[Any, ...]:
        """The float variables among `other` that are not running statistics: frozen weights,
        masks. One that is infinite from the start (a mask of -Inf) may stay so.
        """
        return tuple(v for v in self.statistics if not keras_variables.is_statistic(v))

    @property
    def unjudged(self) -> tuple[Any, ...]:
        """What a step may write without being judged by it: metrics, loss scales and rates."""
        return (*self.metrics, *itertools.chain(*self.scales), *self.rates)

    @property
    def restorable(self) -> tuple[Any, ...]:
        """The variables that a rollback restores: the train state without loss scale and rates."""
        return unique([*self.trainable, *self.other, *self.slots])

    @property
    def kept(self) -> tuple[Any, ...]:
        """The variables in a snapshot: the restorable ones, and the loss scales."""
        return (*self.restorable, *itertools.chain(*self.scales))

    @property
    def everything(self) -> tuple[Any, ...]:
        """Every variable of the train state except the metrics."""
        return unique([*self.kept, *self.rates])

    @property
    def unused(self) -> tuple[Any, ...]:
        """The optimizers of layers that no step has used yet; then they are among `optimizers`."""
        return unique(self.found, self.optimizers)

    @property
    def written_by_calls(self) -> tuple[Any, ...]:
        """Every variable that calls of the model or a train step may write."""
        slots = (v for optimizer in self.unused for v in optimizer.variables)
        return unique([*self.everything, *self.metrics, *self.unlisted, *slots])


def _of_kind(held: Iterable[Any], name: str) -> list[Any]:
    """Return the objects whose class has this attribute; a property of the object may raise."""
    return [item for item in held if hasattr(type(item), name)]


def _native_variables(held: list[Any]) -> list[Any]:
    """Return the variables of the backend among these objects, and within them."""
    generators = _of_kind(held, "from_key_counter")  # `tf.random.Generator`
    modules = _of_kind(held, "with_name_scope")  # `tf.Module`
    inner = [v for module in modules for v in module.variables]
    found = _of_kind([*held, *(g.state for g in generators), *inner], "assign")
    native = [v for v in found if not keras_variables.is_variable(v)]
    return list(filter(keras_variables.has_handle, native))


def _results(held: Iterable[Any], buffers: Iterable[Any]) -> tuple[Any, ...]:
    """Return the tensors of PyTorch that earlier calls have left, without buffers, tensors with a
    history, and those of the symbolic build.
    """
    tensors = [v for v in _of_kind(held, "untyped_storage") if v.grad_fn is None]
    listed = set(map(id, buffers))
    return tuple(v for v in tensors if v.device.type != "meta" and id(v) not in listed)
