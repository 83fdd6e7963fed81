"""The changes of the policy in a fit, besides the state of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from keras_nanguard._fit.counts import Counts
from keras_nanguard._fit.learning_rates import Rate
from keras_nanguard._fit.live_state import LiveState
from keras_nanguard._fit.pending_recovery import PendingRecovery
from keras_nanguard._policy.state import PolicyState

__all__ = ["Recovery"]


class Recovery:
    """The state and the changes of the policy: learning rates, settings of optimizers, and pending
    changes.

    Attributes:
        policy_state: the state of the policy.
        rates: the changes of the learning rate of each optimizer, by `id`.
        pending: changes that continue over several steps.
        diverged: whether a rate was lowered because training diverged.
        changed: `(target, name, value before)` of each setting that was changed for this fit.
    """

    def __init__(self, state: LiveState, counts: Counts):
        self.state, self.counts = state, counts
        self.policy_state = PolicyState()
        self.rates: dict[int, Rate] = {}
        self.pending = PendingRecovery(state, counts, self.rates)
        self.changed: list[tuple[Any, str, Any]] = []
        self.diverged = False

    @property
    def goes_on(self) -> bool:
        """Whether there is something to do after each good step."""
        return self.pending.active

    def rate(self, optimizer: Any) -> Rate:
        """Return the rate of one optimizer."""
        return self.rates.setdefault(id(optimizer), Rate(optimizer))

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

    def before(self) -> None:
        """Run due tasks before an execution."""
        self.pending.begin_counting()
        for rate in self.rates.values():
            rate.hold()

    def end(self) -> None:
        """Undo the changes to the optimizers."""
        for target, name, value in reversed(self.changed):
            setattr(target, name, value)
        self.changed.clear()
        for rate in self.rates.values():
            rate.release()
