"""A ring of verified states in host memory.

A snapshot is taken only of a state that is finite when it is read, and counts as *verified* only once good steps have
followed it: a state can be finite and doomed. Copies are made into buffers that are used again, so that the ring never
takes more than `keep` copies of the train state, and that before the first step, and asks the system for memory only once. Before it
does, it looks at how much is free: where another copy does not fit, an older one gives its buffers, and where there is none, nothing is
kept (`Ring.lacks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._core import finiteness, memory
from keras_nanguard._core.levels import Level
from keras_nanguard._keras import variables as keras_variables

STEP_TAKES = 3
"""Times the train state that the first step may take besides: gradients, and what its program needs. It is not known yet."""

NOISE = 1.5
"""Spreads by which two levels of the loss differ if they can be told apart."""

_BLOCK = 1 << 20
"""Entries that are compared at a time."""

__all__ = ["Ring", "Snapshot", "compact", "first_bad", "fits_at_first", "left_as_they_are", "size_of", "without_room"]

S = TypeVar("S", bound="Snapshot")


@dataclass
class Snapshot:
    """A copy of the train state.

    Attributes:
        step: number of steps that were complete when it was taken.
        good: how many good steps the fit had seen by then.
        verified: whether enough good steps have followed.
        proof: how many good steps are enough.
        arrays: the values, by variable.
        drawn: the state of the generator that belongs to no variable, `None` where there is none.
        metrics: the values of the metrics, by variable, which only steps that are run again in the same epoch begin with.
        level: the level of the loss when it was taken, `None` where it is not known.
    """

    step: int
    good: int
    verified: bool = False
    proof: int = 0
    arrays: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)
    drawn: np.ndarray[Any, Any] | None = field(default_factory=lambda: current.host().generator_state())
    metrics: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)
    level: Level | None = None

    def write(self, variables: Iterable[Any]) -> None:
        """Write its values into variables; those that it does not have stay as they are."""
        for variable in variables:
            if (value := self.value(variable)) is not None:
                keras_variables.write(variable, value)

    def draw_again(self) -> None:
        """Let the generator that belongs to no variable go on from where it was."""
        if self.drawn is not None:
            current.host().set_generator_state(self.drawn)

    def value(self, variable: Any) -> np.ndarray[Any, Any] | None:
        """Return the copy of one variable, `None` where the snapshot has none."""
        found = self.arrays.get(id(variable))
        return np.array(found) if found is not None and found.base is not None and not any(found.strides) else found


class Ring:
    """The snapshots of one fit, newest last.

    The state before the first step is kept as long as the fit runs, besides the others. So is the one with the lowest loss where that
    is clearly higher in all later ones, as in a run that slowly diverges.

    Args:
        keep: how many others there may be at a time; the newest one that is verified is never given up for a new one.
        good_after: good steps that make a snapshot verified. The state before the first step is verified by itself:
            there is nothing older to restore.
    """

    only_reads = True
    """Whether taking a snapshot does nothing but read variables."""

    lacks = 0.0
    """Bytes that the last snapshot would have taken, where it was not kept because they are not free; 0 where it was."""

    lean = False
    """Whether there was no room for as many copies as there might be, so that `keep` is lower."""

    agree_on_room: Callable[[float, int, str], tuple[float, int, str]] = staticmethod(lambda missing, keep, bad: (missing, keep, bad))
    """What several processes do about a snapshot; see `Agreement.room`."""

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
        level: Level | None = None,
    ) -> str:
        """Copy the state; returns `""`, or the path of the first variable that is not finite, and then keeps nothing.

        Variables whose `id` is in `tolerated` may be infinite. If memory has no room for a copy, `lacks` is its size.
        """
        self.promote(good)
        proof, variables = self.good_after, list(variables)
        keep, self.lacks = self.keep, self._missing(variables, step, level)
        values: Iterable[tuple[Any, np.ndarray[Any, Any]]] = ((v, keras_variables.view(v)) for v in variables)
        values = values if self.lacks else list(values)
        bad = first_bad(values, tolerated)
        self.lacks, self.keep, bad = self.agree_on_room(self.lacks, self.keep, bad)
        self.lean |= self.keep < keep
        if isinstance(values, list) and not (bad or self.lacks):
            try:
                self._store(values, step, good, verified or proof == 0, proof, level)
            except Exception as error:
                if not memory.is_exhausted(error):
                    raise
                self.lacks, self.lean = float(size_of(variables)), True
                self.keep = max(sum(s.step > 0 for s in self.snapshots), 1)
            stored = any(s.step == step for s in self.snapshots)
            missing, self.keep, _ = self.agree_on_room(0.0 if stored else 1.0, self.keep, "")
            if missing and stored:
                self.forget_after(step - 1)  # another process has no copy
        return bad

    def _missing(self, variables: Sequence[Any], step: int, level: Level | None) -> float:
        """Return the bytes for a copy of the state that are not free, 0 where it can be made; an older one may have to go for it."""
        others = [s for s in self.snapshots if s.step]
        if step and self.replaced(others, level) is not None:
            return 0.0  # its buffers are used again
        missing = without_room(variables, step)
        if missing and step and others:
            self.keep, self.lean = min(self.keep, len(others)), True
            return 0.0
        return missing

    def _store(
        self, values: list[tuple[Any, np.ndarray[Any, Any]]], step: int, good: int, verified: bool, proof: int, level: Level | None
    ) -> None:
        """Keep a state that was found to be good, given as its variables and their values."""
        spare = self._give_up(level)
        fresh = Snapshot(step, good, verified, proof, spare.arrays if spare is not None else {}, level=level)
        while values:
            variable, value = values.pop(0)  # on an accelerator a copy by itself
            same = value if step else compact(value)
            fresh.arrays[id(variable)] = same if same is not value else _copy(value, fresh.arrays.get(id(variable)))
        self.snapshots.append(fresh)

    def promote(self, good: int) -> None:
        """Mark as verified what enough good steps have followed, given how many the fit has seen."""
        for snapshot in self.snapshots:
            snapshot.verified |= good - snapshot.good >= snapshot.proof

    def next_proof(self, good: int) -> float:
        """Return how many more good steps make a snapshot verified, infinitely many where none waits for it."""
        waiting = [s.proof - (good - s.good) for s in self.snapshots if not s.verified]
        return max(min(waiting), 1) if waiting else math.inf

    def newest(self, depth: int = 1) -> Snapshot | None:
        """Return the verified snapshot that is `depth`-th from the newest, the oldest one where there are fewer."""
        verified = [s for s in self.snapshots if s.verified]
        return verified[-min(depth, len(verified))] if verified else None

    def before(self, step: int) -> Snapshot | None:
        """Return the newest snapshot that was taken before this step ran, verified or not; the start where there is no other."""
        return next((s for s in reversed(self.snapshots) if s.step <= step), None)

    @property
    def start(self) -> Snapshot | None:
        """The state before the first step, `None` where it is not kept."""
        return self.snapshots[0] if self.snapshots and self.snapshots[0].step == 0 else None

    def oldest(self) -> Snapshot | None:
        """Return the oldest snapshot that is kept, `None` where there is none."""
        return self.snapshots[0] if self.snapshots else None

    def at_hand(self, snapshot: Snapshot) -> bool:
        """See to it that a snapshot's values are in memory; returns whether they are."""
        return True

    def forget_after(self, step: int) -> None:
        """Give up the snapshots taken after this step: the run that they belong to has been undone."""
        self.snapshots = [s for s in self.snapshots if s.step <= step]

    def complete(self, variable: Any, value: np.ndarray[Any, Any]) -> None:
        """Add the first value of a variable that came into being after the first snapshot."""
        if self.snapshots and id(variable) not in self.snapshots[0].arrays and self.snapshots[0].step == 0:
            self.snapshots[0].arrays[id(variable)] = value

    def note(self) -> None:
        """Keep what the policy has changed so far; a ring in memory ends with its process and has no need to."""

    def restorable(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot can be written into the variables."""
        return self.at_hand(snapshot)

    def close(self) -> None:
        """Let others have what belongs to this ring outside of the process."""

    def with_least_loss(self) -> Snapshot | None:
        """Return the verified snapshot that was taken at the lowest level of the loss; the state before the first step is none."""
        known = [s for s in self.snapshots if s.step and s.verified and s.level is not None]
        return min(known, key=lambda s: s.level.value if s.level is not None else math.inf, default=None)

    def replaced(self, others: Sequence[S], level: Level | None) -> S | None:
        """Return which of these snapshots goes when one comes that is taken at this level; `None` while there is room.

        An unproven one goes first, then the oldest; but not the one of the lowest loss where that is clearly higher in all later ones.
        """
        best = self.with_least_loss()
        if best is not None and best.level is not None:
            later = [s.level for s in others if s.step > best.step] + [level]
            clearly = best.level.value + NOISE * best.level.spread
            best = best if not self.lean and all(one is None or one.value > clearly for one in later) else None
        others = [s for s in others if s is not best]
        return next((s for s in others if not s.verified), others[0]) if len(others) >= self.keep else None

    def _give_up(self, level: Level | None) -> Snapshot | None:
        """Take what a new snapshot replaces out of the ring and return it. The caller sees to it that there will be a new one."""
        last = None
        while (gone := self.replaced([s for s in self.snapshots if s.step], level)) is not None:
            self.snapshots, last = [s for s in self.snapshots if s is not gone], gone
        return last


def first_bad(values: Iterable[tuple[Any, Any]], tolerated: Container[int] = ()) -> str:
    """Return the path of the first variable whose value, given beside it, is not finite; `""` where all are.

    Variables whose `id` is in `tolerated` may be infinite.
    """
    for variable, value in values:
        if id(variable) not in tolerated and not finiteness.is_finite(value):
            return str(getattr(variable, "path", "")) or "a variable"
    return ""


@contextmanager
def left_as_they_are(variables: Sequence[Any]) -> Iterator[list[np.ndarray[Any, Any]]]:
    """Give variables their values back at the end, whatever has happened in between."""
    before = [keras_variables.read(variable) for variable in variables]
    try:
        yield before
    finally:
        for variable, value in zip(variables, before):
            keras_variables.write(variable, value)


def compact(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array all of whose entries are the same as a view of one of them: most slots begin so, and take no memory then."""
    return np.broadcast_to(np.array(value.flat[0]), value.shape) if _is_constant(value) else value


def _is_constant(value: np.ndarray[Any, Any]) -> bool:
    if value.size < 2 or value.flat[0] != value.flat[-1] or value.dtype.kind not in "fiu":
        return False
    flat, first = np.ravel(value), value.flat[0]
    return not any(np.any(flat[i : i + _BLOCK] != first) for i in range(0, flat.size, _BLOCK))


def size_of(variables: Iterable[Any]) -> int:
    """Return how many bytes the values of these variables take."""
    return sum(keras_variables.bytes_of(variable) for variable in variables)


def _size_at_first(variables: Sequence[Any]) -> int:
    """Return the same without those that take no memory in a copy, as most slots before the first step."""
    size = size_of(variables)
    return size if size <= memory.SMALL else size_of(v for v in variables if not _is_constant(keras_variables.view(v)))


def without_room(variables: Sequence[Any], step: int) -> float:
    """Return the bytes of a copy of the state after so many steps if they are not free, else 0.

    Before the first step there has to be room for what a step takes, too.
    """
    size = size_of(variables) if step else _size_at_first(variables)
    fits = memory.room_for(size) if step else fits_at_first(variables, size)
    return 0.0 if fits else float(size)


def fits_at_first(variables: Sequence[Any], size: int) -> bool:
    """Whether so many bytes may be taken before it is known what a step on these variables takes."""
    on_host = size_of(v for v in variables if keras_variables.on_host(v))
    return size <= memory.SMALL or max(size + STEP_TAKES * on_host, 4 * size if on_host else size) <= memory.room()


def _copy(value: np.ndarray[Any, Any], buffer: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any]:
    if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
        return np.array(value)
    np.copyto(buffer, value)
    return buffer
