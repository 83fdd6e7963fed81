"""The changes of a policy during training, as data that outlives the fit and the process.

The snapshots have the state of the model. This record has the state of the rules, and how far
learning rate, clipping, loss scale and seeds differ from the user's choice.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError

from keras_nanguard._core.errors import FileFormatError, expected
from keras_nanguard._core.incident import Whole
from keras_nanguard._core.plain_text import plain_text
from keras_nanguard._fit.learning_rates import RateChange
from keras_nanguard._fit.run import Run
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._policy.records import Record
from keras_nanguard._policy.state import PolicyState

__all__ = ["GuardState"]

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
        lowered: steps and good steps since the rate was last lowered.
        scale_bounds: floor and ceiling of the loss scale.
        recalibration: remaining and past batches of an estimate of BatchNorm statistics.
    """

    policy_state: PolicyState
    rates: tuple[RateChange | None, ...] = ()
    settings: tuple[dict[Setting, Value | None], ...] = ()
    rollbacks: Whole = 0
    recovery: Pair | None = None
    lowered: Pair | None = None
    scale_bounds: tuple[float, float] | None = None
    recalibration: Pair | None = None

    @classmethod
    def of(cls, run: Run) -> GuardState:
        """Return the state of a run. Its numbers may be invalid: the user may have set them."""
        optimizers, recovery, counts = run.train_state().optimizers, run.recovery, run.counts
        rates = [recovery.rates.get(id(optimizer)) for optimizer in optimizers]
        touched = {(id(target), name) for target, name, _ in recovery.changed}
        estimate, at, lowered = recovery.recalibration, recovery.lowered_at, None
        if at is not None:
            lowered = (counts.step - at, counts.committed - recovery.lowered_good)
        return cls.model_construct(
            policy_state=recovery.policy_state,
            rates=tuple(rate.change() if rate is not None else None for rate in rates),
            settings=tuple(dict(_changed(optimizer, touched)) for optimizer in optimizers),
            rollbacks=counts.rollbacks,
            recovery=recovery.returns,
            lowered=lowered,
            scale_bounds=recovery.scale_bounds,
            recalibration=None if estimate is None else (estimate.left, estimate.seen),
        )

    def apply(self, run: Run, *, write: bool) -> None:
        """Apply the state to a run that has not begun.

        Args:
            run: the run, without changes of the policy so far.
            write: whether the model is new, so that its optimizers do not have the changes yet.
                Otherwise they are the same optimizers, and values that the user has set since the
                last fit are kept.
        """
        recovery = run.recovery
        recovery.policy_state = self.policy_state.resumed()
        run.counts.rollbacks = self.rollbacks
        optimizers = run.train_state().optimizers
        for optimizer, done, settings in zip(optimizers, self.rates, self.settings):
            if done is not None:
                recovery.rate(optimizer).resume(done, write)
            both = (keras_optimizers.inner(optimizer), optimizer)
            for name, value in settings.items():
                recovery.change(next(t for t in both if hasattr(t, name)), name, value)
        recovery.returns, recovery.scale_bounds = self.recovery, self.scale_bounds
        if self.lowered is not None:
            recovery.lowered_at, recovery.lowered_good = (-since for since in self.lowered)
        if self.recalibration is not None:
            recovery.estimate(run.model, *self.recalibration)

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


def _changed(optimizer: Any, touched: set[tuple[int, str]]) -> Iterator[tuple[str, Any]]:
    for target in (optimizer, keras_optimizers.inner(optimizer)):
        for name in get_args(Setting):
            if (id(target), name) in touched:
                yield name, getattr(target, name)
