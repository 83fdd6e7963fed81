"""The batch of a refused step on JAX: a reference, as the host keeps the arguments of each step until it has read the verdict on it."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_nanguard._core.verdict import Report, Verdict

__all__ = ["ReportQueue"]


class ReportQueue:
    """Hands out the report of the last step, where something was wrong with it.

    Attributes:
        places: `(site, path, size)` of each pair of counts in the trace that runs now.
    """

    def __init__(self) -> None:
        self.places: tuple[tuple[str, str, int], ...] = ()
        self._last: tuple[Any, Any, Any] | None = None

    def put(self, verdict: Verdict, counts: Any, args: tuple[Any, ...]) -> None:
        """Note the last step: its verdict, its counts of NaN and Inf (or what returns them, or `None`), and its arguments."""
        self._last = verdict, counts, args

    def forget(self) -> None:
        """Release the last step."""
        self._last = None

    def take(self) -> list[Report]:
        """Return and forget what was noted, if the step was bad."""
        last, self._last = self._last, None
        if last is None:
            return []
        verdict, counts, args = last
        if verdict.finite and not verdict.refused:
            return []
        counts = counts() if callable(counts) else counts
        if counts is None:
            return [Report(verdict, (), (), args)]
        whole = np.column_stack([np.reshape(np.asarray(counts), (-1, 2)), [size for _, _, size in self.places]])
        return [Report(verdict, tuple((site, path) for site, path, _ in self.places), whole.astype(np.int64), args)]
