"""The files of a snapshot of the train state, from which another process can resume.

Each snapshot is one folder::

    snapshots/
      guard_state.json           the policy's changes, written at every incident
      snapshot-00000012/
        state.npz                every variable in plain NumPy arrays, the metrics, the generator
        snapshot.json            position, verified or not, checksums of both files

A process that is killed leaves complete snapshots and at most one unfinished folder, which the next
process removes.

If nothing can be written (a full disk, a folder that is read-only, one that another run writes to),
training continues: a line warns once, existing snapshots remain, new ones stay in memory, and the
next one is written again.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from filelock import FileLock, Timeout
from pydantic import Field, ValidationError

from keras_nanguard._backends import current
from keras_nanguard._core import atomic_files, memory
from keras_nanguard._core.errors import FileFormatError, expected
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._files.formats.limits import PARSE_ERRORS, refuse_bomb
from keras_nanguard._fit.recovery import GuardState
from keras_nanguard._fit.steps import Time
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.torch_tensors import resizable
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.records import Record

FORMAT = 2
"""Version of the format of `snapshot.json`."""

NAME = re.compile(r"snapshot-([0-9]{8,})")
"""Name of a snapshot. Other entries of the folder are ignored."""

FOLDER, GUARD_STATE, LOCK = "snapshots", "guard_state.json", "snapshots.lock"
STATE, RECORD = "state.npz", "snapshot.json"

GENERATOR = "generator"
"""Key in `state.npz` of the states of PyTorch's generators."""

Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Array = np.ndarray[Any, Any]
T = TypeVar("T")


class SnapshotRecord(Record):
    """The content of `snapshot.json`.

    Attributes:
        step: number of complete steps in the fit that took it.
        epoch, batch: the epoch, and its number of complete batches; once an epoch has ended with
            all callbacks, the next one and 0.
        verified: whether enough good steps have followed.
        state: SHA-256 of `state.npz`.
        signature: SHA-256 of the shapes and dtypes of all variables, in their order.
        variables: path and dtype of each variable; its array in `state.npz` is `v0`, `v1` and so
            on.
        metrics: number of variables of metrics: `m0`, `m1` and so on.
        generator: whether there is the state of a generator that belongs to no variable.
        optimizers: for each optimizer the numbers of the weights for which it was built, or `None`
            if it was not built.
        versions: of this library, Keras, its backend, NumPy and Python.
        fit: number of earlier fits of the guard in its process.
    """

    step: Count
    epoch: Count
    batch: Count
    verified: bool
    state: str
    signature: str
    variables: tuple[tuple[str, str], ...]
    metrics: Count
    generator: bool
    optimizers: tuple[tuple[Count, ...] | None, ...]
    versions: dict[str, str]
    fit: Count = 0

    def write(self, folder: Path) -> None:
        """Write the record into the folder of its snapshot."""
        data = {"format": FORMAT, **self.model_dump(mode="json")}
        atomic_files.write_json(folder / RECORD, data)


# The folder


def written(folder: Path) -> list[Path]:
    """Return the snapshots in a folder, oldest first, including broken ones.

    Raises:
        FileFormatError: if the folder exists and cannot be read.
    """
    return [path for _, path in sorted(_numbered(folder)) if path.is_dir()]


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Return all entries of a folder with the name of a snapshot, and their numbers."""
    try:
        entries = list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise FileFormatError(f"{folder} cannot be read: {error}") from error
    named = ((NAME.fullmatch(path.name), path) for path in entries)
    return [(int(match[1]), path) for match, path in named if match is not None]


# One snapshot


def read(path: Path) -> SnapshotRecord:
    """Return the record of a snapshot after checking both of its files.

    Raises:
        FileFormatError: if a file is missing, truncated, changed, or of another format.
    """
    data = atomic_files.read_json(path / RECORD)
    if data.pop("format", None) != FORMAT:
        remedy = "Use the version that wrote it."
        raise FileFormatError(expected(f"a snapshot of format {FORMAT}", str(path), remedy))
    try:
        record = SnapshotRecord.model_validate_json(json.dumps(data))
    except (ValidationError, ValueError) as error:
        text = f"{path / RECORD} has a malformed field: {plain_text(error)}"
        raise FileFormatError(text) from error
    file = path / STATE
    try:
        if not file.is_file():
            raise FileFormatError(f"{file} is missing")
        found = atomic_files.fingerprint(file)
    except OSError as error:
        raise FileFormatError(f"{file} cannot be read: {error}") from error
    if found != record.state:
        raise FileFormatError(f"{file} was modified or damaged: its checksum does not match")
    return record


class SnapshotFile:
    """The files of a snapshot, with the values in `state.npz` by `id` of the variable. Each is read
    when it is needed.

    Args:
        path: the folder of a snapshot that `read` has checked.
        variables: all variables of the train state, in their order.

    Raises:
        FileFormatError: if the variables have other shapes or dtypes; also when a damaged value is
            read.
    """

    def __init__(self, path: Path, record: SnapshotRecord, variables: Iterable[Any]):
        variables = list(variables)
        if record.signature != signature(variables):
            what = "its variables have other shapes or dtypes"
            raise FileFormatError(f"{path} belongs to another model: {what}")
        self.path, self.record = path, record
        self._file: Any = None
        self._numbers = {id(variable): number for number, variable in enumerate(variables)}

    def __getitem__(self, key: int) -> Array:
        number = self._numbers[key]
        return atomic_files.typed(self._array(f"v{number}"), self.record.variables[number][1])

    def __contains__(self, key: object) -> bool:
        return key in self._numbers

    def metrics(self) -> list[Array]:
        """Return the values of the metrics."""
        return [self._array(f"m{number}") for number in range(self.record.metrics)]

    def generator(self) -> Array | None:
        """Return the state of the generator that belongs to no variable, if there is one."""
        return self._array(GENERATOR) if self.record.generator else None

    def _array(self, name: str) -> Array:
        try:
            if self._file is None:
                file = np.load(self.path / STATE, allow_pickle=False)
                for info in file.zip.infolist():
                    refuse_bomb(info)
                self._file = file
            array: Array = self._file[name]
            return array
        except PARSE_ERRORS as error:
            why = f"{self.path} does not fit this model: {plain_text(error)}"
            raise FileFormatError(why) from error

    def is_whole(self) -> bool:
        """Read the files; return whether they are unchanged since they were written; else warn."""
        try:
            return bool(read(self.path))
        except FileFormatError as error:
            warnings.warn(f"NanGuard skips a snapshot: {error}", stacklevel=4)
            return False

    def mark(self, **fields: Any) -> None:
        """Change these fields of the record, unless the folder of the snapshot was removed."""
        record = self.record.replaced(**fields)
        if self.path.exists():
            record.write(self.path)
        self.record = record

    def close(self) -> None:
        """Close the file until the next value is read."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def save(
    folder: Path, train_state: TrainState, time: Time, verified: bool, fit: int = 0
) -> SnapshotFile:
    """Write the state of a time into a new snapshot of a folder, and return its files.

    Args:
        fit: number of earlier fits of the guard.
    """
    path = folder / f"snapshot-{max((n for n, _ in _numbered(folder)), default=0) + 1:08d}"
    variables, drawn = train_state.everything, current.host().generator_state()
    values = [keras_variables.view(variable) for variable in variables]
    arrays = {f"v{number}": value for number, value in enumerate(values)}
    arrays |= {f"m{n}": keras_variables.read(v) for n, v in enumerate(train_state.metrics)}
    if drawn is not None:
        arrays[GENERATOR] = drawn
    paths = (str(variable.path) for variable in variables)
    with atomic_files.beside(path, "snapshot") as unfinished:
        unfinished.mkdir()
        atomic_files.save_arrays(unfinished / STATE, arrays)
        record = SnapshotRecord(
            step=time.step,
            epoch=time.epoch,
            batch=time.batch,
            verified=verified,
            fit=fit,
            state=atomic_files.fingerprint(unfinished / STATE),
            signature=signature(variables),
            variables=tuple(zip(paths, (value.dtype.name for value in values))),
            metrics=len(train_state.metrics),
            generator=drawn is not None,
            optimizers=_trained_by_each(train_state),
            versions=current.versions(),
        )
        record.write(unfinished)
    return SnapshotFile(path, record, variables)


def signature(variables: Iterable[Any]) -> str:
    """Return a hash that is the same for two models if the state of one fits the other."""
    text = ";".join(f"{None if resizable(v) else tuple(v.shape)} {v.dtype}" for v in variables)
    return hashlib.sha256(text.encode()).hexdigest()


def build_optimizers(
    model: Any, train_state: TrainState, trained: Sequence[Sequence[int] | None]
) -> None:
    """Build the optimizers that were built when the snapshot was taken, for the same weights. Those
    of layers are then part of the train state.
    """
    weights = [*train_state.trainable, *train_state.other]
    for optimizer, numbers in zip(train_state.found, trained):
        if numbers is None or max(numbers, default=0) >= len(weights):
            continue
        if optimizer in train_state.unused:
            keras_optimizers.note_use(model, optimizer)
        if not optimizer.built:
            optimizer.build([weights[number] for number in numbers])


def _trained_by_each(train_state: TrainState) -> tuple[tuple[int, ...] | None, ...]:
    """Return the numbers of the weights for which each optimizer is built."""
    weights = (*train_state.trainable, *train_state.other)
    numbers = {id(v): number for number, v in enumerate(weights)}
    left_out = set(map(id, train_state.unused))
    built = [
        keras_optimizers.trained_by(o) if o.built and id(o) not in left_out else None
        for o in train_state.found
    ]
    return tuple(
        None if b is None else tuple(numbers[id(v)] for v in b if id(v) in numbers) for b in built
    )


# The folder during a fit


class SnapshotFolder:
    """The files of the snapshots of one fit. Nothing is raised if they cannot be written.

    Args:
        fit: number of earlier fits of the guard.
        say_once: prints a line, once for each subject, its first argument.
    """

    def __init__(self, directory: str | Path, fit: int, say_once: Callable[[str, str], None]):
        self.path, self._fit, self._say_once = Path(directory) / FOLDER, fit, say_once
        self._files: list[SnapshotFile] = []
        path = self.path.parent / LOCK
        self._lock = FileLock(path, timeout=0, is_singleton=True, thread_local=False)
        self._locked = False

    def write(self, state: TrainState, time: Time, verified: bool) -> SnapshotFile | None:
        """Write one snapshot; return its files, `None` if they could not be written."""

        def write() -> SnapshotFile:
            self._take_lock()
            atomic_files.sweep(self.path)
            return save(self.path, state, time, verified, self._fit)

        file = self._attempt(write)
        self._files += [] if file is None else [file]
        return file

    def mark_verified(self, file: SnapshotFile) -> None:
        """Mark a snapshot as verified in its files."""
        if not file.record.verified:
            self._attempt(partial(file.mark, verified=True))

    def end_epoch(self, epoch: int, batch: int) -> None:
        """Note that an epoch has ended after this number of batches: a snapshot with this place is
        now the state before the next one.
        """
        for file in self._files:
            if (file.record.epoch, file.record.batch) == (epoch, batch):
                self._attempt(partial(file.mark, epoch=epoch + 1, batch=0))

    def remove(self, file: SnapshotFile) -> None:
        """Remove the files of a snapshot."""
        self._files = [other for other in self._files if other is not file]
        file.close()
        self._attempt(partial(atomic_files.remove, file.path))

    def remove_foreign(self, keep: int) -> None:
        """Remove snapshots of earlier runs, the oldest first, until there are `keep` in all."""

        def remove() -> None:
            own = {file.path for file in self._files}
            foreign = [path for path in written(self.path) if path not in own]
            for path in foreign[: max(len(foreign) + len(own) - keep, 0)]:
                atomic_files.remove(path)

        self._attempt(remove)

    def save_changes(self, changes: Callable[[], GuardState]) -> None:
        """Save the current changes of the policy."""

        def write() -> None:
            self._take_lock()
            atomic_files.write_json(self.path / GUARD_STATE, changes().to_dict())

        self._attempt(write)

    def close(self) -> None:
        """Release the lock of the folder."""
        if self._locked:
            self._lock.release()
        self._locked = False

    def _take_lock(self) -> None:
        """Create the folder, and acquire its lock: only one process at a time writes to it.

        Raises:
            OSError: if the file cannot be written, or another process has the lock.
        """
        if self._locked:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            remedy = "use one directory per run"
            raise OSError(f"{self.path.parent} is in use by another run; {remedy}") from None
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
            last = self._files[-1].path.name if self._files else ""
            kept = f"The newest one is {last}." if last else "This run has none yet."
            why = str(error).partition("\n")[0]
            line = f"NanGuard: cannot write snapshots to {self.path}: {why}. {kept}"
            self._say_once(f"snapshots: {kind}", line)
            return None
