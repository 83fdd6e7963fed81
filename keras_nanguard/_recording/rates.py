"""The learning rates of the steps of a recording, from a reading about once a second."""

from __future__ import annotations

from keras_nanguard._recording.database import Row

INTERVAL = 1.0
"""Seconds between two readings."""


class Rates:
    """The readings of the learning rate in a fit. Steps are known by their `id`.

    All steps between two equal readings had that rate; between two others it is unknown. From the
    start of an epoch to its first reading the rate does not change.

    Attributes:
        last: the rate of the last reading in this fit, if there is one.
        due: when it is time for the next reading.
    """

    def __init__(self) -> None:
        self.due = 0.0
        self.last: float | None = None
        self._last_step = 0
        self._epoch: int | None = None  # its first step, if it has no reading yet

    def begin_fit(self, step: int) -> None:
        """Begin a fit with this step, and with it an epoch that has no reading yet."""
        self.last = None
        self._epoch = None if self._epoch is None else step

    def begin_epoch(self, step: int) -> None:
        """Begin an epoch with this step."""
        self._epoch = step

    def read(self, rate: float, step: int, now: float, ahead: bool = False) -> list[Row]:
        """Take the reading of a step, and return the rows of `FILL_RATE` that it adds.

        Args:
            ahead: whether the step has not run yet, so that its rate says nothing of earlier ones.
        """
        found: list[Row] = []
        if self._epoch is not None and not ahead:
            found.append((rate, self._epoch, step))
        if self.last is not None:  # that step may have been ahead
            end = step if self.last == rate else self._last_step + 1
            found.append((self.last, self._last_step, end))
        self.last, self._last_step, self._epoch = rate, step, None
        self.due = now + INTERVAL
        return [*found, (rate, step, step + 1)]
