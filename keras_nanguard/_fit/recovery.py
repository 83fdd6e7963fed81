"""The changes of the policy in a fit, besides the state of the model, and their record, which
outlives the fit and the process.

Some changes continue over several steps: a lowered rate returns, a loss scale stays within its
bounds. Usually there are none.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Field, ValidationError

from keras_nanguard._core.errors import FileFormatError, expected
from keras_nanguard._core.json_records import Whole
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._fit.rates import Lowering, Rate, RateChange
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.overrides import Overrides
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.decide import PolicyState
from keras_nanguard._policy.records import Record

SCALE_INTERVAL = 50
"""Maximum number of steps between two looks at a loss scale that stays in a range: other code may
set it. Dynamic scaling raises it after a known number of good steps.
"""


class LoweredRates(NamedTuple):
    """How the learning rates are lowered: the factor of each by `id` of its optimizer, and why."""

    factors: Mapping[int, float]
    lowering: Lowering


class Recovery:
    """The state and the changes of the policy in one fit.

    Attributes:
        rates: the changes of the learning rate of each optimizer, by `id`.
        lowering: why and since when they are lowered.
        changed: `(target, name, value before)` of each setting that was changed for this fit.
        scale_bounds: floor and ceiling of the loss scale.
    """

    def __init__(self) -> None:
        self.policy_state = PolicyState()
        self.rates = dict[int, Rate]()
        self.lowering = Lowering()
        self.changed: list[tuple[Any, str, Any]] = []
        self.scale_bounds: tuple[float, float] | None = None

    @property
    def active(self) -> bool:
        """Whether there is something to do after some of the good steps."""
        return bool(self.lowering.recover_after or self.scale_bounds)

    # The counts of the policy

    def count(self, counted: PolicyState) -> None:
        """Continue with a state that has counted an incident, the outcomes of its decision, or a
        good result; or with other streaks, as replayed steps have their own.
        """
        self.policy_state = counted

    # Settings of the optimizers

    @property
    def lowered_rates(self) -> LoweredRates:
        """How the rates are lowered now."""
        factors = {key: rate.factor for key, rate in self.rates.items()}
        return LoweredRates(factors, self.lowering)

    def restore_rates(self, earlier: LoweredRates) -> None:
        """Lower the rates as at an earlier time."""
        for key, rate in self.rates.items():
            rate.restore(earlier.factors.get(key, 1.0))
        self.lowering = earlier.lowering

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Return a context that undoes all changes to rates and settings in it if it raises, so
        that they fit the step as it was compiled before.
        """
        before, settings = self.lowered_rates, len(self.changed)
        adjustable = {key for key, rate in self.rates.items() if rate.adjustable}
        try:
            yield
        except BaseException:  # an optimizer or a schedule of the user's own may raise
            self.restore_rates(before)
            for key, rate in self.rates.items():
                if key not in adjustable:
                    rate.release()
            self._give_back(settings)
            raise

    def rate(self, optimizer: Any) -> Rate:
        """Return the rate of one optimizer."""
        if id(optimizer) not in self.rates:
            self.rates[id(optimizer)] = Rate(optimizer)
        return self.rates[id(optimizer)]

    @property
    def rate_factor(self) -> float:
        """The factor of the guard on learning rates: the smallest one of all optimizers."""
        return min((rate.factor for rate in self.rates.values()), default=1.0)

    def change(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute until the fit ends."""
        self.changed.append((target, name, getattr(target, name)))
        setattr(target, name, value)

    def _give_back(self, first: int = 0) -> None:
        """Set the attributes back that were changed, from the `first` change on."""
        for target, name, value in reversed(self.changed[first:]):
            setattr(target, name, value)
        del self.changed[first:]

    def adjustments(self) -> dict[int, Any]:
        """Return the factors of rates that are not variables, by `id` of their reader."""
        return {id(rate): rate.factor for rate in self.rates.values() if not rate.plain}

    @property
    def is_built_in(self) -> bool:
        """Whether any change is built into a compiled step: of a rate that is no variable, or of a
        setting.
        """
        return bool(self.adjustments() or self.changed)

    @contextmanager
    def with_adjustments(self, numbers: Mapping[int, Any]) -> Iterator[None]:
        """Replace the factors of the rates by these numbers inside the context."""
        with Overrides() as replaced:
            for rate in self.rates.values():
                replaced.set(rate, "given", numbers.get(id(rate)))
            yield

    # For the next fit, and another process

    def saved(
        self, optimizers: Sequence[Any], steps: int, committed: int, rollbacks: int
    ) -> GuardState:
        """Return the record of all changes, for a fit that begins now. Its numbers may be invalid:
        the user may have set them.
        """
        known = {key: rate.change() for key, rate in self.rates.items() if not rate.unchanged}
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
        at = None if self.lowering.at is None else self.lowering.at - committed
        return GuardState.model_construct(
            policy_state=self.policy_state.after_fit(steps),
            rates=tuple(known.get(id(optimizer)) for optimizer in optimizers),
            settings=tuple(settings),
            rollbacks=rollbacks,
            lowering=self.lowering.replaced(at=at),
            scale_bounds=self.scale_bounds,
        )

    def resume(self, state: GuardState, optimizers: Sequence[Any], write: bool) -> None:
        """Apply a record before the first step.

        Args:
            write: whether the optimizers do not have the changes yet. Otherwise they are the same
                ones, or another callback has restored them, and a learning rate that was set
                since the record is kept.
        """
        self.policy_state = state.policy_state
        for optimizer, done, settings in zip(optimizers, state.rates, state.settings):
            if done is not None and self.rate(optimizer).resume(done, write):
                self.lowering = state.lowering
            both = (keras_optimizers.inner(optimizer), optimizer)
            for name, value in settings.items():
                target = next((t for t in both if hasattr(t, name)), None)
                if target is not None:  # else this optimizer has no such setting
                    self.change(target, name, value)
        self.scale_bounds = state.scale_bounds

    def end(self) -> None:
        """Undo the changes to the optimizers."""
        self._give_back()
        for rate in self.rates.values():
            rate.release()

    # Changes that continue over several steps

    def lowered(self, committed: int, diverged: bool, recover_after: int) -> None:
        """Note that a rate was lowered after this many committed steps. It stays lowered if that
        was ever done because training `diverged`; else it returns after some good steps.
        """
        diverged |= self.lowering.diverged
        after = 0 if diverged else recover_after
        self.lowering = Lowering(diverged=diverged, at=committed, recover_after=after)

    def keep_rates(self) -> None:
        """Let the rates stay as they are: they were set back, or training has ended."""
        self.lowering = self.lowering.replaced(recover_after=0)

    def bound_scale(self, floor: float, ceiling: float) -> None:
        """Keep the loss scale within these bounds."""
        self.scale_bounds = (floor, ceiling)

    def after_good_step(self, committed: int, train_state: TrainState) -> float:
        """Run due tasks after a good step, or after an execution of several whose last one was
        good; return the number of further steps until something may be due, infinity for never.
        """
        left = math.inf
        if self.lowering.recover_after:
            left = self.lowering.recover_after - (committed - (self.lowering.at or 0))
            if left <= 0:
                for rate in self.rates.values():
                    rate.restore(1.0)
                self.keep_rates()
                left = math.inf
        if self.scale_bounds is not None:
            left = min(left, _keep_scales(train_state, *self.scale_bounds))
        return left

    # Rollbacks

    def return_to(self, committed: int) -> None:
        """Continue counting from fewer committed steps."""
        if self.lowering.at is not None:
            self.lowering = self.lowering.replaced(at=min(self.lowering.at, committed))
        self.count(self.policy_state.with_streaks_of(PolicyState()))


def _keep_scales(train_state: TrainState, floor: float, ceiling: float) -> int:
    """Write the nearest bound into each loss scale that is out of its range; return the number of
    steps until one may be out of it again.

    A restored count of good steps may be beyond a number of growth steps that was lowered since.
    Keras would then never double the scale, so it doubles after the next good step.
    """
    left = SCALE_INTERVAL
    for optimizer in filter(keras_optimizers.scales_of, train_state.optimizers):
        scale, counter = keras_optimizers.scales_of(optimizer)
        value = float(keras_variables.read(scale))
        if not floor <= value <= ceiling:
            keras_variables.write(scale, min(max(value, floor), ceiling))
        growth = optimizer.dynamic_growth_steps - int(keras_variables.read(counter))
        if growth < 1 <= optimizer.dynamic_growth_steps:
            keras_variables.write(counter, optimizer.dynamic_growth_steps - 1)
        left = min(left, max(growth, 1))
    return left


# State that outlives the fit

FORMAT = 5
"""Version of the JSON format of a `GuardState`. That of version 4 had an estimate of BatchNorm
statistics besides, which lasted for several steps.
"""

Setting = Literal["global_clipnorm", "dynamic_growth_steps"]
"""A setting of an optimizer that an action may change during a fit."""

Value = Annotated[int | float, Field(ge=0, le=sys.float_info.max)]


class GuardState(Record):
    """The state of the guard besides the state of the model.

    Attributes:
        policy_state: the state of the policy, for a fit that begins now.
        rates: the changes of each optimizer's rate; `None` for an unchanged one.
        settings: the changed settings of each optimizer by name, with their current values.
        rollbacks: number of rollbacks so far.
        lowering: why and since when the rates are lowered, for a fit that begins now.
        scale_bounds: floor and ceiling of the loss scale.
    """

    policy_state: PolicyState
    rates: tuple[RateChange | None, ...] = ()
    settings: tuple[dict[Setting, Value | None], ...] = ()
    rollbacks: Whole = 0
    lowering: Lowering = Lowering()
    scale_bounds: tuple[float, float] | None = None

    def without_replaced(self, before: Sequence[Any], now: Sequence[Any]) -> GuardState:
        """Return the state without the changes of optimizers, or of their rates, in whose place
        there are others now: those are new choices.

        Args:
            before, now: the optimizers and rates; see `_keras.optimizers.passed`.
        """
        rates: list[RateChange | None] = [None] * len(now)
        settings: list[dict[Any, Any]] = [{} for _ in now]
        for place, (optimizer, rate) in enumerate(now):
            for earlier, (other, other_rate) in enumerate(before):
                if other is optimizer:
                    settings[place] = self.settings[earlier]
                    rates[place] = self.rates[earlier] if other_rate is rate else None
        return self.replaced(rates=tuple(rates), settings=tuple(settings))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values with a format number."""
        return {"format": FORMAT, **self.model_dump(mode="json", warnings=False)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> GuardState:
        """Rebuild a state from `to_dict()`, of this format or the one before.

        Raises:
            FileFormatError: if it is of another format, or a field is missing, unknown or of a
                wrong type.
        """
        what, remedy = f"a guard state of format {FORMAT}", "Start without resume=True."
        if data.get("format") == FORMAT - 1:
            rest = {name: value for name, value in data.items() if name != "recalibration"}
            data = {**rest, "format": FORMAT}
        if data.get("format") != FORMAT:
            found = plain_text(f"format={data.get('format')!r}")
            raise FileFormatError(expected(what, found, remedy))
        try:
            plain = {name: value for name, value in data.items() if name != "format"}
            state = cls.model_validate_json(json.dumps(plain))
        except (ValidationError, TypeError, ValueError, RecursionError) as error:
            text = f"The guard state has a malformed field: {plain_text(error)}"
            raise FileFormatError(text) from error
        if state.to_dict() != data:
            raise FileFormatError(expected(what, "one in which a field is missing", remedy))
        return state
