"""The moving statistics of BatchNormalization: their re-estimation while training continues, and
validations that show that they lag behind.

The estimate is the cumulative average over the next batches: an estimate from the last ones would
soon be outdated, as the weights may change fast, and the moving average follows late. BatchNorm
updates its statistics by ``new = momentum * old + (1 - momentum) * batch``. Over the `k` steps
between two readings on the host this is

    new = momentum**k * old + (1 - momentum**k) * mean of the k batches (later ones weigh slightly
    more)

So this mean follows from the values before and after, and the running mean of all batches replaces
the moving average. (PyTorch's BatchNorm computes the same with ``momentum=None``.)

A train step never reads the moving statistics, so no step shows that they lag behind those of the
batches. The check runs if a validation loss is far above the training loss. It runs one validation
batch with the current moving statistics, with statistics estimated from the last train batches, and
with the statistics that the moving ones will have at the end of this fit. It reports the layer if
the estimated ones remove the difference and the rest of the fit would not. Nothing is changed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.incident import Diagnosis, Finding
from keras_nanguard._fit.callbacks import numbers, one_batch
from keras_nanguard._keras import (
    layers as keras_layers,
    optimizers as keras_optimizers,
    variables as keras_variables,
)

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


class Recalibration:
    """An estimate in progress. Start it when the statistics have any finite value.

    Args:
        layers: BatchNormalization layers that update their statistics.
        batches: number of batches to average over.
        seen: number of batches that are already included.

    Attributes:
        left: number of remaining batches.
    """

    def __init__(self, layers: list[Any], batches: int, seen: int = 0):
        self.layers, self.left, self.seen = layers, batches, seen
        self._good: int | None = None
        self._variables = [
            (variable, float(layer.momentum))
            for layer in layers
            for variable in (layer.moving_mean, layer.moving_variance)
        ]
        self._before = self._read()

    def step(self, good: int) -> bool:
        """Include the steps that were committed since the last call; return whether the estimate is
        complete.

        Args:
            good: number of committed steps of the fit.
        """
        if self._good is None or good <= self._good:
            return False
        count, self._good = good - self._good, good
        self.seen += count
        self.left -= count
        for before, (variable, momentum) in zip(self._before, self._variables):
            kept = momentum**count
            batches = (_wide(variable) - kept * before) / (1.0 - kept)
            mean = before + (batches - before) * count / self.seen
            keras_variables.write(variable, mean.astype(keras_variables.view(variable).dtype))
        self._before = self._read()
        return self.left <= 0

    def begin_counting(self, good: int) -> None:
        """Begin to count, if the estimate was started since the last execution."""
        self._good = good if self._good is None else self._good

    def restart(self) -> None:
        """Restart from the current statistics, after other code has written them."""
        self.left += self.seen
        self.seen, self._good = 0, None
        self._before = self._read()

    def _read(self) -> list[np.ndarray[Any, Any]]:
        return [_wide(variable) for variable, _ in self._variables]


def _wide(variable: Any) -> np.ndarray[Any, Any]:
    return keras_variables.read(variable).astype(np.float64)


# Statistics that lag behind


@dataclass(frozen=True, slots=True)
class _Measured:
    """Losses of one batch with the current, the estimated, and the final statistics."""

    now: float
    estimated: float
    later: float
    worst: str

    def lags(self, trained: float) -> bool:
        """Whether the moving statistics cause the difference, and will not recover in this fit."""
        small = FAR * max(self.estimated, trained)
        removed = self.now - self.estimated >= UNDONE * (self.now - trained)
        return min(self.now, self.later) > small and removed


class Lagging:
    """The check of the validations of one fit, until it has found something."""

    def __init__(self) -> None:
        self._looks, self._done = LOOKS, False

    @np.errstate(all="ignore")  # the values are not finite
    def look(
        self, run: Any, logs: Any, plan: Mapping[str, Any]
    ) -> tuple[list[Finding], Diagnosis] | None:
        """Check a validation; return findings and diagnosis, or `None`. Never raises.

        Args:
            run: the `Run`.
            logs: of the validation.
            plan: number of `epochs` of the fit and `steps` per epoch, if known.
        """
        model, start = run.model, run.counts.epoch_start
        steps = plan.get("steps") or run.step - start
        remaining = steps * max((plan.get("epochs") or 1) - run.counts.epoch - 1, 0)
        losses = [m.loss for m in run.history.before(run.step) if m.step >= start][-LAST:]
        trained = statistics.median(losses) if losses else math.nan
        layers, loss = learning(model), numbers(logs).get("loss", math.nan)
        far = 0.0 < FAR * trained < loss < math.inf
        strategy = getattr(model, "distribute_strategy", None)
        spread_out = getattr(strategy, "num_replicas_in_sync", 1) > 1
        spread_out = spread_out or keras.distribution.distribution() is not None
        if self._done or not layers or not far or spread_out:  # or one batch cannot run alone
            return None
        if not self._looks and remaining:
            return None
        self._looks = max(self._looks - 1, 0)
        try:
            found = _measured(run, layers, remaining)
        except Exception:  # noqa: BLE001  the user's model may not run this way
            return None
        if found is None or not found.lags(trained):
            return None
        self._done = True
        finding = Finding("validation", "out_of_range", "loss", value=loss)
        return [finding], _diagnosis(run, layers, found, loss, trained)


def _measured(run: Any, layers: list[Any], remaining: int) -> _Measured | None:
    from keras_nanguard._backends.shared.replay import preserved
    from keras_nanguard._files.recalibrate import recalibrate

    model, train_state = run.model, run.train_state()
    moving = [v for layer in layers for v in (layer.moving_mean, layer.moving_variance)]
    with preserved(train_state.written_by_calls, model):
        data, trained = one_batch(), run.recent.last(LAST)
        if data is None or not trained:
            return None
        x, y, weights = data

        def loss() -> float:
            found = model.compute_loss(x, y, model(x, training=False), weights)
            return float(keras.ops.convert_to_numpy(found))

        now, before = loss(), [keras_variables.read(v) for v in moving]
        names = [name for layer in layers for name in (layer.path, layer.name)]
        recalibrate(model, (args[0] for args in trained), only=names)
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
    run: Any, layers: list[Any], found: _Measured, loss: float, trained: float
) -> Diagnosis:
    momentum = float(next(layer for layer in layers if layer.path == found.worst).momentum)
    optimizers = map(keras_optimizers.inner, run.train_state().optimizers)
    counted = [int(keras_variables.read(optimizer.iterations)) for optimizer in optimizers]
    lag, *advice = _lag(momentum, max(counted, default=run.counts.committed))
    if momentum > 0.9:
        advice.append("Or give BatchNormalization a smaller momentum: 0.9 needs 44 steps for that.")
    advice.append("Or re-estimate them after training: keras_nanguard.recalibrate(model, x).")
    moving = f"On one validation batch it is {found.now:.3g} with the moving statistics"
    evidence = (
        f"The validation loss is {loss:.3g}, and the loss of the last train steps {trained:.3g}.",
        f"{moving}, and {found.estimated:.3g} with statistics estimated from the last train"
        " batches.",
        lag,
    )
    path, advised = found.worst, tuple(advice)
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
