"""A ring of verified states on disk, from which another process can resume; see `snapshot_files`.

A process that dies at any moment leaves whole snapshots and, at worst, an unfinished folder that
the next one removes. If nothing can be written (a full disk, a folder that is read-only, one that
another run writes to), training continues: a line warns once, existing snapshots remain, and
the next one is tried again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
from keras_nanguard._fit.snapshot_files import (
    GUARD_STATE,
    SnapshotRecord,
    folder_of,
    load,
    next_number,
    read,
    save,
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
from keras_nanguard._keras import variables as keras_variables, whole_writes

__all__ = ["DiskRing", "OnDisk"]

LOCK = "snapshots.lock"
"""Name of the lock file next to the folder."""

PASSES = 3
"""Copies of the largest variable that must fit into memory while the files are written."""

T = TypeVar("T")


@dataclass(kw_only=True)
class OnDisk(Snapshot):
    """A snapshot whose values are in files until they are needed.

    Attributes:
        path, record: its folder and its record.
        noted: whether its record says that it is verified, if it is.
        only_files: whether its values stay on disk; those of the start are also in memory.
    """

    path: Path
    record: SnapshotRecord
    noted: bool
    only_files: bool


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
        kept = run.policy.snapshot
        super().__init__(kept.keep, kept.good_steps, run.agreement.room)
        self.folder, self._run = folder_of(directory), run
        self._said, self._lock = set[str](), Lock(self.folder.parent / LOCK)
        self._unsaved: dict[str, frozenset[int]] = {}

    def _everything(self) -> list[Any]:
        return list(self._run.train_state().everything)

    def _on_disk(self) -> list[OnDisk]:
        return [snapshot for snapshot in self.snapshots if isinstance(snapshot, OnDisk)]

    # Writing

    def _store(self, values: Values, fresh: Snapshot) -> None:
        """Write the state to disk. If that fails, keep it in memory if it fits."""
        variables = [variable for variable, _ in values]
        values.clear()  # copies, on an accelerator; not needed while the files are written
        for snapshot in self._on_disk():
            if snapshot.step != 0:
                snapshot.arrays = {}
        found = self._attempt(lambda: self._write(fresh))
        if found is None:
            if not missing_bytes(variables, fresh.step):
                super()._store([(v, keras_variables.view(v)) for v in variables], fresh)
            return
        self.note()
        self.snapshots.append(found)
        if not fresh.step and not missing_bytes(variables, 0):
            found.arrays = {id(v): compact(keras_variables.read(v)) for v in variables}
            found.only_files = False
        self._attempt(self._prune)

    def _write(self, fresh: Snapshot) -> OnDisk:
        """Write one snapshot; return it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock.take()
        atomic_files.sweep(self.folder)
        run, path = self._run, self.folder / f"snapshot-{next_number(self.folder):08d}"
        epoch, batch = run.counts.position
        about: dict[str, Any] = {"step": fresh.step, "epoch": epoch, "batch": batch}
        about |= {"verified": fresh.verified, "guard_state": GuardState.of(run).to_dict()}
        with atomic_files.beside(path, "snapshot") as unfinished:
            unfinished.mkdir()
            parts = (run.model, run.train_state(), unfinished, self._unsaved)
            record = save(*parts, **about)
        noted = fresh.verified
        return OnDisk(**vars(fresh), path=path, record=record, noted=noted, only_files=True)

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
                ours, why = self._on_disk(), str(error).partition("\n")[0]
                last = (
                    f"The newest one is {ours[-1].path.name}." if ours else "This run has none yet."
                )
                self._run.say(f"NanGuard: cannot write snapshots to {self.folder}: {why}. {last}")
            return None

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
            self.snapshots = [s for s in self.snapshots if s is not gone]
            if not gone.step and not gone.only_files:
                start = Snapshot(0, gone.good, True, 0, gone.arrays, gone.drawn)
                self.snapshots.insert(0, start)
        if len(ours) >= self.keep:  # in memory are those that could not be written
            self.snapshots = [s for s in self.snapshots if isinstance(s, OnDisk) or not s.step]

    def promote(self, good: int) -> None:
        """Mark snapshots as verified, also in their files."""
        super().promote(good)
        for snapshot in self._on_disk():
            if snapshot.verified and not snapshot.noted:
                snapshot.noted = self._attempt(partial(self._mark_verified, snapshot)) is not None

    def _mark_verified(self, snapshot: OnDisk) -> bool:
        if snapshot.path.exists():
            snapshot.record.replaced(verified=True).write(snapshot.path)
        return True

    def note(self) -> None:
        """Save the present state of the policy."""
        if self._lock.held:
            path, state = self.folder / GUARD_STATE, GuardState.of(self._run)
            self._attempt(lambda: atomic_files.write_json(path, state.to_dict()))

    def forget_after(self, step: int) -> None:
        """Remove the snapshots taken after this step, also on disk."""
        for snapshot in self._on_disk():
            if snapshot.step > step:
                self._attempt(partial(atomic_files.remove, snapshot.path))
        super().forget_after(step)

    def complete(self, variable: Any, value: np.ndarray[Any, Any]) -> None:
        """Add a value to the state before the first step if it is in memory."""
        if not (isinstance(self.start, OnDisk) and self.start.only_files):
            super().complete(variable, value)

    def close(self) -> None:
        """Release all snapshots in memory, and the lock of the folder."""
        super().close()
        self._lock.release()

    def _missing(self, variables: Sequence[Any], step: int, level: Level | None) -> float:
        """Return the bytes that writing the state needs if they are not free, else 0."""
        size = PASSES * max((keras_variables.bytes_of(v) for v in variables), default=0)
        return 0.0 if memory.room_for(size) else float(size)

    # Reading

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
        if snapshot.arrays or not isinstance(snapshot, OnDisk):
            return True
        everything = self._everything()
        if not memory.room_for(2 * size_of(everything)):
            return False
        try:
            with left_as_they_are(everything):
                self._load(snapshot)
                snapshot.arrays = {id(v): keras_variables.read(v) for v in everything}
        except FileFormatError as error:
            warnings.warn(f"NanGuard skips a snapshot: {error}", stacklevel=3)
        return bool(snapshot.arrays)

    def restorable(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot can be written into the variables, from memory or from its files."""
        if self.at_hand(snapshot):
            return True
        try:
            return isinstance(snapshot, OnDisk) and bool(read(snapshot.path))
        except FileFormatError:
            return False

    def write(
        self,
        snapshot: Snapshot,
        variables: Iterable[Any],
        changed: Iterable[tuple[Any, Any]] = (),
        undo: bool = True,
    ) -> None:
        """Write a snapshot into variables, from its files if it is not in memory.

        Raises:
            StateLostError: if neither the snapshot nor the previous state could be written
                completely.
        """
        if snapshot.arrays or not isinstance(snapshot, OnDisk):
            super().write(snapshot, variables, changed, undo)
            return
        wanted = {id(v) for v in variables}
        others = [v for v in self._everything() if id(v) not in wanted]

        def from_files() -> None:
            with left_as_they_are(others):
                self._load(snapshot)

        pairs = [partial(keras_variables.write, *pair) for pair in changed]
        whole_writes.finish([from_files, *pairs])

    def _load(self, snapshot: OnDisk) -> None:
        """Write all variables of the state from the files of a snapshot."""
        path = snapshot.path
        load(self._run.model, self._everything(), (), path, read(path))


class Lock:
    """A lock on the folder: only one process at a time can write to it.

    Attributes:
        held: whether this process has the lock.
    """

    def __init__(self, path: Path):
        self._lock = FileLock(path, timeout=0, is_singleton=True, thread_local=False)
        self.held = False

    def take(self) -> None:
        """Acquire the lock, unless this process has it.

        Raises:
            OSError: if the file cannot be written, or another process has the lock.
        """
        if self.held:
            return
        try:
            self._lock.acquire()
        except Timeout:
            folder = Path(self._lock.lock_file).parent
            remedy = "use one directory per run"
            raise OSError(f"another run writes to {folder}; {remedy}") from None
        except NotImplementedError:  # a file system without locks
            pass
        self.held = True

    def release(self) -> None:
        """Release the lock."""
        if self.held:
            self._lock.release()
        self.held = False
