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
from typing import Any, NamedTuple

import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._core import finiteness, memory
from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._core.history import Level
from keras_nanguard._fit.recovery import GuardState
from keras_nanguard._keras import variables as keras_variables, whole_writes
from keras_nanguard._keras.train_state import TrainState

FIRST_STEP = 3
"""Additional memory of the first step, in multiples of the train state: gradients and the program.
"""

NOISE = 1.5
"""Spreads above the lowest level of the loss at which a level is clearly higher."""

_BLOCK = 1 << 20
"""Number of entries that are compared at a time."""

Agree = Callable[[float, str], tuple[float, str]]
Array = np.ndarray[Any, Any]
Values = list[tuple[Any, Array]]
"""Variables, each with its value."""


@dataclass
class Snapshot:
    """A copy of the train state.

    Attributes:
        step: number of complete steps when it was taken.
        good: number of good steps of the fit until then.
        position: the epoch, and the number of its complete batches.
        verified: whether enough good steps have followed.
        level: the level of the loss when it was taken, or `None` if unknown.
        arrays: the values, by `id` of the variable: arrays in memory, or `file`.
        file: its files on disk, a `SnapshotFile`, or `None`.
        generator: the state of the generator that belongs to no variable, or `None`.
        metrics: the values of the metrics by `id` of the variable, for steps that are replayed in
            the same epoch.
    """

    step: int
    good: int
    position: tuple[int, int] = (0, 0)
    verified: bool = False
    level: Level | None = None
    arrays: Mapping[int, Array] = field(default_factory=dict)
    file: Any = None
    generator: Array | None = field(default_factory=lambda: current.host().generator_state())
    metrics: Mapping[int, Array] = field(default_factory=dict)

    @property
    def moment(self) -> str:
        """When it was taken, in words."""
        steps = "1 step" if self.step == 1 else f"{self.step} steps"
        return f"after {steps}" if self.step else "before the first step"

    def value(self, variable: Any) -> Array | None:
        """Return the copy of one variable, `None` if the snapshot has none, or a damaged file."""
        try:
            found = self.arrays.get(id(variable))
        except FileFormatError:
            return None
        is_compact = found is not None and found.base is not None and not any(found.strides)
        return np.array(found) if is_compact else found


class Taken(NamedTuple):
    """Why a snapshot was not taken: the path of a variable that is not finite, or the bytes of a
    copy that does not fit. Without a reason it was taken.
    """

    bad: str = ""
    missing: float = 0.0


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

    # Taking one

    def take(self, fresh: Snapshot, state: TrainState, tolerated: Container[int] = ()) -> Taken:
        """Copy the state, if it is finite and the copy fits into memory.

        Args:
            fresh: the snapshot without its values. It is `verified` if it counts so immediately.
            state: the train state.
            tolerated: the `id` of each variable that may be infinite.
        """
        self.promote(fresh.good)
        variables = state.kept
        missing, short = self._missing(fresh, state)
        views = ((v, keras_variables.view(v)) for v in variables)
        values = [] if missing else list(views)
        missing, bad = self._agree(missing, _first_bad(values or views, tolerated))
        if bad or missing:
            return Taken(bad, missing)
        fresh.verified |= not self.good_after
        metrics = state.metrics if fresh.step else ()  # they are reset before the first step
        fresh.metrics = {id(v): keras_variables.read(v) for v in metrics}
        try:
            self._store(fresh, values, state, short)
        except Exception as error:
            if not memory.is_exhausted(error):
                raise
            return Taken(missing=float(size_of(variables)))
        return Taken()

    def _missing(self, fresh: Snapshot, state: TrainState) -> tuple[float, bool]:
        """Return the bytes of a copy that does not fit, 0 if it fits or reuses buffers; and whether
        memory is too short for one more, so that it replaces another one.
        """
        others = [s for s in self.snapshots if s.step]
        if fresh.step and self.replaced(others, fresh.level) is not None:
            return 0.0, False
        missing = missing_bytes(state.kept, not fresh.step)
        return (0.0, True) if missing and fresh.step and others else (missing, False)

    def _store(self, fresh: Snapshot, values: Values, state: TrainState, short: bool) -> None:
        """Copy the values into an empty snapshot, and add it; see `replaced`."""
        spare: Snapshot | None = None
        others = [s for s in self.snapshots if s.step]
        while gone := self.replaced(others, fresh.level, short and spare is None):
            others = [s for s in others if s is not gone]
            self.snapshots, spare = [s for s in self.snapshots if s is not gone], gone
        arrays = dict(spare.arrays) if spare is not None and spare.file is None else {}
        while values:
            variable, value = values.pop(0)  # on an accelerator a copy in itself
            same = value if fresh.step else compact(value)
            copied = _copy(value, arrays.get(id(variable))) if same is value else same
            arrays[id(variable)] = copied
        fresh.arrays = arrays
        self.snapshots.append(fresh)

    def replaced(
        self, others: Sequence[Snapshot], level: Level | None, short: bool = False
    ) -> Snapshot | None:
        """Return the snapshot that one taken at this level replaces, or `None`.

        An unverified one is replaced first, then the oldest, except the one with the lowest loss if
        the loss is clearly higher in all later ones. If memory is `short`, one is replaced even if
        there are fewer than `keep`, in the last resort that one.
        """
        free, best = others, self.with_least_loss()
        if best is not None and best.level is not None and self.keep > 1:
            later = [s.level for s in others if s.step > best.step] + [level]
            clearly = best.level.value + NOISE * best.level.spread
            if all(one is None or one.value > clearly for one in later):
                free = [s for s in others if s is not best]
        if len(free) < self.keep and not (short and others):
            return None
        return next((s for s in free if not s.verified), (free or others)[0])

    def complete(self, variable: Any, value: Array) -> None:
        """Add the first value of a variable that was created after the first snapshot."""
        if self.start is not None and isinstance(self.start.arrays, dict):
            self.start.arrays.setdefault(id(variable), value)

    # Which ones there are

    def promote(self, good: int) -> float:
        """Mark snapshots as verified, given the current number of good steps; return how many more
        verify the next one, infinity if none is pending.
        """
        for snapshot in self.snapshots:
            snapshot.verified |= good - snapshot.good >= self.good_after
        waiting = (s.good + self.good_after - good for s in self.snapshots if not s.verified)
        return max(min(waiting, default=math.inf), 1)

    def newest(self, depth: int = 1) -> Snapshot | None:
        """Return the `depth`-th newest verified snapshot that can be read, or the oldest if there
        are fewer.
        """
        while verified := [s for s in self.snapshots if s.verified]:
            found = verified[-min(depth, len(verified))]
            if self.at_hand(found):
                return found
            self.snapshots = [s for s in self.snapshots if s is not found]
        return None

    def before(self, step: int) -> Snapshot | None:
        """Return the newest snapshot that was taken before this step ran, verified or not."""
        return next((s for s in reversed(self.snapshots) if s.step <= step), None)

    @property
    def start(self) -> Snapshot | None:
        """The state before the first step, or `None` if it was not kept."""
        return self.snapshots[0] if self.snapshots and self.snapshots[0].step == 0 else None

    def with_least_loss(self) -> Snapshot | None:
        """Return the verified snapshot with the lowest loss, without the state before the first
        step.
        """
        known = [(s.level, s) for s in self.snapshots if s.step and s.verified]
        found = [(level.value, s) for level, s in known if level is not None]
        return min(found, key=lambda pair: pair[0], default=(0.0, None))[1]

    def at_hand(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot is in memory, or its files are whole. If not, warn."""
        only_on_disk = snapshot.arrays is snapshot.file
        return not only_on_disk or bool(snapshot.file.whole)

    # Using one

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
            write = lambda variable: keras_variables.write(variable, value(variable))  # noqa: E731
            whole_writes.finish(partial(write, v) for v in known)

    def forget_after(self, step: int) -> None:
        """Remove the snapshots taken after this step, because the steps before them were undone."""
        self.snapshots = [s for s in self.snapshots if s.step <= step]

    def save_changes(self, changes: Callable[[], GuardState]) -> None:
        """Save the changes of the policy. A ring in memory need not."""

    def close(self) -> None:
        """Release all snapshots and locks."""
        self.snapshots = []


def _first_bad(values: Iterable[tuple[Any, Any]], tolerated: Container[int]) -> str:
    """Return the path of the first variable whose value is not finite, `""` if all are; those whose
    `id` is `tolerated` may be infinite.
    """
    for variable, value in values:
        if id(variable) not in tolerated and not finiteness.is_finite(value):
            return str(getattr(variable, "path", "")) or "a variable"
    return ""


def compact(value: Array) -> Array:
    """Return an array whose entries are all equal as a view of a single entry, to save memory; any
    other array unchanged. Most slots begin with equal entries.
    """
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


def missing_bytes(variables: Sequence[Any], first: bool) -> float:
    """Return the bytes of a copy of the state if it does not fit into memory, else 0.

    Before the `first` step the memory of that step must be free as well. Constant slots take no
    memory.
    """
    size = size_of(variables)
    if not first or size <= memory.SMALL:
        return 0.0 if memory.room_for(size) else float(size)
    copied = size_of(v for v in variables if not _is_constant(keras_variables.view(v)))
    needed = copied + FIRST_STEP * size_of(v for v in variables if keras_variables.on_host(v))
    return 0.0 if copied <= memory.SMALL or needed <= memory.room() else float(copied)


def _copy(value: Array, buffer: Array | None) -> Array:
    """Return a copy of an array, in a buffer if that has the same shape and dtype."""
    if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
        return np.array(value)
    np.copyto(buffer, value)
    return buffer
