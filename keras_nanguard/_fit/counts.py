"""How far a fit has come: steps and epochs, and what was skipped on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from typing import Any, NamedTuple

__all__ = ["Counts", "Totals"]

_MAX_EPOCHS = 256
"""Epochs whose place is remembered: no more steps are run again than that."""


class Totals(NamedTuple):
    """What the counters of one fit, or of several, come to; the fields are those of `Counts`."""

    steps: int = 0
    refused: int = 0
    overflows: int = 0
    run_again: int = 0

    def plus(self, counts: Counts) -> Totals:
        """Return the totals with those of one more fit."""
        return Totals(*map(sum, zip(self, (counts.step, counts.refused, counts.overflows, counts.run_again))))


class Counts:
    """The counters of one fit.

    Attributes:
        step: train steps that are complete, refused ones included.
        committed: how many of them have committed.
        refused: how many of them were refused.
        overflows: how many of those were ordinary float16 overflows, which are no incident.
        run_again: how many more were refused, undone by a rollback, and run again.
        streak: how many steps in a row overflowed in this way; under a policy that refuses nothing 1 after a bad step.
        last_refused: whether the last step was refused.
        rollbacks: how often the guard rolled back to a snapshot.
        restored: the step that the last snapshot was taken at that was restored, `None` before the first.
        epoch, epoch_start: the epoch that runs, and the step it started at.
        epoch_refused, epoch_passed: refused steps of this epoch, and batches of it that no step has seen.
        epoch_rollbacks: how often the guard had rolled back when this epoch began.
        skip_batches: how many batches are still to be skipped.
    """

    def __init__(self) -> None:
        self.step = self.committed = self.refused = self.overflows = self.streak = self.rollbacks = self.skip_batches = 0
        self.run_again = 0
        self.epoch = self.epoch_start = self.epoch_refused = self.epoch_passed = self.epoch_rollbacks = 0
        self.last_refused = False
        self.restored: int | None = None
        self._began = self._overflows_before = 0
        self._epochs: deque[tuple[int, int, int]] = deque(maxlen=_MAX_EPOCHS)

    def begin_epoch(self, epoch: int) -> None:
        """Count batches and refused steps from here."""
        if self.step > self._began:
            self._epochs.append((self._began, self.epoch, self.epoch_start))
        self._began = self.step
        self.epoch, self.epoch_start, self.epoch_refused, self.epoch_passed = epoch, self.step, 0, 0
        self.epoch_rollbacks, self._overflows_before = self.rollbacks, self.overflows

    def resume_epoch(self, batches: int) -> None:
        """Skip the batches that an earlier run has trained on in this epoch; its metrics go on."""
        self.skip_batches, self.epoch_passed = batches, -batches

    def refuse(self, steps: int = 1) -> None:
        """Count refused steps."""
        self.refused += steps
        self.epoch_refused += steps

    def return_to(self, step: int, committed: int, again: Set[int] = frozenset()) -> None:
        """Count from an earlier step on again: these of the refused ones since are replayed."""
        self.step, self.committed = step, committed
        self.refused -= len(again)
        self.run_again += len(again)
        here = sum(number >= self.epoch_start for number in again)
        self.epoch_refused = max(self.epoch_refused - here, 0)

    def skips_batches(self, iterator: Any, batches: int) -> bool:
        """Skip the batches of one execution, if some are to be skipped."""
        if self.skip_batches <= 0:
            return False
        for _ in range(batches):
            next(iterator)
            self.skip_batches = max(self.skip_batches - 1, 0)
            self.epoch_start -= 1
            self.epoch_passed += 1
        return True

    def batch(self, step: int) -> int:
        """Return which batch of the epoch a step has trained on, from 0."""
        return max(step - self.epoch_start, 0)

    def place(self, step: int) -> tuple[int, int]:
        """Return epoch and batch of a step, both from 0; a step that is run again may be of an earlier epoch."""
        for began, epoch, start in reversed(self._epochs) if step < self._began else ():
            if step >= began:
                return epoch, step - start
        return self.epoch, self.batch(step)

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and how many of its batches are through or will be skipped."""
        return self.epoch, self.step - self.epoch_start + self.skip_batches

    @property
    def epoch_committed(self) -> int:
        """How many steps of this epoch have committed."""
        return self.step - self.epoch_start - self.epoch_refused - self.epoch_passed

    @property
    def epoch_overflows(self) -> int:
        """How many steps of this epoch were refused for an ordinary float16 overflow."""
        return self.overflows - self._overflows_before

    @property
    def idle(self) -> bool:
        """Whether no step of this epoch has committed so far, so that its metrics hold nothing."""
        return self.epoch_committed <= 0
