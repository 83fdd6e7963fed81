"""What the steps of one body on PyTorch have shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from keras_nanguard._backends import interface

FIRST_STEPS = 2
"""Number of first steps in which the train state is read each time and everything is kept, to find
the tensors that a step writes.
"""

READ_EVERY = 100
"""Steps between two later readings of the train state."""


class Seen(Enum):
    """Whether the steps of a body so far have done something."""

    UNKNOWN = "unknown"
    NO = "no"
    YES = "yes"

    @classmethod
    def of(cls, done: bool) -> Seen:
        """Return what one step shows that has done it, or has not."""
        return cls.YES if done else cls.NO

    @property
    def is_possible(self) -> bool:
        """Whether the next step may do it, as far as is known."""
        return self is not Seen.NO

    def then(self, later: Seen) -> Seen:
        """Return what all steps show, with a later one: `YES` if any of them has done it."""
        return later if later is Seen.YES or self is Seen.UNKNOWN else self

    def of_another_body(self) -> Seen:
        """Return what is assumed of another body: what this one has not done, that one may do."""
        return self if self is Seen.YES else Seen.UNKNOWN


@dataclass(frozen=True)
class Learned(interface.Learned):
    """What the steps of one body have shown. Keys are the `id` of tensors; untracked ones are kept
    before each step.

    Attributes:
        steps: their number.
        stale: whether the train state has to be read again before the next one.
        unread: norms of the updated `weights` and `slots`, if they are still on a device. They are
            read with the verdict of the next step. If one is not finite, the tensors decide, which
            an action may have replaced until then.
        continues: whether the body may continue after its first update in a way that can make the
            step bad: with another update, loss or statistic, or because its loss is known at its
            end only; or in a way in which it must not wait for other processes before. Unknown
            until it has updated. A body with several optimizers may.
        uncounted: those of the untracked tensors whose writes torch does not count (`p.data.mul_`).
        adds_by_hand: whether the body adds to the gradients that it finds without a backward pass
            that is seen (`p.grad += new`, a compiled body), so that they are kept before each step.
            Unknown until it has found some.
    """

    updates_first: bool = True
    steps: int = 0
    stale: bool = True
    continues: Seen = Seen.UNKNOWN
    unread: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    uncounted: Mapping[int, Any] = field(default_factory=dict)
    adds_by_hand: Seen = Seen.UNKNOWN

    @property
    def is_fresh(self) -> bool:
        """Whether it is not known yet what the body writes."""
        return self.steps < FIRST_STEPS

    @property
    def is_reading_due(self) -> bool:
        """Whether the train state has to be read again before the next step."""
        return self.stale or self.is_fresh or self.steps % READ_EVERY == 0

    def after_error(self) -> Learned:
        """Return what is known after a step that has ended in an exception."""
        return replace(self, steps=self.steps + 1, stale=True)

    def of_another_body(self) -> Learned:
        """Return what is assumed of a body that may be another one: what this one has not done,
        that one may do.
        """
        return replace(
            self,
            steps=min(self.steps, 1),
            stale=True,
            continues=self.continues.of_another_body(),
            updates_first=True,
            adds_by_hand=self.adds_by_hand.of_another_body(),
        )
