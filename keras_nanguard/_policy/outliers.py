"""Steps whose gradient norm or loss is far beyond that of the steps before: a few batches may have thrown the run back. Imports no backend.

    outlier   norm > 10 * the largest norm of the 64 steps before, or the same for the loss; earlier outliers are not counted, and
              there have to be 16 steps that are none
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["Outliers"]

BEYOND = 10.0
"""Multiple of the largest value before from which on a step stands out."""

BEFORE, FEWEST = 64, 16
"""Number of steps that one is compared with, and the fewest of them."""

ALIKE = 5
"""Number of steps after an outlier that belong to it; later ones that are as large show what the run has come to."""


class _Largest:
    """The largest of the last values that were added: only those are kept that a later one does not exceed."""

    def __init__(self) -> None:
        self._values: deque[tuple[int, float]] = deque()

    def add(self, number: int, value: float) -> None:
        while self._values and not self._values[-1][1] > value:
            self._values.pop()
        self._values.append((number, value))
        while self._values[0][0] <= number - BEFORE:
            self._values.popleft()

    def exceeded(self, value: float) -> bool:
        """Whether a value is far beyond all of them."""
        return value > BEYOND * self._values[0][1] > 0.0


class Outliers:
    """The steps of one run that stand out.

    Attributes:
        steps: their numbers, of several in a row the first, oldest first.
        seen: the last step that was looked at, -1 before the first.
    """

    def __init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        """Forget everything, as after a rollback."""
        self.steps: list[int] = []
        self.seen, self._count, self._last = -1, 0, -BEFORE
        self._losses, self._norms = _Largest(), _Largest()

    def since(self, step: int) -> tuple[int, ...]:
        """Return those from a step on."""
        return tuple(found for found in self.steps if found >= step)

    def add(self, measured: Iterable[tuple[int, float, float]]) -> None:
        """Look at further steps.

        Args:
            measured: `(step, loss, gradient norm)` of committed steps, oldest first. A norm is NaN where there is none.
        """
        for step, loss, norm in measured:
            beyond = self._count >= FEWEST and (self._losses.exceeded(loss) or self._norms.exceeded(norm))
            if beyond and step - self._last > ALIKE:
                self.steps.append(step)
            self._last = step if beyond else self._last
            if not beyond or step - self.steps[-1] > ALIKE:
                self._count += 1
                self._losses.add(self._count, loss)
                self._norms.add(self._count, norm)
            self.seen = step
        del self.steps[:-BEFORE]
