"""Snapshots of the train state in host memory and on disk: `Ring` has those of one fit.

A snapshot is taken only if the state is finite, and counts as *verified* after further good steps,
because a finite state may already be about to fail. There are at most `keep` of them, the one
before the first step, and the one with the lowest loss. If memory is short, a snapshot replaces
another one, or is not taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from keras_nanguard._backends import processes
from keras_nanguard._core import memory
from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._core.history import Level
from keras_nanguard._fit.snapshot_files import SnapshotFile, SnapshotFolder
from keras_nanguard._fit.steps import Time
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._keras.all_or_none import finish, write_all
from keras_nanguard._keras.train_state import TrainState

FIRST_STEP = 3
"""Additional memory of the first step, in multiples of the train state: gradients and the program.
"""

NOISE = 1.5
"""Spreads above the lowest level of the loss at which a level is clearly higher."""

UNKNOWN = Level(0, math.inf, 0.0)
"""The level of the loss after a few steps."""

Agree = Callable[[bool, bool], tuple[bool, ...]]
Array = np.ndarray[Any, Any]
Accepts = Callable[[Any, Array], bool]


@dataclass(eq=False)
class Snapshot:
    """A copy of the train state.

    Attributes:
        time: when it was taken.
        verified: whether enough good steps have followed.
        level: the level of the losses before it, `UNKNOWN` if there were too few.
        memory: the values in memory, by `id` of the variable; `None` if they are only in `file`.
        file: the values on disk; `None` if they are only in memory.
        generator: the state of the generator that belongs to no variable, or `None`.
        unlisted: functions that restore the variables that Keras does not list, before steps are
            replayed. They are in memory only.
        metrics: the values of the metrics by `id` of the variable, for steps that are replayed in
            the same epoch.
    """

    time: Time
    verified: bool = False
    level: Level = UNKNOWN
    memory: dict[int, Array] | None = None
    file: SnapshotFile | None = None
    generator: Array | None = None
    unlisted: Sequence[Callable[[], Any]] = ()
    metrics: Mapping[int, Array] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Number of complete steps when it was taken."""
        return self.time.step

    @property
    def arrays(self) -> Mapping[int, Array] | SnapshotFile:
        """The values, by `id` of the variable."""
        if self.memory is not None:
            return self.memory
        return {} if self.file is None else self.file

    def is_whole(self) -> bool:
        """Return whether it is in memory, or its files, which are read, are whole. If not, warn."""
        return self.memory is not None or self.file is None or self.file.is_whole()

    def value(self, variable: Any) -> Array | None:
        """Return the copy of one variable, `None` if the snapshot has none, or a damaged file."""
        try:
            return self.arrays[id(variable)]
        except (KeyError, FileFormatError):
            return None

    def write(self, variables: Iterable[Any], changed: Sequence[tuple[Any, Any]] = ()) -> None:
        """Write the snapshot into variables, all or none. Variables without a value in it do not
        change.

        If there is memory, the previous state is copied, and restored if writing fails. Several
        processes may not have the same memory, so they never copy it.

        Args:
            changed: `(variable, value)` for variables that get another value.

        Raises:
            StateLostError: if neither the snapshot nor the previous state could be written
                completely.
        """
        values = {id(v): value for v, value in changed}
        places = {id(v): v for v in (*variables, *(v for v, _ in changed))}
        known = [v for key, v in places.items() if key in values or key in self.arrays]

        def value(variable: Any) -> Any:
            key = id(variable)
            return values[key] if key in values else self.arrays[key]

        def write(variable: Any) -> None:
            keras_variables.write(variable, value(variable))

        if processes.count() == 1 and memory.room_for(size_of(known)):
            write_all((v, value(v)) for v in known)
        else:
            finish(partial(write, v) for v in known)


class Ring:
    """The snapshots of one fit, oldest first.

    The state before the first step is kept in memory for the whole fit, in addition to the others.
    So is the snapshot with the lowest loss if the loss is clearly higher in all later ones, as in a
    run that slowly diverges.

    Args:
        keep: maximum number of other snapshots. The newest verified one is replaced only if memory
            is short and no other snapshot is left.
        good_after: good steps that verify a snapshot. The state before the first step is always
            verified.
        agree: returns what is true for any of several processes; see `Agreement.any_of`.
        folder: where the snapshots are written; `None` keeps them in memory.

    Attributes:
        undone: later ones than the last that was restored, until a step has committed since then
            and, on disk, another one is verified: so there is one to end or to resume with.
    """

    def __init__(
        self,
        keep: int,
        good_after: int,
        agree: Agree,
        folder: SnapshotFolder | None = None,
    ):
        self.keep, self.good_after = keep, good_after
        self._agree, self._folder = agree, folder
        self.snapshots: list[Snapshot] = []
        self.undone: list[Snapshot] = []
        self._restored = 0  # number of good steps

    # Taking one

    def take(
        self, about: Snapshot, state: TrainState, accepts: Accepts
    ) -> Literal["", "memory", "nonfinite"]:
        """Copy the state to memory, or write it to disk, if it is finite.

        Args:
            about: the snapshot without its values. It is `verified` if it counts so immediately.
            accepts: whether a value of a variable is finite, except for what is there on purpose.

        Returns:
            What prevents it: a copy does not fit into memory, or the state is not finite.
        """
        self.promote(about.time.good)
        short = not _fits(state.kept, first=not about.step)
        able = not short or bool(about.step and self._in_memory())
        views, good = _read(state.kept, able, accepts)
        lacks, bad = self._agree(not able and self._folder is None, not good)
        if lacks or bad:
            return "nonfinite" if bad else "memory"
        about = replace(about, verified=about.verified or not self.good_after)
        try:
            snapshot = self._copied(about, state, views, short)
        except Exception as error:
            if not memory.is_exhausted(error):
                raise
            return "memory"
        if snapshot is None:
            return "memory"
        self.snapshots.append(snapshot)
        self._forget_undone(about.time.good)
        if self._folder is not None and snapshot.file is not None:
            self._prune(self._folder)
        return ""

    def _in_memory(self) -> list[Snapshot]:
        """Return the snapshots in memory alone, without the state before the first step."""
        return [s for s in self.snapshots if s.step and s.file is None]

    def _copied(
        self, about: Snapshot, state: TrainState, views: dict[int, Array] | None, short: bool
    ) -> Snapshot | None:
        """Return the snapshot with its values, on disk or in memory; `None` if they are in neither.

        Args:
            about: the snapshot without its values.
            views: its values, which are released one by one; `None` if a copy does not fit.
            short: whether it fits only in the place of another snapshot.
        """
        metrics = state.metrics if about.step else ()  # they are reset before the first step
        known = {id(v): keras_variables.read(v) for v in metrics}
        file = None
        if self._folder is not None:
            file = self._folder.write(state, about.time, about.verified)
        stored: dict[int, Array] | None = None
        if views is not None and (file is None or not about.step):
            self._make_room(self._in_memory(), about.level, short)
            copied = np.array if about.step else compact
            stored = {key: copied(views.pop(key)) for key in list(views)}
        if stored is None and file is None:
            return None
        return replace(about, memory=stored, file=file, metrics=known)

    def _prune(self, folder: SnapshotFolder) -> None:
        """Reduce the folder to `keep` snapshots, removing those of earlier runs first."""
        *earlier, newest = [s for s in self.snapshots if s.file is not None]
        folder.remove_foreign(self.keep)
        left = self._make_room(earlier, newest.level)
        if len(left) + 1 >= self.keep:  # in memory are those that could not be written
            self.snapshots = [s for s in self.snapshots if s.file is not None or not s.step]

    def _make_room(
        self, others: Sequence[Snapshot], level: Level, short: bool = False
    ) -> Sequence[Snapshot]:
        """Remove those of the other snapshots that one taken at this level replaces: unverified
        ones first, then the oldest, at last the protected one; return the rest. If memory is
        `short`, one is removed even if there are fewer than `keep`.
        """
        left = list(others)
        while left:
            best = self._protected(left, level)
            free = [s for s in left if s is not best]
            if len(free) < self.keep and not short:
                break
            gone, short = next((s for s in free if not s.verified), (free or left)[0]), False
            left.remove(gone)
            self._remove(gone)
        return left

    def _protected(self, others: Sequence[Snapshot], level: Level) -> Snapshot | None:
        """Return the snapshot with the lowest loss if the loss is clearly higher in all later ones,
        also at this level.
        """
        best = self.with_least_loss()
        if best is None or self.keep == 1:
            return None
        later = [s.level for s in others if s.step > best.step] + [level]
        clearly = best.level.value + NOISE * best.level.spread
        return best if all(one.value > clearly for one in later) else None

    def _remove(self, snapshot: Snapshot) -> None:
        """Remove a snapshot; of one that is also on disk and in memory, only its files."""
        file, snapshot.file = snapshot.file, None
        if file is None or snapshot.memory is None:
            self.snapshots.remove(snapshot)
        if self._folder is not None and file is not None:
            self._folder.remove(file)

    def complete(self, variable: Any, value: Array) -> None:
        """Add the first value of a variable that was created after the first snapshot."""
        if self.start is not None and self.start.memory is not None:
            self.start.memory.setdefault(id(variable), value)

    # Which ones there are

    def promote(self, good: int) -> float:
        """Mark snapshots as verified, also on disk, given the current number of good steps; return
        how many more verify the next one, infinity if none is pending.
        """
        for snapshot in self.snapshots:
            snapshot.verified |= good - snapshot.time.good >= self.good_after
            if self._folder is not None and snapshot.file is not None and snapshot.verified:
                self._folder.mark_verified(snapshot.file)
        self._forget_undone(good)
        waiting = (s.time.good + self.good_after - good for s in self.snapshots if not s.verified)
        return max(min(waiting, default=math.inf), 1)

    def newest(self) -> Snapshot | None:
        """Return the newest verified snapshot."""
        return self.choose(math.inf, lambda snapshot: True)

    def _whole(self, choose: Callable[[], Snapshot | None]) -> Snapshot | None:
        """Return the first chosen snapshot that is not damaged, and forget the others."""
        while (snapshot := choose()) is not None and not snapshot.is_whole():
            self.snapshots.remove(snapshot)
            if snapshot.file is not None:
                snapshot.file.close()
        return snapshot

    def choose(
        self,
        onset: float,
        can_replay: Callable[[Snapshot], bool],
        first_loss: float | None = None,
    ) -> Snapshot | None:
        """Return the newest verified snapshot from before a step ran; without one, another verified
        one. Those on the way that are damaged are forgotten; their files stay.

        If it is the state before the first step, and the steps since then cannot be replayed, the
        oldest of the other verified snapshots is returned instead. So a long run does not start
        over.

        Args:
            onset: this step; infinity for all snapshots.
            can_replay: whether the steps since a snapshot can be replayed.
            first_loss: the lowest loss of the first steps, if the later ones have diverged. Before
                the onset a snapshot then need not be verified, and the one that is returned instead
                of the first state is that with the lowest loss, provided that it has made most of
                the progress.
        """

        def earlier() -> Snapshot | None:
            known = [s for s in self.snapshots if s.verified or first_loss is not None]
            return next((s for s in reversed(known) if s.step <= onset), None)

        def progressed() -> Snapshot | None:
            if first_loss is None:
                return next((s for s in self.snapshots if s.step and s.verified), None)
            best = self.with_least_loss()
            lower = best is not None and best.level.value + best.level.spread < first_loss
            return best if lower else None

        chosen = self._whole(earlier)
        if chosen is None or not (chosen.step or can_replay(chosen)):
            chosen = self._whole(progressed) or chosen
        return chosen or (None if first_loss is None else self.newest())

    @property
    def start(self) -> Snapshot | None:
        """The state before the first step, or `None` if it was not kept."""
        return self.snapshots[0] if self.snapshots and self.snapshots[0].step == 0 else None

    def with_least_loss(self) -> Snapshot | None:
        """Return the verified snapshot with the lowest loss, without the state before the first
        step.
        """
        measured = (s for s in self.snapshots if s.step and s.verified and s.level is not UNKNOWN)
        return min(measured, key=lambda s: s.level.value, default=None)

    def go_back(self, time: Time, diverged: bool) -> None:
        """Note that the state of a time was restored, so that all later snapshots were undone.

        Args:
            diverged: whether training had diverged, so that none of their states is good.
        """
        later = [s for s in self.snapshots if s.step > time.step]
        for snapshot in later:
            self.snapshots.remove(snapshot)
            snapshot.verified &= not diverged
        self.undone, self._restored = later + self.undone, time.good

    def rewrite(self, snapshot: Snapshot, state: TrainState, time: Time) -> None:
        """Write a state that was restored to disk again, as the newest one, with the time at which
        the run continues.
        """
        assert self._folder is not None
        old, file = snapshot.file, self._folder.write(state, time, snapshot.verified)
        if file is None:
            return
        snapshot.file = file
        if old is not None:
            self._folder.remove(old)

    def has_advanced(self, good: int) -> bool:
        """Whether a step was good since the last snapshot was taken or restored, given the current
        number of good ones.
        """
        return good > max((s.time.good for s in self.snapshots), default=self._restored)

    def last_undone(self) -> Snapshot | None:
        """Return the newest verified snapshot that was undone, `None` if a step was good since."""
        return next((s for s in reversed(self.undone) if s.verified and s.is_whole()), None)

    def _forget_undone(self, good: int) -> None:
        """Remove what was undone if a step was good since then, given the current number."""
        if good <= self._restored:
            return
        on_disk = any(s.verified and s.file is not None for s in self.snapshots)
        for snapshot in self.undone:
            snapshot.verified = False
            if self._folder is not None and snapshot.file is not None and on_disk:
                self._folder.remove(snapshot.file)
        self.undone = [] if on_disk else [s for s in self.undone if s.file is not None]

    def close(self) -> None:
        """Release all snapshots in memory, and the lock of the folder."""
        self.snapshots, self.undone = [], []
        if self._folder is not None:
            self._folder.close()


def compact(value: Array) -> Array:
    """Return a copy of an array, as a view of a single entry if all entries are equal. Most slots
    begin with equal entries.
    """
    constant = _is_constant(value)
    return np.broadcast_to(np.array(value.flat[0]), value.shape) if constant else np.array(value)


def _is_constant(value: Array) -> bool:
    if value.size < 2 or value.dtype.kind not in "fiu" or value.flat[0] != value.flat[-1]:
        return False
    return bool((value == value.flat[0]).all())


def _read(
    variables: Iterable[Any], keeps: bool, accepts: Accepts
) -> tuple[dict[int, Array] | None, bool]:
    """Return the values of variables by `id`, and whether all are accepted.

    Each process reads each variable once: reading one may need all processes, and copies it from an
    accelerator. Without memory for all of them (`keeps`) no value is returned.
    """
    views: dict[int, Array] | None = {} if keeps else None
    good = True
    for variable in variables:
        value = keras_variables.view(variable)
        good &= accepts(variable, value)
        if views is not None:
            views[id(variable)] = value
    return views, good


def size_of(variables: Iterable[Any]) -> int:
    """Return the bytes of the values of these variables."""
    return sum(keras_variables.bytes_of(variable) for variable in variables)


def _fits(variables: Sequence[Any], first: bool) -> bool:
    """Whether a copy of the state fits into memory.

    Before the `first` step the memory of that step must be free as well. Constant slots take no
    memory.
    """
    size = size_of(variables)
    if not first or size <= memory.SMALL:
        return memory.room_for(size)
    copied = size_of(v for v in variables if not _is_constant(keras_variables.view(v)))
    needed = copied + FIRST_STEP * size_of(v for v in variables if keras_variables.on_host(v))
    return copied <= memory.SMALL or needed <= memory.room()
