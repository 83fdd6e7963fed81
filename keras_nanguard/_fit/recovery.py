"""The changes of the policy in a fit, besides the state of the model, and the record of them that
outlives the fit and the process.

Some changes continue over several steps: a lowered rate returns, a loss scale stays within its
bounds, BatchNorm statistics are re-estimated. Usually there are none.

An estimate of BatchNorm statistics is the cumulative average over the next batches. BatchNorm
updates its statistics by ``new = momentum * old + (1 - momentum) * batch``. Over the `k` steps
between two readings on the host this is

    new = momentum**k * old + (1 - momentum**k) * mean of the k batches (later ones weigh slightly
    more)

So this mean follows from the values before and after, and the running mean of all batches replaces
the moving average. (PyTorch's BatchNorm computes the same with ``momentum=None``.)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np
from pydantic import Field, ValidationError

from keras_nanguard._core.errors import FileFormatError, expected
from keras_nanguard._core.incident import Whole
from keras_nanguard._core.plain_text import plain_text
from keras_nanguard._fit.counts import Counts
from keras_nanguard._fit.learning_rates import Rate, RateChange
from keras_nanguard._keras import (
    layers as keras_layers,
    optimizers as keras_optimizers,
    variables as keras_variables,
)
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.records import Record
from keras_nanguard._policy.state import PolicyState

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
    return [layer for layer in layers if layer.trainable and layer.momentum < 1.0]


def initial_statistics(layers: list[Any]) -> list[tuple[Any, Any]]:
    """Return the statistics of BatchNormalization layers with their initial values."""
    pairs = [(layer.moving_mean, layer.moving_mean_initializer) for layer in layers]
    pairs += [(layer.moving_variance, layer.moving_variance_initializer) for layer in layers]
    return [
        (v, keras_variables.read_tensor(initializer(tuple(v.shape), dtype=v.dtype)))
        for v, initializer in pairs
    ]


# The changes of a fit


class Lowering(NamedTuple):
    """How the rates of a run are lowered: the factor of each by `id` of its optimizer, and the
    attributes of `Recovery`.
    """

    factors: Mapping[int, float]
    diverged: bool
    lowered_at: tuple[int, int] | None
    returns: tuple[int, int] | None


class Recovery:
    """The state and the changes of the policy in one fit.

    Attributes:
        policy_state: the state of the policy.
        rates: the changes of the learning rate of each optimizer, by `id`.
        changed: `(target, name, value before)` of each setting that was changed for this fit.
        diverged: whether a rate was lowered because training diverged.
        lowered_at: the numbers of steps and of committed steps when the rate was last lowered, or
            `None`.
        returns: `(after, ramp)` while a lowered rate is to return.
        scale_bounds: floor and ceiling of the loss scale.
        recalibration: the estimate of BatchNorm statistics in progress.
    """

    def __init__(self) -> None:
        self.policy_state = PolicyState()
        self.rates: dict[int, Rate] = {}
        self.changed: list[tuple[Any, str, Any]] = []
        self.diverged = False
        self.lowered_at: tuple[int, int] | None = None
        self.returns: tuple[int, int] | None = None
        self.scale_bounds: tuple[float, float] | None = None
        self.recalibration: Recalibration | None = None

    @property
    def active(self) -> bool:
        """Whether there is something to do after each good step."""
        return bool(self.returns or self.scale_bounds or self.recalibration)

    # Settings of the optimizers

    def lowering(self) -> Lowering:
        """Return how the rates are lowered now."""
        factors = {key: rate.factor for key, rate in self.rates.items()}
        return Lowering(factors, self.diverged, self.lowered_at, self.returns)

    def restore_lowering(self, lowering: Lowering) -> None:
        """Lower the rates as before: undo what was done to them since."""
        for key, rate in self.rates.items():
            rate.restore(lowering.factors.get(key, 1.0))
        self.diverged, self.lowered_at = lowering.diverged, lowering.lowered_at
        self.returns = lowering.returns

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

    # For the next fit, and another process

    def saved(self, optimizers: Sequence[Any], counts: Counts) -> GuardState:
        """Return the record of all changes. Its numbers may be invalid: the user may have set them.

        Args:
            optimizers: those of the run.
            counts: its counters.
        """
        rates = [self.rates.get(id(optimizer)) for optimizer in optimizers]
        touched = {(id(target), name) for target, name, _ in self.changed}
        settings = [
            {
                name: getattr(target, name)
                for target in (optimizer, keras_optimizers.inner(optimizer))
                for name in get_args(Setting)
                if (id(target), name) in touched
            }
            for optimizer in optimizers
        ]
        estimate, lowered = self.recalibration, None
        if self.lowered_at is not None:
            step, committed = self.lowered_at
            lowered = (counts.step - step, counts.committed - committed)
        return GuardState.model_construct(
            policy_state=self.policy_state,
            rates=tuple(rate.change() if rate is not None else None for rate in rates),
            settings=tuple(settings),
            rollbacks=counts.rollbacks,
            recovery=self.returns,
            lowered=lowered,
            diverged=self.diverged,
            scale_bounds=self.scale_bounds,
            recalibration=None if estimate is None else (estimate.left, estimate.seen),
        )

    def resume(self, state: GuardState, optimizers: Sequence[Any], model: Any, write: bool) -> None:
        """Apply a record before the first step.

        Args:
            state: the record.
            optimizers: those of the run.
            model: its model.
            write: whether the model is new, so that its optimizers do not have the changes yet.
                Otherwise they are the same optimizers, and values that the user has set since the
                last fit are kept.
        """
        self.policy_state = state.policy_state.resumed()
        for optimizer, done, settings in zip(optimizers, state.rates, state.settings):
            if done is not None:
                self.rate(optimizer).resume(done, write)
            both = (keras_optimizers.inner(optimizer), optimizer)
            for name, value in settings.items():
                self.change(next(t for t in both if hasattr(t, name)), name, value)
        self.returns, self.scale_bounds = state.recovery, state.scale_bounds
        self.diverged = state.diverged
        if state.lowered is not None:
            self.lowered_at = (-state.lowered[0], -state.lowered[1])
        if state.recalibration is not None:
            self.estimate(model, *state.recalibration)

    def end(self) -> None:
        """Undo the changes to the optimizers."""
        for target, name, value in reversed(self.changed):
            setattr(target, name, value)
        self.changed.clear()
        for rate in self.rates.values():
            rate.release()

    # Changes that continue over several steps

    def tried(self, committed: int) -> bool:
        """Whether a step has committed at the present rate."""
        return committed > max(self.lowered_at[1] if self.lowered_at is not None else 0, 0)

    def estimate(self, model: Any, batches: int, seen: int = 0) -> None:
        """Start to re-estimate the statistics of all layers that update theirs."""
        layers = learning(model)
        self.recalibration = Recalibration(layers, batches, seen) if layers else None

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
            since = committed - (self.lowered_at[1] if self.lowered_at is not None else 0) - after
            if since >= 0:
                train_state()
                share = 1.0 if ramp <= 0 else min(since / ramp, 1.0)
                for rate in self.rates.values():
                    rate.restore(max(rate.lowest ** (1.0 - share), rate.factor))
                self.returns = None if share >= 1.0 else self.returns
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

    # Rollbacks

    def return_to(self, step: int, committed: int) -> None:
        """Continue counting from an earlier step."""
        if self.lowered_at is not None:
            self.lowered_at = min(self.lowered_at[0], step), min(self.lowered_at[1], committed)
        self.policy_state = self.policy_state.rewound()


# What outlives the fit

FORMAT = 2
"""Version of the JSON format of a `GuardState`."""

Pair = tuple[Whole, Whole]
Setting = Literal["global_clipnorm", "dynamic_growth_steps"]
"""A setting of an optimizer that an action may change during a fit."""

Value = Annotated[int | float, Field(ge=0, le=sys.float_info.max)]


class GuardState(Record):
    """The state of the guard besides the state of the model.

    Attributes:
        policy_state: the state of the policy.
        rates: the changes of each optimizer's rate; `None` for an unchanged one.
        settings: the changed settings of each optimizer by name, with their present values.
        rollbacks: number of rollbacks.
        recovery: `(after, ramp)` if a lowered rate is to return.
        lowered: steps and committed steps since the rate was last lowered.
        diverged: whether a rate was lowered because training diverged.
        scale_bounds: floor and ceiling of the loss scale.
        recalibration: remaining and past batches of an estimate of BatchNorm statistics.
    """

    policy_state: PolicyState
    rates: tuple[RateChange | None, ...] = ()
    settings: tuple[dict[Setting, Value | None], ...] = ()
    rollbacks: Whole = 0
    recovery: Pair | None = None
    lowered: Pair | None = None
    diverged: bool = False
    scale_bounds: tuple[float, float] | None = None
    recalibration: Pair | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values with a format number."""
        state = {"policy_state": self.policy_state.to_dict()}
        return {"format": FORMAT, **self.model_dump(mode="json", warnings=False), **state}

    @classmethod
    def from_dict(cls, data: Any) -> GuardState:
        """Rebuild a state from `to_dict()`.

        Raises:
            FileFormatError: if it is of another format, or a field is missing, unknown or of a
                wrong type.
        """
        names = {"format", *cls.model_fields}
        if isinstance(data, dict):  # the first files of this format do not have it
            data = {"diverged": False, **data}
        if not isinstance(data, dict) or data.get("format") != FORMAT or set(data) != names:
            received = sorted(data) if isinstance(data, dict) else type(data).__name__
            what = f"a guard state of format {FORMAT}"
            raise FileFormatError(expected(what, received, "Start without resume=True."))
        state = PolicyState.from_dict(data["policy_state"])
        try:
            plain = {name: value for name, value in data.items() if name != "format"}
            plain["policy_state"] = state.model_dump(mode="json")
            return cls.model_validate_json(json.dumps(plain))
        except (ValidationError, TypeError, ValueError, RecursionError) as error:
            text = f"The guard state has a malformed field: {plain_text(error)}"
            raise FileFormatError(text) from error
