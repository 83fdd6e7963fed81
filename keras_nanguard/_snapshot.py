"""A ring of verified states in host memory.

A snapshot is taken only of a state that is finite when it is read, and counts as *verified* only once good steps have
followed it: a state can be finite and doomed. Copies are made into buffers that are used again, so that the ring never
takes more than `keep` copies of the train state and asks the system for memory only once.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_nanguard import _probes, _state

__all__ = ["Ring", "Snapshot"]


@dataclass
class Snapshot:
    """A copy of the train state.

    Attributes:
        step: number of steps that were complete when it was taken.
        good: how many good steps the fit had seen by then.
        verified: whether enough good steps have followed.
        arrays: the values, by variable.
    """

    step: int
    good: int
    verified: bool = False
    arrays: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)

    def value(self, variable: Any) -> np.ndarray[Any, Any] | None:
        """Return the copy of one variable, `None` where the snapshot has none."""
        return self.arrays.get(id(variable))


class Ring:
    """The snapshots of one fit, newest last.

    Args:
        keep: how many there may be at a time; the newest one that is verified is never given up for a new one.
        good_after: good steps that make a snapshot verified. The state before the first step is verified by itself:
            there is nothing older to go back to.
    """

    def __init__(self, keep: int, good_after: int):
        self.keep, self.good_after = max(keep, 1), good_after
        self.snapshots: list[Snapshot] = []

    def take(
        self,
        variables: Iterable[Any],
        step: int,
        good: int,
        verified: bool = False,
        tolerated: Container[int] = (),
    ) -> str:
        """Copy the state; returns `""`, or the path of the first variable that is not finite, and then keeps nothing.

        Variables whose `id` is in `tolerated` may be infinite.
        """
        self.promote(good)
        spare = self._spare()
        fresh = Snapshot(step, good, verified, spare.arrays if spare is not None else {})
        for variable in variables:
            array = _copy(variable, fresh.arrays.get(id(variable)))
            if id(variable) not in tolerated and not _probes.is_finite(array):
                return str(getattr(variable, "path", ""))
            fresh.arrays[id(variable)] = array
        self.snapshots.append(fresh)
        return ""

    def promote(self, good: int) -> None:
        """Mark as verified what enough good steps have followed, given how many the fit has seen."""
        for snapshot in self.snapshots:
            snapshot.verified |= good - snapshot.good >= self.good_after

    def newest(self, depth: int = 1) -> Snapshot | None:
        """Return the verified snapshot that is `depth`-th from the newest, the oldest one where there are fewer."""
        verified = [s for s in self.snapshots if s.verified]
        return verified[-min(depth, len(verified))] if verified else None

    def forget_after(self, step: int) -> None:
        """Give up the snapshots taken after this step: the run that they belong to has been undone."""
        self.snapshots = [s for s in self.snapshots if s.step <= step]

    def complete(self, variable: Any, value: np.ndarray[Any, Any]) -> None:
        """Add the first value of a variable that came into being after the first snapshot."""
        if self.snapshots and id(variable) not in self.snapshots[0].arrays and self.snapshots[0].step == 0:
            self.snapshots[0].arrays[id(variable)] = value

    def _spare(self) -> Snapshot | None:
        """Return a snapshot whose buffers can be used for a new one: an unproven one first, then the oldest."""
        if len(self.snapshots) < self.keep:
            return None
        unproven = [s for s in self.snapshots if not s.verified]
        verified = [s for s in self.snapshots if s.verified]
        spare = unproven[0] if unproven else verified[0]
        self.snapshots = [s for s in self.snapshots if s is not spare]
        return spare


def _copy(variable: Any, buffer: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    value = _state.view(variable)
    if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
        return np.array(value)
    np.copyto(buffer, value)
    return buffer
