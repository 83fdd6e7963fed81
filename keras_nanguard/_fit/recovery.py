"""The changes of the policy in a fit, besides the state of the model.

Some continue over several steps: a lowered rate returns, a loss scale stays within its bounds,
BatchNorm statistics are re-estimated. Usually there are none.

An estimate of BatchNorm statistics is the cumulative average over the next batches. BatchNorm
updates its statistics by ``new = momentum * old + (1 - momentum) * batch``. Over the `k` steps
between two readings on the host this is

    new = momentum**k * old + (1 - momentum**k) * mean of the k batches (later ones weigh slightly
    more)

So this mean follows from the values before and after, and the running mean of all batches replaces
the moving average. (PyTorch's BatchNorm computes the same with ``momentum=None``.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from keras_nanguard._fit.learning_rates import Rate
from keras_nanguard._fit.snapshots import Snapshot
from keras_nanguard._keras import layers as keras_layers, variables as keras_variables
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.state import PolicyState

__all__ = ["Recalibration", "Recovery", "initial_statistics", "learning"]

# BatchNorm statistics


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
            good: number of good steps of the fit.
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
        """Restart from the present statistics, after other code has written them."""
        self.left += self.seen
        self.seen, self._good = 0, None
        self._before = self._read()

    def _read(self) -> list[np.ndarray[Any, Any]]:
        return [_wide(variable) for variable, _ in self._variables]


def _wide(variable: Any) -> np.ndarray[Any, Any]:
    return keras_variables.read(variable).astype(np.float64)


def learning(model: Any) -> list[Any]:
    """Return the BatchNormalization layers whose statistics a train step updates."""
    layers = keras_layers.batchnorms(model)
    return [layer for layer in layers if layer.built and layer.trainable and layer.momentum < 1.0]


def initial_statistics(layers: list[Any]) -> list[tuple[Any, Any]]:
    """Return the statistics of BatchNormalization layers with their initial values."""
    pairs = [
        (variable, initializer)
        for layer in layers
        for variable, initializer in (
            (layer.moving_mean, layer.moving_mean_initializer),
            (layer.moving_variance, layer.moving_variance_initializer),
        )
    ]
    return [
        (v, keras_variables.read_tensor(initializer(tuple(v.shape), dtype=v.dtype)))
        for v, initializer in pairs
    ]


# The changes of a fit


class Recovery:
    """The state and the changes of the policy in one fit.

    Attributes:
        policy_state: the state of the policy.
        rates: the changes of the learning rate of each optimizer, by `id`.
        changed: `(target, name, value before)` of each setting that was changed for this fit.
        diverged: whether a rate was lowered because training diverged.
        lowered_at: the step at which the rate was last lowered, or `None`.
        lowered_good: number of good steps until then.
        returns: `(after, ramp)` while a lowered rate is to return.
        undone: for each rollback the number of good steps until then, and how many it undid.
        scale_bounds: floor and ceiling of the loss scale.
        recalibration: the estimate of BatchNorm statistics in progress.
    """

    def __init__(self) -> None:
        self.policy_state = PolicyState()
        self.rates: dict[int, Rate] = {}
        self.changed: list[tuple[Any, str, Any]] = []
        self.diverged = False
        self.lowered_at: int | None = None
        self.lowered_good = 0
        self.returns: tuple[int, int] | None = None
        self.undone: list[tuple[int, int]] = []
        self.scale_bounds: tuple[float, float] | None = None
        self.recalibration: Recalibration | None = None

    @property
    def active(self) -> bool:
        """Whether there is something to do after each good step."""
        return bool(self.returns or self.scale_bounds or self.recalibration)

    # Settings of the optimizers

    def rate(self, optimizer: Any) -> Rate:
        """Return the rate of one optimizer."""
        return self.rates.setdefault(id(optimizer), Rate(optimizer))

    @property
    def rate_factor(self) -> float:
        """The factor of the guard on learning rates: the smallest one of all optimizers."""
        return min((rate.factor for rate in self.rates.values()), default=1.0)

    def change(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute until the fit ends."""
        self.changed.append((target, name, getattr(target, name)))
        setattr(target, name, value)

    def adjustments(self) -> dict[int, Any]:
        """Return the factors that a step multiplies rates by and that are not variables, by `id` of
        their reader.
        """
        return {id(rate): rate.factor for rate in self.rates.values() if not rate.plain}

    @contextmanager
    def with_adjustments(self, numbers: Mapping[int, Any]) -> Iterator[None]:
        """Replace the factors of the rates by these numbers inside the context."""
        readers = [rate for rate in self.rates.values() if id(rate) in numbers]
        for reader in readers:
            reader.given = numbers[id(reader)]
        try:
            yield
        finally:
            for reader in readers:
                reader.given = None

    def end(self) -> None:
        """Undo the changes to the optimizers."""
        for target, name, value in reversed(self.changed):
            setattr(target, name, value)
        self.changed.clear()
        for rate in self.rates.values():
            rate.release()

    # Changes that continue over several steps

    def lowered(self, step: int, committed: int, returns: tuple[int, int] | None) -> None:
        """Store that the rate was lowered now, and how it will return."""
        self.lowered_at, self.lowered_good = step, committed
        self.returns = returns

    def tried(self, committed: int) -> bool:
        """Whether a step has committed at the present rate."""
        return committed > max(self.lowered_good if self.lowered_at is not None else 0, 0)

    def estimate(self, model: Any, batches: int, seen: int = 0) -> int:
        """Start to re-estimate the statistics of all layers that update theirs; return the number
        of layers.
        """
        layers = learning(model)
        self.recalibration = Recalibration(layers, batches, seen) if layers else None
        return len(layers)

    def before_execution(self, committed: int) -> None:
        """Run due tasks before an execution: a new estimate begins to count, rates stay lowered."""
        if self.recalibration is not None:
            self.recalibration.begin_counting(committed)
        for rate in self.rates.values():
            rate.hold()

    def after_good_step(self, committed: int, train_state: Callable[[], TrainState]) -> None:
        """Run due tasks after a good step, or after an execution of several whose last one was
        good.

        Args:
            committed: number of committed steps.
            train_state: returns the train state, whose variables have the present values.
        """
        if self.returns is not None:
            after, ramp = self.returns
            since = committed - self.lowered_good - after
            if since >= 0:
                train_state()
                self._raise_rates(1.0 if ramp <= 0 else min(since / ramp, 1.0))
        if self.scale_bounds is not None:
            floor, ceiling = self.scale_bounds
            for scale, _ in train_state().scales:
                value = float(keras_variables.read(scale))
                if not floor <= value <= ceiling:
                    keras_variables.write(scale, min(max(value, floor), ceiling))
        if self.recalibration is not None:
            train_state()
            if self.recalibration.step(committed):
                self.recalibration = None

    def _raise_rates(self, share: float) -> None:
        """Return lowered rates by a share of the way to the user's choice, from 0 to 1."""
        for rate in self.rates.values():
            rate.raise_to(rate.lowest ** (1.0 - share))
        if share >= 1.0:
            self.returns = None

    # Rollbacks

    def rolled_back_to(self, snapshot: Snapshot, good: int) -> int:
        """Store that a snapshot was restored after `good` good steps; return the number of those
        that this undoes.
        """
        earlier = sum(steps for then, steps in self.undone if then > snapshot.good)
        steps = max(good - snapshot.good - earlier, 0)
        self.undone.append((good, steps))
        return steps

    def return_to(self, step: int, committed: int) -> None:
        """Continue counting from an earlier step."""
        if self.lowered_at is not None:
            self.lowered_at = min(self.lowered_at, step)
            self.lowered_good = min(self.lowered_good, committed)
        self.undone = [entry for entry in self.undone if entry[0] <= committed]
        self.policy_state = self.policy_state.rewound()

    def values_to_start_over(self) -> list[tuple[Any, Any]]:
        """Return the initial statistics of an estimate in progress."""
        return [] if self.recalibration is None else initial_statistics(self.recalibration.layers)

    def start_over(self) -> None:
        """Restart an estimate after another state was written."""
        if self.recalibration is not None:
            self.recalibration.restart()
