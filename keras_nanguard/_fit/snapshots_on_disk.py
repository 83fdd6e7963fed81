"""A ring of verified states on disk, from which another process can go on.

Each snapshot is one folder, written beside and renamed::

    snapshots/
      course.json                what the policy has changed so far, written anew at every incident
      snapshot-00000012/
        state.weights.h5         what Keras itself saves: weights, statistics, optimizers. Any Keras program can load it
        rest.npz                 what it does not hold: seeds, states of stateful RNNs, metrics. Plain arrays, no pickle
        snapshot.json            position, verified or not, checksums of the two files, and of itself

A process that dies at any moment leaves whole snapshots and, at worst, an unfinished folder that the next one removes. What cannot be
written (a full disk, a folder that may only be read, one that another process writes to) ends no training: it is said once, the snapshots
that are there stay, and the next one is tried again.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import keras
import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._core import atomic_files, memory
from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._core.levels import Level
from keras_nanguard._core.plain_text import plain_text
from keras_nanguard._files.stored import PARSE_ERRORS
from keras_nanguard._fit.guard_state import GuardState
from keras_nanguard._fit.recovery import Recovery
from keras_nanguard._fit.saved_by_keras import left_out
from keras_nanguard._fit.snapshot_files import COURSE, REST, WEIGHTS, SnapshotRecord, folder_of, next_number, read, written
from keras_nanguard._fit.snapshots import Ring, Snapshot, compact, left_as_they_are, size_of, without_room
from keras_nanguard._keras import optimizers as keras_optimizers, saving as keras_saving, variables as keras_variables
from keras_nanguard._keras.overrides import without_warnings
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._version import __version__

__all__ = ["DiskRing", "build_optimizers", "load", "signature", "variables_of"]

GENERATOR = "generator"
"""In `rest.npz`, on PyTorch: the state of its generator."""

LOCK = "snapshots.lock"
"""Name of the file, beside the folder, that the process has locked that writes to it."""

PASSES = 3
"""Copies of the largest variable for which there has to be room while the files are written."""

T = TypeVar("T")


def variables_of(train_state: TrainState) -> list[Any]:
    """Return everything that a snapshot on disk holds, in its order, but the metrics."""
    return list(train_state.everything)


def signature(variables: Iterable[Any]) -> str:
    """Return what two models have in common if the state of one fits the other."""
    text = ";".join(f"{tuple(v.shape)} {v.dtype}" for v in variables)
    return hashlib.sha256(text.encode()).hexdigest()


def build_optimizers(train_state: TrainState, trained: Sequence[Sequence[int] | None]) -> None:
    """Build the optimizers that were built when a snapshot was taken, for the same weights."""
    weights = [*train_state.trainable, *train_state.other]
    for optimizer, numbers in zip(train_state.optimizers, trained):
        if numbers is not None and not optimizer.built and max(numbers, default=0) < len(weights):
            optimizer.build([weights[number] for number in numbers])


def load(
    model: Any, variables: Sequence[Any], metrics: Sequence[Any], path: Path, record: SnapshotRecord
) -> np.ndarray[Any, Any] | None:
    """Write a snapshot that `read` has checked into the variables of a model, and its metrics where they are the same.

    Returns:
        The state of the generator that is no variable's, for the `host` of a backend; `None` where there is none.

    Raises:
        FileFormatError: if it belongs to a model of another shape; some variables may be written by then.
    """
    if record.signature != signature(variables):
        raise FileFormatError(f"{path} belongs to another model: its variables have other shapes or dtypes")
    try:
        if WEIGHTS in record.files:
            with without_warnings():
                keras_saving.load_weights(model, path / WEIGHTS)
        with np.load(path / REST, allow_pickle=False) as arrays:
            for number, _, dtype in record.rest:
                keras_variables.write(variables[number], _typed(arrays[f"v{number}"], dtype))
            if len(metrics) == record.metrics:
                for number, metric in enumerate(metrics):
                    keras_variables.write(metric, arrays[f"m{number}"])
            drawn: np.ndarray[Any, Any] | None = arrays.get(GENERATOR)
            return drawn
    except PARSE_ERRORS as error:
        raise FileFormatError(f"{path} does not fit this model: {plain_text(error)}") from error


class DiskRing(Ring):
    """The snapshots of one fit on disk.

    The state before the first step also stays in memory: a run that diverges may have to go back to it, and a model may get variables
    in its first step that no file written before can hold.

    Args:
        keep: how many there may be in the folder at a time, those of earlier runs included.
        good_after: good steps that make a snapshot verified.
        directory: the guard's directory.
        recovery: what the policy changes in the run that takes them.
        say: prints a line.
    """

    only_reads = False

    def __init__(
        self, keep: int, good_after: int, directory: str | Path, recovery: Recovery, say: Callable[[str], None] = lambda line: None
    ):
        super().__init__(keep, good_after)
        self.folder, self.recovery, self.state = folder_of(directory), recovery, recovery.state
        self._say, self._said, self._lock = say, set[str](), atomic_files.Lock(self.folder.parent / LOCK)
        self._left_out: tuple[tuple[int, ...], frozenset[int]] = ((), frozenset())

    def _store(
        self, values: list[tuple[Any, np.ndarray[Any, Any]]], step: int, good: int, verified: bool, proof: int, level: Level | None
    ) -> None:
        """Write the state to disk; where that fails, keep it in memory, if there is room."""
        variables = [variable for variable, _ in values]
        values.clear()  # copies, on an accelerator, which nobody needs while the files are written
        for snapshot in self.snapshots:
            if snapshot.step != 0 and isinstance(snapshot, _OnDisk):
                snapshot.arrays = {}
        found = self._attempt(lambda: self._write_folder(step, verified))
        if found is None:
            if not without_room(variables, step):
                super()._store([(v, keras_variables.view(v)) for v in variables], step, good, verified, proof, level)
            return
        self.note()
        in_memory = not step and not without_room(variables, step)
        arrays = {id(v): compact(keras_variables.read(v)) for v in variables} if in_memory else {}
        taken = _OnDisk(Snapshot(step, good, verified, proof, arrays, level=level), *found, self._load)
        taken.without_room = not step and not in_memory
        self.snapshots.append(taken)
        self._attempt(self._prune)

    def _write_folder(self, step: int, verified: bool) -> tuple[Path, SnapshotRecord]:
        """Write one snapshot, and return where it is and what it says of itself."""
        self._take_folder()
        atomic_files.sweep(self.folder)
        path = self.folder / f"snapshot-{next_number(self.folder):08d}"
        with atomic_files.beside(path, "snapshot") as unfinished:
            unfinished.mkdir()
            return path, self._write(unfinished, step, verified)

    def _take_folder(self) -> None:
        """Make the folder, and lock it against other processes.

        Raises:
            OSError: if it cannot be written, or another process has locked it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._lock.take():
            raise OSError(f"another process writes to {self.folder}; give each run a directory of its own")

    def close(self) -> None:
        """Let another process write to the folder."""
        self._lock.release()

    def _attempt(self, write: Callable[[], T]) -> T | None:
        """Write something to the folder; training goes on where that fails, a line says so once, and `None` is returned."""
        try:
            return write()
        except (OSError, RuntimeError, FileFormatError) as error:
            if memory.is_exhausted(error):
                raise
            why = str(error).partition("\n")[0]
            if (kind := f"{type(error).__name__} {getattr(error, 'errno', None)}") not in self._said:
                self._said.add(kind)
                whole = [s for s in self.snapshots if isinstance(s, _OnDisk)]
                last = f"The last one is {whole[-1].path.name}" if whole else "There is none of this run"
                self._say(f"NanGuard: snapshots cannot be written to {self.folder}: {why}. {last}; training goes on.")
            return None

    def _missing(self, variables: Sequence[Any], step: int, level: Level | None) -> float:
        """Return the bytes that it takes to write the state, where they are not free."""
        size = PASSES * max((keras_variables.bytes_of(v) for v in variables), default=0)
        return 0.0 if memory.room_for(size) else float(size)

    def complete(self, variable: Any, value: np.ndarray[Any, Any]) -> None:
        """Add to the state before the first step, where all of it is in memory."""
        if not (isinstance(self.start, _OnDisk) and self.start.without_room):
            super().complete(variable, value)

    def promote(self, good: int) -> None:
        """Mark as verified what enough good steps have followed, in the files too."""
        super().promote(good)
        for snapshot in self.snapshots:
            if isinstance(snapshot, _OnDisk) and snapshot.verified and not snapshot.noted:
                snapshot.noted = self._attempt(snapshot.prove) is not None

    def newest(self, depth: int = 1) -> Snapshot | None:
        """Return the verified snapshot that is `depth`-th from the newest, or the next older one where that is broken."""
        while (snapshot := super().newest(depth)) is not None:
            if self.restorable(snapshot):
                return snapshot
            self.snapshots = [s for s in self.snapshots if s is not snapshot]
        return None

    def at_hand(self, snapshot: Snapshot) -> bool:
        """Read a snapshot's values from disk where they are not in memory, and there is room; returns whether they are now."""
        if snapshot.arrays or not isinstance(snapshot, _OnDisk):
            return True
        if not memory.room_for(2 * size_of(variables_of(self.state.train_state()))):
            return False
        try:
            self._fetch(snapshot)
        except FileFormatError as error:
            warnings.warn(f"NanGuard skips a snapshot: {error}", stacklevel=3)
        return bool(snapshot.arrays)

    def restorable(self, snapshot: Snapshot) -> bool:
        """Whether a snapshot can be written into the variables: from memory, or straight from its files."""
        if self.at_hand(snapshot):
            return True
        try:
            return isinstance(snapshot, _OnDisk) and bool(read(snapshot.path))
        except FileFormatError:
            return False

    def forget_after(self, step: int) -> None:
        """Give up the snapshots taken after this step, on disk too."""
        for snapshot in self.snapshots:
            if snapshot.step > step and isinstance(snapshot, _OnDisk):
                self._attempt(snapshot.remove)
        super().forget_after(step)

    def note(self) -> None:
        """Write down what the policy has changed so far."""
        if self._lock.held:
            self._attempt(lambda: atomic_files.write_json(self.folder / COURSE, GuardState.of(self.recovery).to_dict()))

    def _fetch(self, snapshot: _OnDisk) -> None:
        """Read the values back, by way of the model, which is left as it is."""
        record = read(snapshot.path)
        variables = variables_of(self.state.train_state())
        with left_as_they_are(variables):
            load(self.state.model, variables, (), snapshot.path, record)
            snapshot.arrays = {id(v): keras_variables.read(v) for v in variables}

    def _load(self, snapshot: _OnDisk, variables: Iterable[Any]) -> None:
        """Write a snapshot from its files into these variables of the model; the others, which are small, stay as they are."""
        state = variables_of(self.state.train_state())
        wanted = {id(v) for v in variables}
        with left_as_they_are([v for v in state if id(v) not in wanted]):
            load(self.state.model, state, (), snapshot.path, read(snapshot.path))

    def _write(self, folder: Path, step: int, verified: bool) -> SnapshotRecord:
        model, train_state = self.state.model, self.state.train_state()
        variables = variables_of(train_state)
        files = {}
        if hasattr(model, "save_weights") and model.built:  # a layer alone has no file format of its own
            keras_saving.save_weights(model, folder / WEIGHTS)  # checked already: past the firewall
            files[WEIGHTS] = _kept(folder / WEIGHTS)
        left_out = self._not_in(folder / WEIGHTS, variables) if files else frozenset(range(len(variables)))
        rest = {number: keras_variables.read(variables[number]) for number in sorted(left_out)}
        with (folder / REST).open("wb") as file:
            metrics = {f"m{number}": keras_variables.read(metric) for number, metric in enumerate(train_state.metrics)}
            arrays = {f"v{number}": _plain(array) for number, array in rest.items()}
            if (drawn := current.host().generator_state()) is not None:
                arrays[GENERATOR] = drawn
            np.savez(file, allow_pickle=False, **arrays, **metrics)  # type: ignore[arg-type]
        files[REST] = _kept(folder / REST)
        epoch, batch = self.recovery.counts.position
        record = SnapshotRecord(
            step=step,
            epoch=epoch,
            batch=batch,
            verified=verified,
            files=files,
            signature=signature(variables),
            rest=tuple((number, str(variables[number].path), array.dtype.name) for number, array in rest.items()),
            metrics=len(metrics),
            optimizers=_trained(train_state),
            course=GuardState.of(self.recovery).to_dict(),
            measured={
                "learning_rate": [str(keras_optimizers.learning_rate(o)) for o in train_state.optimizers],
                "loss_scale": [str(float(keras_variables.read(scale))) for scale, _ in train_state.scales],
            },
            versions={
                "keras": keras.__version__,
                "backend": current.name(),
                "numpy": np.__version__,
                "keras_nanguard": __version__,
            },
        )
        record.write(folder)
        return record

    def _not_in(self, weights: Path, variables: list[Any]) -> frozenset[int]:
        """Return the numbers of the variables that Keras does not save, found once for each set of variables."""
        key = tuple(id(v) for v in variables)
        if self._left_out[0] != key:
            self._left_out = (key, left_out(self.state.model, weights, variables))
        return self._left_out[1]

    def _prune(self) -> None:
        """Bring the folder down to `keep` snapshots: those of earlier runs go first, then as in memory.

        The state before the first step stays in memory when its files go.
        """
        ours = [s for s in self.snapshots if isinstance(s, _OnDisk)]
        foreign = [path for path in written(self.folder) if path not in {s.path for s in ours}]
        for path in foreign[: max(len(foreign) + len(ours) - self.keep, 0)]:
            atomic_files.remove(path)
        while (gone := self.replaced(ours[:-1], ours[-1].level)) is not None:
            atomic_files.remove(gone.path)
            ours = [s for s in ours if s is not gone]
            left = [Snapshot(0, gone.good, True, 0, gone.arrays, gone.drawn)] if not gone.step and not gone.without_room else []
            self.snapshots = [one for s in self.snapshots for one in ([s] if s is not gone else left)]
        if len(ours) >= self.keep:  # those that are in memory because they could not be written, or from before there was no room
            self.snapshots = [s for s in self.snapshots if isinstance(s, _OnDisk) or not s.step]


class _OnDisk(Snapshot):
    """A snapshot whose values are in files until they are asked for.

    Attributes:
        path, record: where its files are, and what they say of it.
        noted: whether they say that it is verified, if it is.
        without_room: whether it is the state before the first step, and is not in memory because it does not fit.
    """

    without_room = False

    def __init__(self, taken: Snapshot, path: Path, record: SnapshotRecord, load: Callable[[_OnDisk, Iterable[Any]], None]):
        super().__init__(taken.step, taken.good, taken.verified, taken.proof, taken.arrays, taken.drawn, level=taken.level)
        self.path, self.record, self.noted, self._load = path, record, taken.verified, load

    def write(self, variables: Iterable[Any]) -> None:
        """Write its values into variables, from its files where they are not in memory."""
        if self.arrays:
            super().write(variables)
        else:
            self._load(self, variables)

    def prove(self) -> bool:
        """Note in its file that enough good steps have followed."""
        if self.path.exists():
            SnapshotRecord(**{**_shallow(self.record), "verified": True}).write(self.path)
        return True

    def remove(self) -> None:
        """Remove its files."""
        atomic_files.remove(self.path)


def _shallow(record: SnapshotRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in SnapshotRecord.__slots__}


def _trained(train_state: TrainState) -> tuple[tuple[int, ...] | None, ...]:
    """Return the numbers of the weights that each optimizer is built for."""
    numbers = {id(v): number for number, v in enumerate((*train_state.trainable, *train_state.other))}
    built = [keras_optimizers.trained_by(o) if o.built else None for o in train_state.optimizers]
    return tuple(None if b is None else tuple(numbers[id(v)] for v in b if id(v) in numbers) for b in built)


def _kept(path: Path) -> str:
    atomic_files.flush_to_disk(path)
    return atomic_files.fingerprint(path)


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array in a dtype that NumPy itself can write: bfloat16 and float8 as the bytes they are."""
    return array.view(f"u{array.dtype.itemsize}") if array.dtype.kind == "V" or array.dtype.isbuiltin != 1 else array


def _typed(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Undo `_plain`."""
    if array.dtype.name == dtype:
        return array
    import ml_dtypes

    return array.view(getattr(ml_dtypes, dtype))
