"""The changes of the policy in a fit, besides the state of the model, and their record, which
outlives the fit and the process.

Some changes continue over several steps: a lowered rate returns, a loss scale stays within its
bounds, BatchNorm statistics are re-estimated. Usually there are none.

A plain learning rate is lowered in its own variable, where every other callback reads it. A
schedule or callable does not change, and neither does the saved config. Its value is multiplied, on
the instance, by a factor that the compiled step reads from a variable. In both cases

    rate of the next step = factor * rate without the guard
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple, get_args

import keras
from pydantic import Field, ValidationError

from keras_nanguard._core.errors import FileFormatError, expected
from keras_nanguard._core.json_records import Whole
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._fit.batchnorm import Recalibration, learning
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.overrides import Overrides
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.records import Record
from keras_nanguard._policy.state import PolicyState

# Learning rates

Factor = Annotated[float, Field(ge=sys.float_info.min)]


class RateChange(Record):
    """The changes of the learning rate of one optimizer.

    Attributes:
        factor: the current factor of the guard.
        lowest: the smallest factor since the rate was last unchanged.
        rate: a plain rate as the guard has left it; `None` for a schedule or a callable.
        absolute: whether another callback computes a plain rate itself, and does not scale it.
    """

    factor: Factor
    lowest: Factor
    rate: Annotated[float, Field(ge=0)] | None
    absolute: bool


class Rate:
    """The learning rate of one optimizer.

    Attributes:
        factor: the current factor of the guard.
        lowest: the smallest factor since the rate was last unchanged.
        given: replaces the factor of a schedule while a pure step function is traced.
    """

    def __init__(self, optimizer: Any):
        self.optimizer = keras_optimizers.inner(optimizer)
        self.factor = self.lowest = 1.0
        self._left: float | None = None  # the plain rate as the guard has left it
        self._absolute = False  # whether another callback computes the plain rate itself
        self._scale: Any = None
        self.given: Any = None
        self._overrides = Overrides()

    @property
    def plain(self) -> bool:
        """Whether the rate is a number in a variable, not a schedule or a callable."""
        return keras_optimizers.rate_variable(self.optimizer) is not None

    @property
    def unchanged(self) -> bool:
        """Whether neither the rate nor the compiled step was ever changed."""
        return self._left is None and self._scale is None and self.factor == 1.0

    @property
    def value(self) -> float:
        """The rate of the next step."""
        return keras_optimizers.learning_rate(self.optimizer)

    def make_adjustable(self) -> bool:
        """Make the compiled step read the factor; return whether it has to be compiled again."""
        if self.plain or self._scale is not None:
            return False
        name = "nanguard_rate_factor"
        scale = self._scale = keras.Variable(1.0, trainable=False, dtype="float32", name=name)

        def scaled(real: Callable[[], Any]) -> Any:
            rate = keras.ops.convert_to_tensor(real())
            return rate * keras.ops.cast(scale if self.given is None else self.given, rate.dtype)

        keras_optimizers.set_rate(self.optimizer, scaled, self._overrides)
        return True

    def restore(self, factor: float) -> None:
        """Set the factor to an earlier value; 1 is the rate of a run without the guard."""
        self.hold()
        self._set(factor)

    @contextmanager
    def tried(self, factor: float) -> Iterator[None]:
        """Multiply the rate inside the context."""
        before = self.factor, self.lowest, self._left, self._absolute
        variable = keras_optimizers.rate_variable(self.optimizer)
        restore = keras_variables.restorer(self._scale if variable is None else variable)
        if self.plain:
            self._assign(self.value * factor)
        else:
            self.factor *= factor
            self._scale.assign(self.factor)
        try:
            yield
        finally:
            self.factor, self.lowest, self._left, self._absolute = before
            restore()

    def lower(self, factor: float, min_lr: float, failed: float) -> tuple[float, float, bool]:
        """Multiply the rate; return `(before, after, retrace)`. `retrace`: whether the step has to
        be compiled again.

        Args:
            factor: the factor.
            min_lr: the lowest rate.
            failed: the rate of the step that failed. After a rollback a schedule may give a lower
                one, such as 0 at the start of a warmup.
        """
        self.hold()
        before = self.value
        if not self.plain and math.isfinite(failed) and not before >= failed:  # it may be NaN
            before = failed
        after = max(before * factor, min_lr)
        if after > before * (1 - 1e-6):  # the rate is a float32, min_lr is not
            after = before
        retrace = after < before and self._set(self.factor * after / before)
        return before, after, retrace

    def _set(self, factor: float) -> bool:
        ratio, self.factor = factor / self.factor, factor
        self.lowest = 1.0 if factor >= 1 else min(self.lowest, factor)
        if self.plain:
            self._assign(self.value * ratio)
            return False
        retrace = self.make_adjustable()
        self._scale.assign(factor)
        return retrace

    def _assign(self, value: float | None) -> None:
        keras_optimizers.rate_variable(self.optimizer).assign(value)
        self._left = self.value

    def hold(self) -> None:
        """Keep a plain rate lowered if another callback has set it since.

        A callback that scales the current rate (ReduceLROnPlateau) continues from the lowered one
        and needs no correction. One that computes the rate (LearningRateScheduler) always restores
        the old level. The first change distinguishes them: the geometric mean of the lowered and
        the old level is between the two.
        """
        if self._left is None or not self.plain or self.factor >= 1:
            return
        found = self.value
        if math.isclose(found, self._left, rel_tol=1e-6):
            return
        self._absolute |= found > self._left / math.sqrt(self.factor)
        self._assign(found * self.factor if self._absolute else found)

    def release(self) -> None:
        """Remove the scaling from the optimizer; a plain rate does not change."""
        if self._scale is not None:
            self._overrides.give_back()
            self._scale = None
            self.factor = 1.0

    def change(self) -> RateChange:
        """Return the changes of the rate."""
        return RateChange.model_construct(
            factor=self.factor,
            lowest=self.lowest,
            rate=self.value if self.plain else None,
            absolute=self._absolute,
        )

    def resume(self, done: RateChange, write: bool) -> None:
        """Restore the changes that `change` returned.

        Args:
            done: the changes.
            write: whether to write a plain rate. If not, a rate that someone has changed since
                counts as a new choice, and the earlier changes are forgotten.
        """
        if self.plain != (done.rate is not None):
            return
        if self.plain and write:
            self._assign(done.rate)
        elif self.plain and not math.isclose(self.value, done.rate or 0.0, rel_tol=1e-6):
            return
        self._left, self._absolute = done.rate, done.absolute
        self.factor = done.factor if self.plain else 1.0
        if done.factor < 1 and not self.plain:
            self._set(done.factor)
        self.lowest = done.lowest


# All changes


class Lowering(NamedTuple):
    """Why and since when the learning rates of a run are lowered.

    Attributes:
        diverged: whether a rate was lowered because training diverged.
        at: the numbers of steps and of committed steps when the rate was last lowered, or `None`.
        returns: `(after, ramp)` while a lowered rate is to return.
    """

    diverged: bool = False
    at: tuple[int, int] | None = None
    returns: tuple[int, int] | None = None


class Recovery:
    """The state and the changes of the policy in one fit.

    Attributes:
        policy_state: the state of the policy.
        rates: the changes of the learning rate of each optimizer, by `id`.
        lowering: why and since when they are lowered.
        changed: `(target, name, value before)` of each setting that was changed for this fit.
        scale_bounds: floor and ceiling of the loss scale.
        recalibration: the estimate of BatchNorm statistics in progress.
    """

    def __init__(self) -> None:
        self.policy_state = PolicyState()
        self.rates = dict[int, Rate]()
        self.lowering = Lowering()
        self.changed: list[tuple[Any, str, Any]] = []
        self.scale_bounds: tuple[float, float] | None = None
        self.recalibration: Recalibration | None = None

    @property
    def active(self) -> bool:
        """Whether there is something to do after each good step."""
        return bool(self.lowering.returns or self.scale_bounds or self.recalibration)

    # Settings of the optimizers

    def rates_restorer(self) -> Callable[[], None]:
        """Return a function that lowers the rates as now, undoing all later changes to them."""
        factors = {key: rate.factor for key, rate in self.rates.items()}
        lowering = self.lowering

        def restore() -> None:
            for key, rate in self.rates.items():
                rate.restore(factors.get(key, 1.0))
            self.lowering = lowering

        return restore

    def rate(self, optimizer: Any) -> Rate:
        """Return the rate of one optimizer."""
        if id(optimizer) not in self.rates:
            self.rates[id(optimizer)] = Rate(optimizer)
        return self.rates[id(optimizer)]

    def forget_unchanged_rates(self) -> None:
        """Forget the rates that have no change, so that no step has to keep them."""
        self.rates = {key: rate for key, rate in self.rates.items() if not rate.unchanged}

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
        rates = list(self.rates.values())
        for rate in rates:
            rate.given = numbers.get(id(rate))
        try:
            yield
        finally:
            for rate in rates:
                rate.given = None

    # For the next fit, and another process

    def saved(
        self, optimizers: Sequence[Any], step: int, committed: int, rollbacks: int
    ) -> GuardState:
        """Return the record of all changes. Its numbers may be invalid: the user may have set them.

        Args:
            optimizers: those of the run.
            step, committed, rollbacks: its counters.
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
        estimate, (diverged, at, returns) = self.recalibration, self.lowering
        since = None if at is None else (step - at[0], committed - at[1])
        return GuardState.model_construct(
            policy_state=self.policy_state,
            rates=tuple(rate.change() if rate is not None else None for rate in rates),
            settings=tuple(settings),
            rollbacks=rollbacks,
            recovery=returns,
            lowered=since,
            diverged=diverged,
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
        at = None if state.lowered is None else (-state.lowered[0], -state.lowered[1])
        self.lowering = Lowering(state.diverged, at, state.recovery)
        self.scale_bounds = state.scale_bounds
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

    @property
    def _lowered_at(self) -> int:
        """Number of committed steps when the rate was last lowered, 0 if it never was."""
        return self.lowering.at[1] if self.lowering.at is not None else 0

    def tried(self, committed: int) -> bool:
        """Whether a step has committed at the current rate."""
        return committed > max(self._lowered_at, 0)

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
            train_state: returns the train state, whose variables have the current values.
        """
        if self.lowering.returns is not None:
            after, ramp = self.lowering.returns
            since = committed - self._lowered_at - after
            if since >= 0:
                train_state()
                share = 1.0 if ramp <= 0 else min(since / ramp, 1.0)
                for rate in self.rates.values():
                    rate.restore(max(rate.lowest ** (1.0 - share), rate.factor))
                if share >= 1.0:
                    self.lowering = self.lowering._replace(returns=None)
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
        if self.lowering.at is not None:
            at = min(self.lowering.at[0], step), min(self._lowered_at, committed)
            self.lowering = self.lowering._replace(at=at)
        self.policy_state = self.policy_state.rewound()


# State that outlives the fit

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
        settings: the changed settings of each optimizer by name, with their current values.
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
