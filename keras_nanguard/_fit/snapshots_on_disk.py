"""A ring of verified states on disk, from which another process can resume.

Each snapshot is one folder, written under another name and renamed::

    snapshots/
      guard_state.json           what the policy has changed, written anew at every incident
      snapshot-00000012/
        state.weights.h5         what Keras itself saves: weights, statistics, optimizers
        rest.npz                 what it does not: seeds, states of stateful RNNs, metrics
        snapshot.json            position, verified or not, checksums of the files and of itself

A process that dies at any moment leaves whole snapshots and, at worst, an unfinished folder that
the next one removes. If nothing can be written (a full disk, a folder that is read-only, one that
another process writes to), training continues: a line warns once, the snapshots that are there
stay, and the next one is tried again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock, Timeout

from keras_nanguard._core import atomic_files, memory
from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._core.levels import Level
from keras_nanguard._fit.guard_state import GuardState
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.saved_by_keras import left_out
from keras_nanguard._fit.snapshot_contents import (
    load,
    measured,
    sealed,
    signature,
    trained_by_each,
    variables_of,
    versions,
    write_rest,
)
from keras_nanguard._fit.snapshot_files import (
    GUARD_STATE,
    REST,
    WEIGHTS,
    SnapshotRecord,
    folder_of,
    next_number,
    read,
    written,
)
from keras_nanguard._fit.snapshots import (
    Ring,
    Snapshot,
    Values,
    compact,
    left_as_they_are,
    missing_bytes,
    size_of,
)
from keras_nanguard._keras import (
    saving as keras_saving,
    variables as keras_variables,
    whole_writes,
)

__all__ = ["DiskRing"]

LOCK = "snapshots.lock"
"""Name of the lock file next to the folder."""

PASSES = 3
"""Copies of the largest variable that must fit into memory while the files are written."""

T = TypeVar("T")


class DiskRing(Ring):
    """The snapshots of one fit on disk.

    The state before the first step also stays in memory if it fits. A run that diverges may have to
    return to it, and the first step may create variables that are in no earlier file.

    Args:
        run: the run.
        directory: the guard's directory.
    """

    only_reads = False

    def __init__(self, run: Run, directory: str | Path):
        super().__init__(run.policy.snapshot.keep, run.policy.snapshot.good_steps)
        self.folder, self._run = folder_of(directory), run
        self._said, self._lock = set[str](), _Lock(self.folder.parent / LOCK)
        self._left_out: tuple[tuple[int, ...], frozenset[int]] = ((), frozenset())

    def _store(self, values: Values, fresh: Snapshot) -> None:
        """Write the state to disk. If that fails, keep it in memory if it fits."""
        variables = [variable for variable, _ in values]
        values.clear()  # copies, on an accelerator, which nobody needs while the files are written
        for snapshot in self._on_disk():
            if snapshot.step != 0:
                snapshot.arrays = {}
        found = self._attempt(lambda: self._write_folder(fresh.step, fresh.verified))
        if found is None:
            if not missing_bytes(variables, fresh.step):
                super()._store([(v, keras_variables.view(v)) for v in variables], fresh)
            return
        self.note()
        in_memory = not fresh.step and not missing_bytes(variables, 0)
        if in_memory:
            fresh.arrays = {id(v): compact(keras_variables.read(v)) for v in variables}
        self.snapshots.append(_OnDisk(fresh, *found, self._load, not in_memory))
        self._attempt(self._prune)

    def _on_disk(self) -> list[_OnDisk]:
        return [snapshot for snapshot in self.snapshots if isinstance(snapshot, _OnDisk)]

    def _write_folder(self, step: int, verified: bool) -> tuple[Path, SnapshotRecord]:
        """Write one snapshot; return its folder and its record."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock.take()
        atomic_files.sweep(self.folder)
        path = self.folder / f"snapshot-{next_number(self.folder):08d}"
        with atomic_files.beside(path, "snapshot") as unfinished:
            unfinished.mkdir()
            return path, self._write(unfinished, step, verified)

    def close(self) -> None:
        """Release all snapshots in memory, and the lock of the folder."""
        super().close()
        self._lock.release()

    def _attempt(self, write: Callable[[], T]) -> T | None:
        """Write something to the folder. If that fails, print one line and return `None`."""
        try:
            return write()
        except Exception as error:  # a layer of the user's may raise anything when it is saved
            if memory.is_exhausted(error):
                raise
            kind = f"{type(error).__name__} {getattr(error, 'errno', None)}"
            if kind not in self._said:
                self._said.add(kind)
                ours = self._on_disk()
                last = (
                    f"The newest one is {ours[-1].path.name}." if ours else "This run has none yet."
                )
                why = str(error).partition("\n")[0]
                self._run.say(f"NanGuard: cannot write snapshots to {self.folder}: {why}. {last}")
            return None

    def _missing(self, variables: Sequence[Any], step: int, level: Level | None) -> float:
        """Return the bytes that writing the state needs if they are not free, else 0."""
        size = PASSES * max((keras_variables.bytes_of(v) for v in variables), default=0)
        return 0.0 if memory.room_for(size) else float(size)

    def complete(self, variable: Any, value: np.ndarray[Any, Any]) -> None:
        """Add a value to the state before the first step if it is in memory."""
        if not (isinstance(self.start, _OnDisk) and self.start.only_files):
            super().complete(variable, value)

    def promote(self, good: int) -> None:
        """Mark snapshots as verified, also in their files."""
        super().promote(good)
        for snapshot in self._on_disk():
            if snapshot.verified and not snapshot.noted:
                snapshot.noted = self._attempt(snapshot.prove) is not None

    def newest(self, depth: int = 1) -> Snapshot | None:
        """Return the `depth`-th newest verified snapshot that is not broken."""
        while (snapshot := super().newest(depth)) is not None:
            if self.restorable(snapshot):
                return snapshot
            self.snapshots = [s for s in self.snapshots if s is not snapshot]
        return None

    def at_hand(self, snapshot: Snapshot) -> bool:
        """Read the values of a snapshot from disk if they fit into memory; return whether they are
        there.
        """
        if snapshot.arrays or not isinstance(snapshot, _OnDisk):
            return True
        if not memory.room_for(2 * size_of(variables_of(self._run.train_state()))):
            return False
        try:
            self._fetch(snapshot)
        except FileFormatError as error:
            warnings.warn(f"NanGuard skips a snapshot: {error}", stacklevel=3)
        return bool(snapshot.arrays)

    def restorable(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot can be written into the variables, from memory or from its files."""
        if self.at_hand(snapshot):
            return True
        try:
            return isinstance(snapshot, _OnDisk) and bool(read(snapshot.path))
        except FileFormatError:
            return False

    def forget_after(self, step: int) -> None:
        """Remove the snapshots taken after this step, also on disk."""
        for snapshot in self._on_disk():
            if snapshot.step > step:
                self._attempt(snapshot.remove)
        super().forget_after(step)

    def note(self) -> None:
        """Save the present state of the policy."""
        path = self.folder / GUARD_STATE
        if self._lock.held:
            state = GuardState.of(self._run)
            self._attempt(lambda: atomic_files.write_json(path, state.to_dict()))

    def _fetch(self, snapshot: _OnDisk) -> None:
        """Read the values through the model, whose state is restored afterwards."""
        record = read(snapshot.path)
        variables = variables_of(self._run.train_state())
        with left_as_they_are(variables):
            load(self._run.model, variables, (), snapshot.path, record)
            snapshot.arrays = {id(v): keras_variables.read(v) for v in variables}

    def _load(self, snapshot: _OnDisk, variables: Iterable[Any]) -> None:
        """Write a snapshot from its files into these variables. Other variables do not change."""
        state = variables_of(self._run.train_state())
        wanted = {id(v) for v in variables}
        with left_as_they_are([v for v in state if id(v) not in wanted]):
            load(self._run.model, state, (), snapshot.path, read(snapshot.path))

    def _write(self, folder: Path, step: int, verified: bool) -> SnapshotRecord:
        """Write the files of a snapshot into an empty folder, and return its record."""
        model, train_state = self._run.model, self._run.train_state()
        variables = variables_of(train_state)
        files = {}
        if hasattr(model, "save_weights") and model.built:  # a layer alone has no file format
            keras_saving.save_weights(model, folder / WEIGHTS)  # checked already: past the firewall
            files[WEIGHTS] = sealed(folder / WEIGHTS)
        everything = frozenset(range(len(variables)))
        numbers = sorted(self._not_in(folder / WEIGHTS, variables) if files else everything)
        rest = {number: keras_variables.read(variables[number]) for number in numbers}
        write_rest(folder / REST, rest, train_state.metrics)
        files[REST] = sealed(folder / REST)
        epoch, batch = self._run.counts.position
        record = SnapshotRecord(
            step=step,
            epoch=epoch,
            batch=batch,
            verified=verified,
            files=files,
            signature=signature(variables),
            rest=tuple((n, str(variables[n].path), rest[n].dtype.name) for n in numbers),
            metrics=len(train_state.metrics),
            optimizers=trained_by_each(train_state),
            guard_state=GuardState.of(self._run).to_dict(),
            measured=measured(train_state),
            versions=versions(),
        )
        record.write(folder)
        return record

    def _not_in(self, weights: Path, variables: list[Any]) -> frozenset[int]:
        """Return the numbers of the variables that Keras does not save. The result is cached."""
        key = tuple(id(v) for v in variables)
        if self._left_out[0] != key:
            self._left_out = (key, left_out(self._run.model, weights, variables))
        return self._left_out[1]

    def _prune(self) -> None:
        """Reduce the folder to `keep` snapshots, removing those of earlier runs first.

        The state before the first step stays in memory when its files are removed.
        """
        ours = self._on_disk()
        foreign = [path for path in written(self.folder) if path not in {s.path for s in ours}]
        for path in foreign[: max(len(foreign) + len(ours) - self.keep, 0)]:
            atomic_files.remove(path)
        while (gone := self.replaced(ours[:-1], ours[-1].level)) is not None:
            atomic_files.remove(gone.path)
            ours = [s for s in ours if s is not gone]
            in_memory = not gone.step and not gone.only_files
            left = [Snapshot(0, gone.good, True, 0, gone.arrays, gone.drawn)] if in_memory else []
            kept = ([s] if s is not gone else left for s in self.snapshots)
            self.snapshots = [one for several in kept for one in several]
        if len(ours) >= self.keep:  # in memory are those that could not be written
            self.snapshots = [s for s in self.snapshots if isinstance(s, _OnDisk) or not s.step]


class _OnDisk(Snapshot):
    """A snapshot whose values are in files until they are needed.

    Attributes:
        path, record: its folder and its record.
        noted: whether its record says that it is verified, if it is.
        only_files: whether its values stay on disk; those of the start are also in memory.
    """

    def __init__(
        self,
        taken: Snapshot,
        path: Path,
        record: SnapshotRecord,
        load: Callable[[_OnDisk, Iterable[Any]], None],
        only_files: bool,
    ):
        place = (taken.step, taken.good, taken.verified, taken.proof)
        super().__init__(*place, taken.arrays, taken.drawn, level=taken.level)
        self.path, self.record, self.only_files = path, record, only_files
        self.noted, self._load = taken.verified, load

    def write(
        self,
        variables: Iterable[Any],
        changed: Iterable[tuple[Any, Any]] = (),
        undo: bool = True,
    ) -> None:
        """Write its values into variables, from its files if they are not in memory.

        Raises:
            StateLostError: if neither the snapshot nor the previous state could be written
                completely.
        """
        if self.arrays:
            super().write(variables, changed, undo)
            return
        variables = list(variables)
        others = [partial(keras_variables.write, *pair) for pair in changed]
        whole_writes.finish([lambda: self._load(self, variables), *others])

    def prove(self) -> bool:
        """Mark it as verified in its record."""
        if self.path.exists():
            replace(self.record, verified=True).write(self.path)
        return True

    def remove(self) -> None:
        """Remove its files."""
        atomic_files.remove(self.path)


class _Lock:
    """A lock on the folder: only one process at a time can write to it.

    Attributes:
        held: whether this process has the lock.
    """

    def __init__(self, path: Path):
        self._path, self.held = path, False
        self._lock: Any = None

    def take(self) -> None:
        """Acquire the lock, unless this process has it.

        Raises:
            OSError: if the file cannot be written, or another process has the lock.
        """
        if self.held:
            return
        lock = FileLock(self._path, timeout=0, is_singleton=True, thread_local=False)
        try:
            lock.acquire()
            self._lock = lock
        except Timeout:
            remedy = "give each run a directory of its own"
            text = f"another process writes to {self._path.parent}; {remedy}"
            raise OSError(text) from None
        except NotImplementedError:  # a file system without locks
            pass
        self.held = True

    def release(self) -> None:
        """Release the lock."""
        lock, self._lock, self.held = self._lock, None, False
        if lock is not None:
            lock.release()
