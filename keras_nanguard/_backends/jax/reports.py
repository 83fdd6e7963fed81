"""The report of a bad step on JAX."""

from __future__ import annotations

from collections.abc import Callable

from keras_nanguard._core.verdict import Report

__all__ = ["ReportQueue"]


class ReportQueue:
    """Stores how to make the report of the last step, if it was bad."""

    def __init__(self) -> None:
        self._make: Callable[[], Report] | None = None

    def put(self, make: Callable[[], Report] | None) -> None:
        """Store the last step: a function that returns its report, or `None` if it was healthy."""
        self._make = make

    def take(self) -> list[Report]:
        """Return and remove the report, if the step was bad."""
        make, self._make = self._make, None
        return [] if make is None else [make()]
