"""The report of a bad step on JAX: its verdict, its counts by place, and its batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from keras_nanguard._core.verdict import Report, Verdict

__all__ = ["ReportQueue"]


class ReportQueue:
    """Stores the report of the last step, if it was bad."""

    places: tuple[tuple[Any, ...], ...] = ()

    def __init__(self) -> None:
        self._last: tuple[Verdict, Callable[[], Any], Any] | None = None

    def put(self, verdict: Verdict, counts: Callable[[], Any], args: tuple[Any, ...]) -> None:
        """Store the last step.

        Args:
            verdict: its verdict.
            counts: returns `(site, path, nan, inf, size)` of each place, if the report is taken.
            args: its arguments.
        """
        self._last = verdict, counts, args

    def forget(self) -> None:
        """Release the last step."""
        self._last = None

    def take(self) -> list[Report]:
        """Return and remove the report, if the step was bad."""
        last, self._last = self._last, None
        if last is None:
            return []
        verdict, counts, args = last
        if verdict.finite and not verdict.refused:
            return []
        rows = counts()
        numbers = np.array([row[2:] for row in rows], np.int64).reshape(-1, 3)
        return [Report(verdict, tuple(row[:2] for row in rows), numbers, args)]
