"""The counters of one fit, and their totals over several fits."""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from typing import NamedTuple

_MAX_EPOCHS = 256
"""Number of epochs whose first step is remembered, for replays."""


class Totals(NamedTuple):
    """Sums of the counters of one or several fits; the fields are those of `Counts`."""

    steps: int = 0
    refused: int = 0
    overflows: int = 0
    run_again: int = 0

    def plus(self, counts: Counts) -> Totals:
        """Return the totals including another fit."""
        more = (counts.step, counts.refused, counts.overflows, counts.run_again)
        return Totals(*map(sum, zip(self, more)))


class Counts:
    """The counters of one fit.

    Attributes:
        step: complete train steps, including refused ones.
        committed: committed steps.
        good: committed steps that no rollback has undone.
        refused: refused steps.
        overflows: refused steps that were ordinary float16 overflows, which are not incidents.
        run_again: further steps that were refused, undone by a rollback, and replayed.
        streak: float16 overflows in a row.
        last_refused: whether the last step was refused.
        rollbacks: number of rollbacks.
        restored: the step of the last restored snapshot, `None` before the first rollback.
        epoch, epoch_start: the current epoch, and its first step.
        epoch_refused, epoch_passed: refused steps of this epoch, and its batches without a step.
        epoch_rollbacks: number of rollbacks before this epoch.
        skip_batches: number of batches still to skip.
    """

    def __init__(self) -> None:
        self.step = self.committed = self.good = 0
        self.refused = self.overflows = self.run_again = 0
        self.streak = self.rollbacks = self.skip_batches = 0
        self.epoch = self.epoch_start = 0
        self.epoch_refused = self.epoch_passed = self.epoch_rollbacks = 0
        self.last_refused = False
        self.restored: int | None = None
        self._began = self._overflows_before = 0
        self._epochs: deque[tuple[int, int, int]] = deque(maxlen=_MAX_EPOCHS)

    def begin_epoch(self, epoch: int) -> None:
        """Begin counting batches and refused steps of an epoch."""
        if self.step > self._began:
            self._epochs.append((self._began, self.epoch, self.epoch_start))
        self._began = self.step
        self.epoch, self.epoch_start, self.epoch_refused, self.epoch_passed = epoch, self.step, 0, 0
        self.epoch_rollbacks, self._overflows_before = self.rollbacks, self.overflows

    def resume_epoch(self, batches: int) -> None:
        """Skip the batches of this epoch that an earlier run has trained on; its metrics
        continue.
        """
        self.skip_batches, self.epoch_passed = batches, -batches

    def refuse(self, steps: int = 1) -> None:
        """Count refused steps."""
        self.refused += steps
        self.epoch_refused += steps

    def return_to(self, step: int, good: int, again: Set[int] = frozenset()) -> None:
        """Continue counting from an earlier step, when there were fewer `good` ones; the given
        refused steps since then are replayed.
        """
        self.step, self.committed, self.good = step, self.committed - self.good + good, good
        self.refused -= len(again)
        self.run_again += len(again)
        here = sum(number >= self.epoch_start for number in again)
        self.epoch_refused = max(self.epoch_refused - here, 0)

    def skip_batch(self) -> None:
        """Count a batch of this epoch that is not trained on."""
        self.skip_batches = max(self.skip_batches - 1, 0)
        self.epoch_start -= 1
        self.epoch_passed += 1

    def batch(self, step: int) -> int:
        """Return the batch of a step within the epoch, from 0."""
        return max(step - self.epoch_start, 0)

    def place(self, step: int) -> tuple[int, int]:
        """Return epoch and batch of a step, both from 0. A replayed step may belong to an earlier
        epoch.
        """
        for began, epoch, start in reversed(self._epochs) if step < self._began else ():
            if step >= began:
                return epoch, step - start
        return self.epoch, self.batch(step)

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and the number of its batches that are complete or will be skipped."""
        return self.epoch, self.step - self.epoch_start + self.skip_batches

    @property
    def epoch_committed(self) -> int:
        """Number of committed steps of this epoch."""
        return self.step - self.epoch_start - self.epoch_refused - self.epoch_passed

    @property
    def epoch_overflows(self) -> int:
        """How many steps of this epoch were refused for an ordinary float16 overflow."""
        return self.overflows - self._overflows_before

    @property
    def idle(self) -> bool:
        """Whether no step of this epoch has committed yet, so that its metrics are empty."""
        return self.epoch_committed <= 0
