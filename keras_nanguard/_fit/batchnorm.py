"""The moving statistics of BatchNormalization in a running fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from keras_nanguard._backends import processes
from keras_nanguard._fit.run import Run
from keras_nanguard._keras import layers as keras_layers, variables as keras_variables


def trained(model: Any) -> list[Any]:
    """Return the BatchNormalization layers that are not frozen."""
    return [layer for layer in keras_layers.batchnorms(model) if layer.trainable]


def learning(model: Any) -> list[Any]:
    """Return the BatchNormalization layers whose statistics a train step updates."""
    return [layer for layer in trained(model) if layer.momentum < 1.0]


def initial_statistics(layers: list[Any]) -> list[tuple[Any, Any]]:
    """Return the statistics of BatchNormalization layers with their initial values."""
    pairs = [(layer.moving_mean, layer.moving_mean_initializer) for layer in layers]
    pairs += [(layer.moving_variance, layer.moving_variance_initializer) for layer in layers]
    return [
        (v, keras_variables.read_tensor(initializer(tuple(v.shape), dtype=v.dtype)))
        for v, initializer in pairs
    ]


def runs_alone(model: Any) -> bool:
    """Whether one batch can run outside of a step: it is not spread over devices or processes."""
    strategy = getattr(model, "distribute_strategy", None)
    replicas = getattr(strategy, "num_replicas_in_sync", 1)
    return replicas == 1 and keras.distribution.distribution() is None and processes.count() == 1


def reestimated(run: Run, layers: list[Any], batches: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return the statistics of layers with estimates from batches, as `recalibrate` makes them.
    Nothing is changed.

    Args:
        batches: the arguments of steps, whose first one is the batch.

    Raises:
        Exception: if the model does not take them, or an estimate is not finite.
    """
    from keras_nanguard._backends.shared.replay import preserved
    from keras_nanguard._files.recalibrate import recalibrate

    names = [name for layer in layers for name in (layer.path, layer.name)]
    with preserved(run.train_state().written_by_calls, run.model):
        recalibrate(run.model, (args[0] for args in batches), only=names)
        moving = [v for layer in layers for v in (layer.moving_mean, layer.moving_variance)]
        return [(v, keras_variables.read(v)) for v in moving]
