"""Changes that continue over several steps: a lowered rate returns, a loss scale stays within its
bounds, BatchNorm statistics are re-estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keras_nanguard._fit.counts import Counts
from keras_nanguard._fit.learning_rates import Rate
from keras_nanguard._fit.live_state import LiveState
from keras_nanguard._fit.recalibration import Recalibration
from keras_nanguard._fit.snapshots import Snapshot
from keras_nanguard._keras import layers as keras_layers, variables as keras_variables

__all__ = ["PendingRecovery"]


class PendingRecovery:
    """The continuing changes of one fit. Usually there are none.

    Args:
        state: the train state of the model.
        counts: the counters of the fit.
        rates: the changes of the learning rate of each optimizer.

    Attributes:
        lowered_at: the step at which the rate was last lowered, or `None`.
        lowered_good: number of good steps until then.
        undone: for each rollback the number of good steps until then, and how many it undid.
        recovery: `(after, ramp)` while a lowered rate is to return.
        scale_bounds: floor and ceiling of the loss scale.
        recalibration: the estimate of BatchNorm statistics in progress.
    """

    def __init__(self, state: LiveState, counts: Counts, rates: Mapping[int, Rate]):
        self._state, self._counts, self._rates = state, counts, rates
        self.lowered_at: int | None = None
        self.lowered_good = 0
        self.undone: list[tuple[int, int]] = []
        self.recovery: tuple[int, int] | None = None
        self.scale_bounds: tuple[float, float] | None = None
        self.recalibration: Recalibration | None = None

    @property
    def active(self) -> bool:
        """Whether there is something to do after a good step."""
        return bool(self.recovery or self.scale_bounds or self.recalibration)

    def lowered(self, recovery: tuple[int, int] | None) -> None:
        """Store that the rate was lowered now, and how it will return."""
        self.lowered_at, self.lowered_good, self.recovery = (
            self._counts.step,
            self._counts.committed,
            recovery,
        )

    def estimate(self, batches: int, seen: int = 0) -> int:
        """Start to re-estimate the statistics of all layers that update theirs; return the number
        of layers.
        """
        layers = learning(self._state.model)
        self.recalibration = Recalibration(layers, batches, seen) if layers else None
        return len(layers)

    def after_good_step(self) -> None:
        """Run due tasks after a good step, or after an execution of several whose last one was
        good.
        """
        if self.recovery is not None:
            self._recover(*self.recovery)
        if self.scale_bounds is not None:
            self._bound_scale(*self.scale_bounds)
        if self.recalibration is not None:
            self._state.access.sync_variables()
            if self.recalibration.step(self._counts.committed):
                self.recalibration = None

    def begin_counting(self) -> None:
        """Run due tasks between two executions: a new estimate begins to count."""
        if self.recalibration is not None:
            self.recalibration.begin_counting(self._counts.committed)

    @property
    def tried(self) -> bool:
        """Whether a step has committed at the present rate."""
        return (
            self._counts.committed > (self.lowered_good if self.lowered_at is not None else 0)
            and self._counts.committed > 0
        )

    def rolled_back_to(self, snapshot: Snapshot) -> int:
        """Store that a snapshot was restored; return the number of undone good steps."""
        good = self._counts.committed
        earlier = sum(steps for then, steps in self.undone if then > snapshot.good)
        steps = max(good - snapshot.good - earlier, 0)
        self.undone.append((good, steps))
        return steps

    def return_to(self, step: int, committed: int) -> None:
        """Continue counting from an earlier step."""
        if self.lowered_at is not None:
            self.lowered_at, self.lowered_good = (
                min(self.lowered_at, step),
                min(self.lowered_good, committed),
            )
        self.undone = [entry for entry in self.undone if entry[0] <= committed]

    def values_to_start_over(self) -> list[tuple[Any, Any]]:
        """Return the initial statistics of an estimate in progress."""
        return [] if self.recalibration is None else initial_statistics(self.recalibration.layers)

    def start_over(self) -> None:
        """Restart an estimate after another state was written."""
        if self.recalibration is not None:
            self.recalibration.restart()

    def _recover(self, after: int, ramp: int) -> None:
        """Restore a lowered rate, `after` good steps after it was lowered, over `ramp` steps."""
        since = self._counts.committed - self.lowered_good - after
        if since < 0:
            return
        self._state.access.sync_variables()
        share = 1.0 if ramp <= 0 else min(since / ramp, 1.0)
        for rate in self._rates.values():
            rate.raise_to(rate.lowest ** (1.0 - share))
        if share >= 1.0:
            self.recovery = None

    def _bound_scale(self, floor: float, ceiling: float) -> None:
        for scale, _ in self._state.train_state().scales:
            value = float(keras_variables.read(scale))
            if not floor <= value <= ceiling:
                keras_variables.write(scale, min(max(value, floor), ceiling))


def learning(model: Any) -> list[Any]:
    """Return the BatchNormalization layers whose statistics a train step updates."""
    layers = keras_layers.batchnorms(model)
    return [layer for layer in layers if layer.built and layer.trainable and layer.momentum < 1.0]


def initial_statistics(layers: list[Any]) -> list[tuple[Any, Any]]:
    """Return the statistics of BatchNormalization layers with their initial values."""
    found = []
    for layer in layers:
        for variable, initializer in (
            (layer.moving_mean, layer.moving_mean_initializer),
            (layer.moving_variance, layer.moving_variance_initializer),
        ):
            found.append(
                (
                    variable,
                    keras_variables.read_tensor(
                        initializer(tuple(variable.shape), dtype=variable.dtype)
                    ),
                )
            )
    return found
