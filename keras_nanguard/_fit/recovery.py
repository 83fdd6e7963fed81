"""What the policy has changed in the course of a fit, besides the state of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from keras_nanguard._fit.adaptive_clip import AdaptiveClip
from keras_nanguard._fit.counts import Counts
from keras_nanguard._fit.learning_rates import Rate
from keras_nanguard._fit.live_state import LiveState
from keras_nanguard._fit.pending_recovery import PendingRecovery
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._policy.ledger import Ledger

__all__ = ["Recovery"]


class Recovery:
    """What the policy remembers and has changed: learning rates, settings of optimizers, and what is still to come.

    Attributes:
        ledger: what the policy remembers.
        rates: what was done to the learning rate of each optimizer, by `id`.
        clips: how the gradients of each are clipped, by `id`.
        pending: what goes on from step to step.
        noted: the rate of each optimizer when the last decision was made, by `id`.
        changed: `(target, name, value before)` of each setting that was changed for the time of the fit.
    """

    def __init__(self, state: LiveState, counts: Counts):
        self.state, self.counts = state, counts
        self.ledger = Ledger()
        self.rates: dict[int, Rate] = {}
        self.clips: dict[int, AdaptiveClip] = {}
        self.pending = PendingRecovery(state, counts, self.rates)
        self.changed: list[tuple[Any, str, Any]] = []
        self.noted: dict[int, float] = {}

    @property
    def diverged(self) -> bool:
        """Whether a rate was lowered because training diverged."""
        return any(rate.limit < math.inf for rate in self.rates.values())

    @property
    def goes_on(self) -> bool:
        """Whether there is something to do after each good step."""
        return self.pending.active or bool(self.clips)

    @property
    def bounded(self) -> bool:
        """Whether the rate of a schedule has to stay below a limit, and so has to be looked at before each step."""
        return any(rate.limit < math.inf and not rate.plain for rate in self.rates.values())

    def rate(self, optimizer: Any) -> Rate:
        """Return the rate of one optimizer, which remembers what the guard has done to it."""
        return self.rates.setdefault(id(optimizer), Rate(optimizer))

    def clip(self, optimizer: Any, deviations: float, smoothing: float) -> AdaptiveClip:
        """Return what clips the gradients of one optimizer, from here on as given."""
        clip = self.clips.setdefault(id(optimizer), AdaptiveClip(optimizer))
        clip.deviations, clip.smoothing = deviations, smoothing
        return clip

    def note_rates(self) -> None:
        """Note the rates of this moment: a rollback takes a schedule back to where it was."""
        self.noted = {id(o): keras_optimizers.learning_rate(o) for o in self.state.train_state().optimizers}

    def change(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute until the fit ends."""
        self.changed.append((target, name, getattr(target, name)))
        setattr(target, name, value)

    def adjustments(self) -> dict[int, Any]:
        """Return the numbers that a step reads: what rates that are no variables are multiplied by, and how gradients are clipped.

        By `id` of what reads them.
        """
        factors: dict[int, Any] = {id(rate): rate.factor for rate in self.rates.values() if not rate.plain}
        return factors | {id(clip): clip.numbers for clip in self.clips.values()}

    @contextmanager
    def with_adjustments(self, numbers: Mapping[int, Any]) -> Iterator[None]:
        """Let rates and clipping read these numbers inside the context."""
        known: list[Any] = [*self.rates.values(), *self.clips.values()]
        readers = [reader for reader in known if id(reader) in numbers]
        for reader in readers:
            reader.given = numbers[id(reader)]
        try:
            yield
        finally:
            for reader in readers:
                reader.given = None

    def before(self) -> None:
        """Do what is due before an execution."""
        self.pending.begin_counting()
        for rate in self.rates.values():
            rate.hold()

    def end(self) -> None:
        """Take off the optimizers what the guard has put on them."""
        for target, name, value in reversed(self.changed):
            setattr(target, name, value)
        self.changed.clear()
        for rate in self.rates.values():
            rate.release()
        for clip in self.clips.values():
            clip.release()
