"""The moving statistics of BatchNormalization in a running fit, and validations that show that they
lag behind the weights.

A train step never reads the moving statistics, so no step shows that they lag behind those of the
batches. The check runs if a validation loss is far above the training loss. It runs one validation
batch with the current moving statistics, with statistics estimated from the last train batches, and
with the statistics that the moving ones will have at the end of this fit. It reports the layer if
the estimated ones remove the difference and the rest of the fit would not. Nothing is changed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_nanguard._backends import processes
from keras_nanguard._core import finiteness
from keras_nanguard._core.incident import Diagnosis, Finding
from keras_nanguard._fit.fit_logs import numbers
from keras_nanguard._fit.results import one_batch
from keras_nanguard._fit.run import Run
from keras_nanguard._keras import (
    arrays as keras_arrays,
    layers as keras_layers,
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.all_or_none import write_all

LOOKS = 3
"""Number of validations of one fit that are checked, besides the last one."""

FAR = 2.1
"""Minimum ratio of the validation loss to the training loss, and to the loss with estimated
statistics.
"""

LAST = 8
"""Number of train steps that give the training loss and the estimated statistics."""

UNDONE = 0.5
"""Minimum share of the difference that the estimated statistics remove."""


def unfrozen(model: Any) -> list[Any]:
    """Return the BatchNormalization layers that are not frozen."""
    return [layer for layer in keras_layers.batchnorms(model) if layer.trainable]


def learning(model: Any) -> list[Any]:
    """Return the BatchNormalization layers whose statistics a train step updates."""
    return [layer for layer in unfrozen(model) if layer.momentum < 1.0]


def initial_statistics(layers: list[Any]) -> list[tuple[Any, Any]]:
    """Return the statistics of BatchNormalization layers with their initial values."""
    pairs = [(layer.moving_mean, layer.moving_mean_initializer) for layer in layers]
    pairs += [(layer.moving_variance, layer.moving_variance_initializer) for layer in layers]
    return [
        (v, keras_arrays.read_tensor(initializer(tuple(v.shape), dtype=v.dtype)))
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
        StateLostError: if the state could not be restored.
        Exception: if the model does not take them, or an estimate is not finite.
    """
    from keras_nanguard._backends.shared.replay import preserved
    from keras_nanguard._files.recalibrate import estimated

    inputs = (keras.utils.unpack_x_y_sample_weight(args[0])[0] for args in batches)
    with preserved(run.train_state().written_by_calls, run.model):
        write_all(estimated(run.model, layers, inputs)[1])
        moving = [v for layer in layers for v in (layer.moving_mean, layer.moving_variance)]
        return [(v, keras_variables.read(v)) for v in moving]


# The check of validations


@dataclass(frozen=True, slots=True)
class _Measured:
    """Losses of one batch with the current, the estimated, and the final statistics."""

    now: float
    estimated: float
    later: float
    worst: str

    def lags(self, train_loss: float) -> bool:
        """Whether the moving statistics cause the difference, and will not recover in this fit."""
        small = FAR * max(self.estimated, train_loss)
        removed = self.now - self.estimated >= UNDONE * (self.now - train_loss)
        return min(self.now, self.later) > small and removed


class Lagging:
    """The check of the validations of one fit, until it has found something."""

    def __init__(self) -> None:
        self._looks, self._done = LOOKS, False

    @np.errstate(all="ignore")  # the values are not finite
    def look(
        self, run: Run, logs: Any, plan: Mapping[str, Any]
    ) -> tuple[list[Finding], Diagnosis] | None:
        """Check a validation; return findings and diagnosis, or `None`.

        Args:
            plan: number of `epochs` of the fit and `steps` per epoch, if known.

        Raises:
            StateLostError: if the state could not be restored after the check.
        """
        with run.optional():
            model, start = run.model, run.counts.epoch.start
            steps = plan.get("steps") or run.step - start
            remaining = steps * max((plan.get("epochs") or 1) - run.counts.epoch.number - 1, 0)
            losses = [m.loss for m in run.history.before(run.step) if m.step >= start][-LAST:]
            train_loss = statistics.median(losses) if losses else math.nan
            layers, loss = learning(model), numbers(logs).get("loss", math.nan)
            far = 0.0 < FAR * train_loss < loss < math.inf
            if self._done or not layers or not far or not runs_alone(model):
                return None
            if not self._looks and remaining:
                return None
            self._looks = max(self._looks - 1, 0)
            measured = _measured(run, layers, remaining)
            if measured is None or not measured.lags(train_loss):
                return None
            self._done = True
            diagnosis = _diagnosis(run, layers, measured, loss, train_loss)
            return [Finding("validation", "out_of_range", "loss", value=loss)], diagnosis
        return None


def _measured(run: Run, layers: list[Any], remaining: int) -> _Measured | None:
    from keras_nanguard._backends.shared.replay import preserved

    model, train_state = run.model, run.train_state()
    moving = [v for layer in layers for v in (layer.moving_mean, layer.moving_variance)]
    with preserved(train_state.written_by_calls, model):
        data, batches = one_batch(), run.recent.last(LAST)
        if data is None or not batches:
            return None
        x, y, weights = data

        def loss() -> float:
            tensor = model.compute_loss(x, y, model(x, training=False), weights)
            return float(keras.ops.convert_to_numpy(tensor))

        now, before = loss(), [keras_variables.read(v) for v in moving]
        write_all(reestimated(run, layers, batches))
        estimated, after = loss(), [keras_variables.read(v) for v in moving]
        momenta = [layer.momentum for layer in layers for _ in range(2)]
        for variable, momentum, old, new in zip(moving, momenta, before, after):
            keras_variables.write(variable, new + (old - new) * momentum**remaining)
        return _Measured(now, estimated, loss(), _worst(layers, before, after))


def _worst(layers: list[Any], before: list[Any], after: list[Any]) -> str:
    """Return the path of the layer whose moving variance differs most from the estimated one."""

    def factor(number: int) -> float:
        old, new = (finiteness.widen(values[2 * number + 1]) + 1e-12 for values in (before, after))
        return max(float((old / new).max()), float((new / old).max()))

    return str(layers[max(range(len(layers)), key=factor)].path)


def _diagnosis(
    run: Run, layers: list[Any], measured: _Measured, loss: float, train_loss: float
) -> Diagnosis:
    momentum = float(next(layer for layer in layers if layer.path == measured.worst).momentum)
    iterations = map(keras_optimizers.iterations, run.train_state().optimizers)
    counted = [int(keras_variables.read(counter)) for counter in iterations]
    lag, *advice = _lag(momentum, max(counted, default=run.counts.committed))
    if momentum > 0.9:
        advice.append("Or give BatchNormalization a smaller momentum: 0.9 needs 44 steps for that.")
    advice.append("Or re-estimate them after training: keras_nanguard.recalibrate(model, x).")
    moving = f"On one validation batch it is {measured.now:.3g} with the moving statistics"
    evidence = (
        f"The validation loss is {loss:.3g}, and the loss of the last train steps"
        f" {train_loss:.3g}.",
        f"{moving}, and {measured.estimated:.3g} with statistics estimated from the last train"
        " batches.",
        lag,
    )
    path, advised = measured.worst, tuple(advice)
    return Diagnosis("batchnorm_statistics", path, (), evidence, advised, confidence=0.9)


def _lag(momentum: float, steps: int) -> tuple[str, str]:
    """Return why moving statistics lag behind after some steps, and the remedy."""
    needed = math.ceil(math.log(0.01) / math.log(momentum)) if momentum > 0.0 else 1
    share = momentum**steps
    if share > 0.005:
        return (
            f"After {steps} steps at momentum={momentum:g} the initial values still have a weight"
            f" of {share:.1%}.",
            f"Train for more steps: at this momentum it takes {needed} until the initial values"
            " have a weight of 1%.",
        )
    return (
        f"At momentum={momentum:g} they average about {needed} steps, during which the weights"
        " have changed.",
        "Lower the learning rate towards the end, so that the statistics catch up.",
    )
