"""Snapshots of the train state in host memory.

A snapshot is taken only if the state is finite, and counts as *verified* after further good steps,
because a finite state may already be about to fail. Buffers are reused, so there are at most `keep`
copies of the train state, the one before the first step, and the one with the lowest loss. If a
copy does not fit into memory, it reuses the buffers of an older one or is not made
(`Taken.missing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._core import finiteness, memory
from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._core.history import Level
from keras_nanguard._keras import variables as keras_variables, whole_writes

__all__ = ["Ring", "Snapshot", "Taken", "compact", "first_bad", "missing_bytes", "size_of"]

FIRST_STEP = 3
"""Additional memory of the first step, in multiples of the train state: gradients and the program.
"""

NOISE = 1.5
"""Spreads above the lowest level of the loss at which a level is clearly higher."""

_BLOCK = 1 << 20
"""Number of entries that are compared at a time."""

Array = np.ndarray[Any, Any]
Values = list[tuple[Any, Array]]
"""Variables, each with its value."""


@dataclass
class Snapshot:
    """A copy of the train state.

    Attributes:
        step: number of complete steps when it was taken.
        good: number of good steps of the fit until then.
        verified: whether enough good steps have followed.
        proof: number of good steps that verify it.
        arrays: the values, by `id` of the variable. Those of a snapshot on disk are read each time.
        drawn: the state of the generator that belongs to no variable, or `None`.
        metrics: the values of the metrics by `id` of the variable, for steps that are replayed in
            the same epoch.
        level: the level of the loss when it was taken, or `None` if unknown.
        path: its folder on disk, `None` if it is only in memory.
        noted: whether its file says that it is verified, if it is.
    """

    step: int
    good: int
    verified: bool = False
    proof: int = 0
    arrays: Mapping[int, Array] = field(default_factory=dict)
    drawn: Array | None = field(default_factory=lambda: current.host().generator_state())
    metrics: dict[int, Array] = field(default_factory=dict)
    level: Level | None = None
    path: Path | None = None
    noted: bool = False

    def draw_again(self) -> None:
        """Restore the generator that belongs to no variable."""
        if self.drawn is not None:
            current.host().set_generator_state(self.drawn)

    def value(self, variable: Any) -> Array | None:
        """Return the copy of one variable, `None` if the snapshot has none, or a damaged file."""
        try:
            found = self.arrays.get(id(variable))
        except FileFormatError:
            return None
        is_compact = found is not None and found.base is not None and not any(found.strides)
        return np.array(found) if is_compact else found


class Taken(NamedTuple):
    """The result of taking a snapshot.

    Attributes:
        bad: the path of the first variable that is not finite, `""` if all are. Then nothing is
            stored.
        missing: the bytes of the copy if it does not fit, else 0.
        snapshot: the snapshot, `None` if there is none.
    """

    bad: str = ""
    missing: float = 0.0
    snapshot: Snapshot | None = None


Agree = Callable[[float, str], tuple[float, str]]


class Ring:
    """The snapshots of one fit, newest last.

    The state before the first step is kept for the whole fit, in addition to the others. So is the
    snapshot with the lowest loss if the loss is clearly higher in all later ones, as in a run that
    slowly diverges.

    Args:
        keep: maximum number of other snapshots. The newest verified one is never replaced.
        good_after: good steps that verify a snapshot. The state before the first step is always
            verified.
        agree: returns what several processes do about a snapshot; see `Agreement.room`.
    """

    def __init__(self, keep: int, good_after: int, agree: Agree = lambda *facts: facts):
        self.keep, self.good_after, self._agree = max(keep, 1), good_after, agree
        self.snapshots: list[Snapshot] = []

    def take(
        self,
        variables: Iterable[Any],
        step: int,
        good: int,
        verified: bool = False,
        tolerated: Container[int] = (),
        level: Level | None = None,
    ) -> Taken:
        """Copy the state, if it is finite and the copy fits into memory.

        Args:
            variables: the variables to copy.
            step, good: numbers of complete steps and of good steps.
            verified: whether the copy counts as verified immediately.
            tolerated: the `id` of each variable that may be infinite.
            level: the level of the loss.
        """
        self.promote(good)
        variables, proof = list(variables), self.good_after
        missing = self._missing(variables, step, level)
        views = ((v, keras_variables.view(v)) for v in variables)
        values = None if missing else list(views)
        bad = first_bad(views if values is None else values, tolerated)
        missing, bad = self._agree(missing, bad)
        if values is None or bad or missing:
            return Taken(bad, missing)
        fresh = Snapshot(step, good, verified or proof == 0, proof, level=level)
        try:
            self._store(values, fresh)
        except Exception as error:
            if not memory.is_exhausted(error):
                raise
            return Taken(missing=float(size_of(variables)))
        return Taken(snapshot=next((s for s in self.snapshots if s.step == step), None))

    def _missing(self, variables: Sequence[Any], step: int, level: Level | None) -> float:
        """Return the bytes of a copy that does not fit; 0 if it fits or reuses buffers."""
        others = [s for s in self.snapshots if s.step]
        if step and self.replaced(others, level) is not None:
            return 0.0
        missing = missing_bytes(variables, step)
        if missing and step and others:
            self.keep = len(others)
            return 0.0
        return missing

    def _store(self, values: Values, fresh: Snapshot) -> None:
        """Copy the values into an empty snapshot, and add it."""
        spare = self._give_up(fresh.level)
        arrays = dict(spare.arrays) if spare is not None and spare.path is None else {}
        while values:
            variable, value = values.pop(0)  # on an accelerator a copy in itself
            same = value if fresh.step else compact(value)
            buffer = arrays.get(id(variable))
            arrays[id(variable)] = same if same is not value else _copy(value, buffer)
        fresh.arrays = arrays
        self.snapshots.append(fresh)

    def promote(self, good: int) -> None:
        """Mark snapshots as verified, given the present number of good steps."""
        for snapshot in self.snapshots:
            snapshot.verified |= good - snapshot.good >= snapshot.proof

    def next_proof(self, good: int) -> float:
        """Return the number of good steps until the next snapshot is verified; infinity if none is
        pending.
        """
        waiting = [s.proof - (good - s.good) for s in self.snapshots if not s.verified]
        return max(min(waiting), 1) if waiting else math.inf

    def newest(self, depth: int = 1) -> Snapshot | None:
        """Return the `depth`-th newest verified snapshot, or the oldest if there are fewer."""
        verified = [s for s in self.snapshots if s.verified]
        return verified[-min(depth, len(verified))] if verified else None

    def before(self, step: int) -> Snapshot | None:
        """Return the newest snapshot that was taken before this step ran, verified or not."""
        return next((s for s in reversed(self.snapshots) if s.step <= step), None)

    @property
    def start(self) -> Snapshot | None:
        """The state before the first step, or `None` if it was not kept."""
        return self.snapshots[0] if self.snapshots and self.snapshots[0].step == 0 else None

    def oldest(self) -> Snapshot | None:
        """Return the oldest snapshot, `None` if there is none."""
        return self.snapshots[0] if self.snapshots else None

    def at_hand(self, snapshot: Snapshot) -> bool:
        """Whether the values of a snapshot can be read."""
        return True

    def write(
        self,
        snapshot: Snapshot,
        variables: Iterable[Any],
        changed: Sequence[tuple[Any, Any]] = (),
        undo: bool = True,
    ) -> None:
        """Write a snapshot into variables, all or none. Variables without a value in it do not
        change.

        Args:
            snapshot: the snapshot.
            variables: the variables.
            changed: `(variable, value)` for variables that get another value.
            undo: whether to copy the previous state, so that it can be restored if writing fails.

        Raises:
            StateLostError: if neither the snapshot nor the previous state could be written
                completely.
        """
        values = {id(v): value for v, value in changed}
        places = {id(v): v for v in (*variables, *(v for v, _ in changed))}
        known = [v for key, v in places.items() if key in values or key in snapshot.arrays]

        def value(variable: Any) -> Any:
            found = values.get(id(variable))
            return snapshot.arrays[id(variable)] if found is None else found

        if undo and memory.room_for(size_of(known)):
            whole_writes.write_all((v, value(v)) for v in known)
        else:
            whole_writes.finish(partial(_write, v, value) for v in known)

    def forget_after(self, step: int) -> None:
        """Remove the snapshots taken after this step, because the steps before them were undone."""
        self.snapshots = [s for s in self.snapshots if s.step <= step]

    def complete(self, variable: Any, value: Array) -> None:
        """Add the first value of a variable that was created after the first snapshot."""
        if self.start is not None and isinstance(self.start.arrays, dict):
            self.start.arrays.setdefault(id(variable), value)

    def note(self) -> None:
        """Save the state of the policy. A ring in memory need not."""

    def close(self) -> None:
        """Release all snapshots and locks."""
        self.snapshots = []

    def with_least_loss(self) -> Snapshot | None:
        """Return the verified snapshot with the lowest loss, without the state before the first
        step.
        """
        known = [s for s in self.snapshots if s.step and s.verified and s.level is not None]
        return min(known, key=lambda s: s.level.value if s.level is not None else 0.0, default=None)

    def replaced(self, others: Sequence[Snapshot], level: Level | None) -> Snapshot | None:
        """Return the snapshot that one taken at this level replaces, or `None`.

        An unverified one is replaced first, then the oldest, except the one with the lowest loss if
        the loss is clearly higher in all later ones.
        """
        best = self.with_least_loss()
        if best is not None and best.level is not None and self.keep > 1:
            later = [s.level for s in others if s.step > best.step] + [level]
            clearly = best.level.value + NOISE * best.level.spread
            if all(one is None or one.value > clearly for one in later):
                others = [s for s in others if s is not best]
        if len(others) < self.keep:
            return None
        return next((s for s in others if not s.verified), others[0])

    def _give_up(self, level: Level | None) -> Snapshot | None:
        """Remove and return the snapshot that a new one replaces."""
        last = None
        while (gone := self.replaced([s for s in self.snapshots if s.step], level)) is not None:
            self.snapshots, last = [s for s in self.snapshots if s is not gone], gone
        return last


def first_bad(values: Iterable[tuple[Any, Any]], tolerated: Container[int] = ()) -> str:
    """Return the path of the first variable whose value is not finite, `""` if all are.

    Variables whose `id` is in `tolerated` may be infinite.
    """
    for variable, value in values:
        if id(variable) not in tolerated and not finiteness.is_finite(value):
            return str(getattr(variable, "path", "")) or "a variable"
    return ""


def _write(variable: Any, value: Callable[[Any], Any]) -> None:
    keras_variables.write(variable, value(variable))


def compact(value: Array) -> Array:
    """Return an array of equal entries as a view of one of them. Most slots begin like that."""
    return np.broadcast_to(np.array(value.flat[0]), value.shape) if _is_constant(value) else value


def _is_constant(value: Array) -> bool:
    kind_known = value.dtype.kind in "fiu"
    if value.size < 2 or not kind_known or value.flat[0] != value.flat[-1]:
        return False
    flat, first = np.ravel(value), value.flat[0]
    return not any(np.any(flat[i : i + _BLOCK] != first) for i in range(0, flat.size, _BLOCK))


def size_of(variables: Iterable[Any]) -> int:
    """Return the bytes of the values of these variables."""
    return sum(keras_variables.bytes_of(variable) for variable in variables)


def missing_bytes(variables: Sequence[Any], step: int) -> float:
    """Return the bytes of a copy of the state if it does not fit into memory, else 0.

    Before the first step the memory of that step must be free as well. Constant slots take no
    memory.
    """
    size = needed = size_of(variables)
    if not step and size > memory.SMALL:
        size = size_of(v for v in variables if not _is_constant(keras_variables.view(v)))
        on_host = size_of(v for v in variables if keras_variables.on_host(v))
        needed = max(size + FIRST_STEP * on_host, 4 * size if on_host else size)
        return 0.0 if size <= memory.SMALL or needed <= memory.room() else float(size)
    return 0.0 if memory.room_for(needed) else float(size)


def _copy(value: Array, buffer: Array | None) -> Array:
    if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
        return np.array(value)
    np.copyto(buffer, value)
    return buffer
