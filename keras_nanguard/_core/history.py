"""The measurements of the last steps, stored for the diagnosis of a later incident. Imports no
backend.

Pushing is one store into a list. All arithmetic is deferred until an incident needs it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import islice, takewhile
from typing import Any, NamedTuple

import numpy as np

from keras_nanguard._core import finiteness

__all__ = ["JUMP", "RISE", "History", "Measured", "magnitudes", "sizes"]

CAPACITY = 128
"""Number of steps that are stored; a power of two."""

LONG = 4096
"""Number of steps of which the loss is stored."""

JUMP = 20.0
"""Rise of the loss over its lowest value before, above which one check of dead units is
conclusive.
"""

RISE = 3.0
"""Rise of the loss above which dead units are checked for; below `JUMP` two checks in a row have to
agree, for kernels that have changed before.
"""

_MIN_EXACT = 1e-20
"""A sum of squares between this and its inverse has neither overflowed nor underflowed in
float32.
"""

START_STEPS = 5
"""Number of steps from which the initial magnitude is taken."""


class Measured(NamedTuple):
    """The measurements of one good step."""

    step: int
    loss: float
    squares: float
    scale: float

    @property
    def norm(self) -> float:
        """Global norm of the unscaled gradients."""
        squares = 2.0 * self.squares
        return math.sqrt(squares) / self.scale if squares >= 0.0 and self.scale else math.nan


class History:
    """A ring buffer of the measurements of good steps, and the first few of them.

    Attributes:
        undone: step and loss of the steps that the last rollback has undone.
        weights: `(norm, largest magnitude)` of each trainable weight at the start, by `id`.
    """

    __slots__ = ("_first", "_recent", "_ring", "undone", "weights")

    def __init__(self) -> None:
        self._ring: list[tuple[int, float, float, float] | None] = [None] * CAPACITY
        self._first: list[tuple[int, float, float, float]] = []
        self._recent: deque[tuple[int, float, float, float]] = deque(maxlen=LONG)
        self.weights: dict[int, tuple[float, float]] = {}
        self.undone: list[tuple[int, float]] = []

    def push(self, step: int, loss: float, squares: float, scale: float) -> None:
        """Store one good step: its loss, half the sum of squares of its gradients, its loss scale.

        This runs in every step.
        """
        entry = self._ring[step & (CAPACITY - 1)] = (step, loss, squares, scale)
        self._recent.append(entry)
        if step < START_STEPS:
            self._first.append(entry)

    def start(self, snapshots: Iterable[Any], weights: Iterable[Any]) -> None:
        """Store the initial magnitude of these weights, while the first snapshot is still
        available.
        """
        first = next((s for s in snapshots if s.step == 0), None)
        if first is not None and not self.weights:
            known = [(id(v), first.value(v)) for v in weights]
            self.weights = {key: sizes(array) for key, array in known if array is not None}

    @property
    def series(self) -> list[tuple[int, float]]:
        """Step and loss of the last `LONG` good steps that no rollback has undone, oldest first."""
        return [(step, loss) for step, loss, _, _ in self._recent]

    def last(self, count: int) -> list[tuple[int, float]]:
        """Return the same of the last steps, at most this many."""
        return [entry[:2] for entry in islice(reversed(self._recent), count)][::-1]

    def since(self, step: int) -> list[tuple[int, float, float]]:
        """Return step, loss and gradient norm of the steps from this one on that no rollback has
        undone, oldest first.
        """
        return [
            (m.step, m.loss, m.norm)
            for m in (
                Measured(*e) for e in takewhile(lambda e: e[0] >= step, reversed(self._recent))
            )
        ][::-1]

    def undo(self, step: int) -> None:
        """Take the steps from this one on out of the series: a rollback has undone them."""
        kept = [entry for entry in self._recent if entry[0] < step]
        self.undone = [entry[:2] for entry in self._recent if entry[0] >= step]
        self._recent = deque(kept, maxlen=LONG)

    def before(self, step: int) -> list[Measured]:
        """Return the stored steps before this one, oldest first."""
        return [Measured(*entry) for entry in self._entries(step)]

    def _entries(self, step: int) -> list[tuple[int, float, float, float]]:
        """Return the same as plain tuples, for callers that run often."""
        return sorted([e for e in self._ring if e is not None and e[0] < step])

    def first(self, step: int) -> list[Measured]:
        """Return the first good steps before this one."""
        return [Measured(*entry) for entry in self._first[:START_STEPS] if entry[0] < step]

    def jump(self, step: int) -> tuple[float, int]:
        """Return the largest rise of the loss over its lowest value before, and the step at which
        it occurred.
        """
        best, low = (1.0, 0), math.inf
        entries = self._entries(step)
        oldest = entries[0][0] if entries else step
        for number, loss, _, _ in [
            *(e for e in self._first[:START_STEPS] if e[0] < oldest),
            *entries,
        ]:
            if loss < 0.0:  # a ratio of losses of different signs has no meaning
                return 1.0, 0
            if not 0.0 < loss < math.inf:  # neither NaN nor zero
                continue
            if loss < low:
                low = loss
            elif loss / low > best[0]:
                best = (loss / low, number)
        return best

    def zeros(self, step: int, count: int) -> bool:
        """Whether each of the last `count` steps had a nonzero loss and a gradient of exactly
        zero.
        """
        last = self._ring[(step - 1) & (CAPACITY - 1)]
        if last is not None and last[0] == step - 1 and last[2] != 0.0:  # the usual case
            return False
        entries = self._entries(step)[-count:]
        return len(entries) == count and all(
            squares == 0.0 and loss != 0.0 for _, loss, squares, _ in entries
        )

    def moving(self, step: int) -> bool:
        """Whether the last step had a nonzero gradient."""
        entries = self._entries(step)
        return bool(entries) and entries[-1][2] > 0.0


def sizes(array: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Return the norm and the largest magnitude of an array."""
    wide = finiteness.widen(array)
    if wide.dtype.kind not in "fc" or not wide.size:
        return 0.0, 0.0
    with np.errstate(all="ignore"):
        flat = wide.ravel()
        largest = (
            float(max(abs(flat.max()), abs(flat.min())))
            if flat.dtype.kind == "f"
            else float(np.abs(flat).max())
        )
        squares, unit = float(np.vdot(flat, flat).real), 1.0
        if not _MIN_EXACT < squares < 1.0 / _MIN_EXACT and 0.0 < largest < math.inf:
            scaled, unit = flat / largest, largest
            squares = float(np.vdot(scaled, scaled).real)
    norm = unit * math.sqrt(squares) if squares >= 0.0 else math.inf
    return (norm if math.isfinite(norm) else math.inf), largest


def magnitudes(values: Iterable[float]) -> list[float]:
    """Return the magnitudes of the finite values that are not zero."""
    return [abs(v) for v in values if math.isfinite(v) and v != 0.0]
