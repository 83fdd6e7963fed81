"""The changes of a policy during training, as data that outlives the fit and the process.

The snapshots have the state of the model. This record has the state of the rules, and how far
learning rate, clipping, loss scale and seeds differ from the user's choice.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from keras_nanguard._core.errors import FileFormatError, expected
from keras_nanguard._core.plain_text import plain_text
from keras_nanguard._core.stored_records import STORED, Whole, stored
from keras_nanguard._fit.recovery import Recovery
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._policy.state import PolicyState

__all__ = ["GuardState"]

FORMAT = 2
"""Version of the JSON format of a `GuardState`."""

SETTINGS = ("global_clipnorm", "dynamic_growth_steps")
"""Settings of an optimizer that an action may change during a fit."""

RATE = frozenset({"factor", "lowest", "rate", "absolute"})
"""The keys that `Rate.to_dict` returns."""


@dataclass(frozen=True, slots=True)
class GuardState:
    """The state of the guard besides the state of the model.

    Attributes:
        policy_state: the state of the policy, as `PolicyState.to_dict()`.
        rates: the changes of each optimizer's rate, as `Rate.to_dict()`; `None` for an unchanged
            one.
        settings: the changed settings of each optimizer by name, with their present values.
        rollbacks: number of rollbacks.
        recovery: `(after, ramp)` if a lowered rate is to return.
        lowered: steps and good steps since the rate was last lowered.
        scale_bounds: floor and ceiling of the loss scale.
        recalibration: remaining and past batches of an estimate of BatchNorm statistics.
    """

    __pydantic_config__ = STORED

    policy_state: Mapping[str, Any]
    rates: tuple[Mapping[str, Any] | None, ...] = ()
    settings: tuple[Mapping[str, Any], ...] = ()
    rollbacks: Whole = 0
    recovery: tuple[Whole, Whole] | None = None
    lowered: tuple[Whole, Whole] | None = None
    scale_bounds: tuple[float, float] | None = None
    recalibration: tuple[Whole, Whole] | None = None

    @classmethod
    def of(cls, recovery: Recovery) -> GuardState:
        """Return the state of a run."""
        optimizers = recovery.state.train_state().optimizers
        rates = [recovery.rates.get(id(optimizer)) for optimizer in optimizers]
        touched = {(id(target), name) for target, name, _ in recovery.changed}
        counts, pending = recovery.counts, recovery.pending
        estimate, at = pending.recalibration, pending.lowered_at
        return cls(
            policy_state=recovery.policy_state.to_dict(),
            rates=tuple(rate.to_dict() if rate is not None else None for rate in rates),
            settings=tuple(dict(_changed(optimizer, touched)) for optimizer in optimizers),
            rollbacks=counts.rollbacks,
            recovery=pending.recovery,
            lowered=None
            if at is None
            else (counts.step - at, counts.committed - pending.lowered_good),
            scale_bounds=pending.scale_bounds,
            recalibration=None if estimate is None else (estimate.left, estimate.seen),
        )

    def apply(self, recovery: Recovery, *, write: bool) -> None:
        """Apply the state to a run that has not begun.

        Args:
            recovery: the changes of that run, still empty.
            write: whether the model is new, so that its optimizers do not have the changes yet.
                Otherwise they are the same optimizers, and values that the user has set since the
                last fit are kept.
        """
        recovery.policy_state = PolicyState.from_dict(self.policy_state).resumed()
        recovery.counts.rollbacks = self.rollbacks
        optimizers = recovery.state.train_state().optimizers
        for optimizer, done, settings in zip(optimizers, self.rates, self.settings):
            if done is not None:
                recovery.rate(optimizer).resume(done, write)
            for name, value in settings.items():
                recovery.change(
                    next(
                        t
                        for t in (keras_optimizers.inner(optimizer), optimizer)
                        if hasattr(t, name)
                    ),
                    name,
                    value,
                )
        pending = recovery.pending
        pending.recovery, pending.scale_bounds = self.recovery, self.scale_bounds
        if self.lowered is not None:
            pending.lowered_at, pending.lowered_good = (-since for since in self.lowered)
        if self.recalibration is not None:
            pending.estimate(*self.recalibration)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values with a format number."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Any) -> GuardState:
        """Rebuild a state from `to_dict()`.

        Raises:
            FileFormatError: if it is of another format, or a field is missing, unknown or of a
                wrong type.
        """
        names = {"format", *(entry.name for entry in fields(cls))}
        if not isinstance(data, Mapping) or data.get("format") != FORMAT or set(data) != names:
            received = sorted(data) if isinstance(data, Mapping) else type(data).__name__
            raise FileFormatError(
                expected(
                    f"a guard state of format {FORMAT}", received, "Start without resume=True."
                )
            )
        try:
            found = stored(cls, {key: value for key, value in data.items() if key != "format"})
            PolicyState.from_dict(found.policy_state)
            found.check()
            return found
        except FileFormatError:
            raise
        except ValueError as error:
            raise FileFormatError(
                f"The guard state has a malformed field: {plain_text(error)}"
            ) from error

    def check(self) -> None:
        """Check the values of the fields after reading a file.

        Raises:
            ValueError: if one has a value that `of` cannot return.
        """
        for settings in self.settings:
            if unknown := set(settings) - set(SETTINGS):
                raise ValueError(f"{sorted(unknown)[0]} is not a setting that actions change")
            if not all(_fits(name, value) for name, value in settings.items()):
                raise ValueError("a setting is not a number")
        for record in self.rates:
            if record is not None and not (
                set(record) == RATE and all(map(_fits, record, record.values()))
            ):
                raise ValueError(f"expected only {', '.join(sorted(RATE))}")


def _fits(name: str, value: Any) -> bool:
    """Whether a number of a rate, clip or setting is valid: finite and not negative, or `None`."""
    if name == "absolute":
        return isinstance(value, bool)
    if value is None:
        return name in ("rate", *SETTINGS)
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and _LEAST.get(name, 0.0) <= value <= sys.float_info.max
    )


_LEAST = dict.fromkeys(("factor", "lowest"), sys.float_info.min)


def _changed(optimizer: Any, touched: set[tuple[int, str]]) -> Iterator[tuple[str, Any]]:
    for target in (optimizer, keras_optimizers.inner(optimizer)):
        for name in SETTINGS:
            if (id(target), name) in touched:
                yield name, getattr(target, name)
