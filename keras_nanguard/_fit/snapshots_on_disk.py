"""The snapshots of one fit on disk.

If nothing can be written (a full disk, a folder that is read-only, one that another run writes to),
training continues: a line warns once, existing snapshots remain, and the next snapshot is tried
again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from keras_nanguard._core import atomic_files, memory
from keras_nanguard._files.snapshots import FOLDER, GUARD_STATE, SnapshotFile, save, written
from keras_nanguard._fit.recovery import GuardState
from keras_nanguard._fit.snapshots import Agree, Ring, Snapshot, Values, missing_bytes, size_of
from keras_nanguard._keras import variables as keras_variables
from keras_nanguard._keras.train_state import TrainState

LOCK = "snapshots.lock"

T = TypeVar("T")


class DiskRing(Ring):
    """The snapshots of one fit on disk.

    The state before the first step also stays in memory if it fits. A diverging run may have to
    return to that state after its folder on disk was removed.

    Args:
        directory: the guard's directory.
        say: prints a line.
        keep, good_after, agree: see `Ring`.
    """

    def __init__(
        self,
        directory: str | Path,
        say: Callable[[str], None],
        keep: int,
        good_after: int,
        agree: Agree = lambda *facts: facts,
    ):
        super().__init__(keep, good_after, agree)
        self.folder = Path(directory) / FOLDER
        self._say, self._said = say, set[str]()
        path = self.folder.parent / LOCK
        self._lock = FileLock(path, timeout=0, is_singleton=True, thread_local=False)
        self._locked = False

    def _missing(self, fresh: Snapshot, state: TrainState) -> tuple[float, bool]:
        """Return the bytes that writing the state needs if they are not free, else 0; and `False`,
        because no file replaces another one early.
        """
        copied = size_of(v for v in state.kept if not keras_variables.on_host(v))
        return (0.0 if memory.room_for(copied) else float(copied)), False

    def _store(self, fresh: Snapshot, values: Values, state: TrainState, short: bool) -> None:
        """Write the state to disk. If that fails, keep it in memory if it fits."""
        values.clear()  # copies, on an accelerator; not needed while the files are written
        fresh.file = self._attempt(partial(self._write, fresh, state))
        unwritten = fresh.file is None or not fresh.step
        if unwritten and not missing_bytes(state.kept, not fresh.step):
            values += [(v, keras_variables.view(v)) for v in state.kept]
            super()._store(fresh, values, state, short)
        elif fresh.file is not None:
            fresh.arrays = fresh.file
            self.snapshots.append(fresh)
        if fresh.file is not None:
            self._attempt(self._prune)

    def _write(self, fresh: Snapshot, state: TrainState) -> SnapshotFile:
        """Write one snapshot; return its files."""
        self._take_lock()
        atomic_files.sweep(self.folder)
        epoch, batch = fresh.position
        about = {"step": fresh.step, "epoch": epoch, "batch": batch, "verified": fresh.verified}
        return save(self.folder, state, **about)

    def _take_lock(self) -> None:
        """Create the folder, and acquire its lock: only one process at a time writes to it.

        Raises:
            OSError: if the file cannot be written, or another process has the lock.
        """
        if self._locked:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            remedy = "use one directory per run"
            raise OSError(f"{self.folder.parent} is in use by another run; {remedy}") from None
        except NotImplementedError:  # a file system without locks
            pass
        self._locked = True

    def _attempt(self, write: Callable[[], T]) -> T | None:
        """Write something to the folder. If that fails, print one line and return `None`."""
        try:
            return write()
        except Exception as error:
            if memory.is_exhausted(error):
                raise
            kind = f"{type(error).__name__} {getattr(error, 'errno', None)}"
            if kind not in self._said:
                self._said.add(kind)
                names = [s.file.path.name for s in self.snapshots if s.file is not None]
                last = f"The newest one is {names[-1]}." if names else "This run has none yet."
                why = str(error).partition("\n")[0]
                self._say(f"NanGuard: cannot write snapshots to {self.folder}: {why}. {last}")
            return None

    def _prune(self) -> None:
        """Reduce the folder to `keep` snapshots, removing those of earlier runs first."""
        ours = [s for s in self.snapshots if s.file is not None]
        known = {s.file.path for s in ours if s.file is not None}
        foreign = [path for path in written(self.folder) if path not in known]
        for path in foreign[: max(len(foreign) + len(ours) - self.keep, 0)]:
            atomic_files.remove(path)
        while gone := self.replaced(ours[:-1], ours[-1].level):
            if gone.arrays is gone.file:  # not also in memory
                self.snapshots = [s for s in self.snapshots if s is not gone]
            ours = [s for s in ours if s is not gone]
            self._remove(gone)
        if len(ours) >= self.keep:  # in memory are those that could not be written
            self.snapshots = [s for s in self.snapshots if s.file is not None or not s.step]

    def _remove(self, snapshot: Snapshot) -> None:
        """Remove the folder of a snapshot."""
        file, snapshot.file = snapshot.file, None
        if file is not None:
            file.close()
            atomic_files.remove(file.path)

    def promote(self, good: int) -> float:
        """Mark snapshots as verified, also in their files; see `Ring`."""
        pending = super().promote(good)
        for snapshot in self.snapshots:
            file = snapshot.file
            if snapshot.verified and file is not None and not file.record.verified:
                self._attempt(file.mark_verified)
        return pending

    def save_changes(self, changes: Callable[[], GuardState]) -> None:
        """Save the current changes of the policy."""

        def write() -> None:
            self._take_lock()
            path = self.folder / GUARD_STATE
            atomic_files.write_json(path, changes().to_dict())

        self._attempt(write)

    def forget_after(self, step: int) -> None:
        """Remove the snapshots taken after this step, also on disk."""
        for snapshot in self.snapshots:
            if snapshot.step > step:
                self._attempt(partial(self._remove, snapshot))
        super().forget_after(step)

    def close(self) -> None:
        """Release all snapshots in memory, and the lock of the folder."""
        super().close()
        if self._locked:
            self._lock.release()
        self._locked = False
