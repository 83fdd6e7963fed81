"""The files of a snapshot: names of the folders, and their record."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keras_nanguard._core import atomic_files
from keras_nanguard._core.errors import FileFormatError, expected
from keras_nanguard._core.plain_text import plain_text

__all__ = [
    "GUARD_STATE",
    "REST",
    "WEIGHTS",
    "SnapshotRecord",
    "folder_of",
    "next_number",
    "read",
    "written",
]

FORMAT = 1
"""Version of the format of `snapshot.json`."""

NAME = re.compile(r"snapshot-([0-9]{8,})")
"""Name of a snapshot. Other entries of the folder are ignored."""

FOLDER, GUARD_STATE = "snapshots", "guard_state.json"
WEIGHTS, REST, RECORD = "state.weights.h5", "rest.npz", "snapshot.json"


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """The content of `snapshot.json`.

    Attributes:
        step: number of complete steps in the fit that took it.
        epoch, batch: the epoch, and its number of complete batches.
        verified: whether enough good steps have followed.
        files: SHA-256 of each other file of the snapshot.
        signature: SHA-256 of the shapes and dtypes of all variables, in their order.
        rest: `[number, path, dtype]` of each variable in `rest.npz`.
        metrics: number of variables of metrics in `rest.npz`.
        optimizers: for each optimizer the numbers of the weights for which it was built, or `None`
            if it was not built.
        guard_state: the state of the policy, as `GuardState.to_dict()`.
        measured: learning rates and loss scales, for people who read the file.
        versions: of Keras, its backend, NumPy and this library.
    """

    step: int
    epoch: int
    batch: int
    verified: bool
    files: dict[str, str]
    signature: str
    rest: tuple[tuple[int, str, str], ...]
    metrics: int
    optimizers: tuple[tuple[int, ...] | None, ...]
    guard_state: dict[str, Any]
    measured: dict[str, Any]
    versions: dict[str, str]

    @property
    def untrained(self) -> bool:
        """Whether no optimizer was built, so that no step can have run."""
        return all(weights is None for weights in self.optimizers)

    def check(self) -> None:
        """Check the fields after reading a file.

        Raises:
            TypeError: if a field has a wrong type.
        """
        counts = (self.step, self.epoch, self.batch, self.metrics)
        tables = (self.files, self.guard_state, self.measured, self.versions)
        if not (
            all(map(_is_count, counts))
            and all(isinstance(table, dict) for table in tables)
            and isinstance(self.verified, bool)
        ):
            raise TypeError("a count, a table or a flag has another type")
        if not (isinstance(self.rest, tuple) and all(_is_entry(entry) for entry in self.rest)):
            raise TypeError("rest is not a list of number, path and dtype")
        if not (
            isinstance(self.optimizers, tuple)
            and all(built is None or _are_counts(built) for built in self.optimizers)
        ):
            raise TypeError("optimizers is not a list of numbers of weights")

    def write(self, folder: Path) -> None:
        """Write the record into the folder of its snapshot."""
        atomic_files.write_json(folder / RECORD, {"format": FORMAT, **asdict(self)})


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _are_counts(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(map(_is_count, values))


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, (list, tuple)) or len(entry) != 3:
        return False
    number, path, dtype = entry
    return _is_count(number) and isinstance(path, str) and isinstance(dtype, str)


def folder_of(directory: str | Path) -> Path:
    """Return the folder of the snapshots in a guard's directory."""
    return Path(directory) / FOLDER


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
    return [
        (int(match[1]), path)
        for path in entries
        if (match := NAME.fullmatch(path.name)) is not None
    ]


def next_number(folder: Path) -> int:
    """Return the number of the next snapshot, which is higher than all in the folder."""
    return max((number for number, _ in _numbered(folder)), default=0) + 1


def read(path: Path) -> SnapshotRecord:
    """Return the record of a snapshot after checking all of its files.

    Raises:
        FileFormatError: if a file is missing, truncated, changed, or of another format.
    """
    data = atomic_files.read_json(path / RECORD)
    if data.pop("format", None) != FORMAT:
        raise FileFormatError(
            expected(f"a snapshot of format {FORMAT}", str(path), "Use the version that wrote it.")
        )
    given: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in data.items()}
    try:
        record = SnapshotRecord(**given)
        record.check()
    except TypeError as error:
        raise FileFormatError(
            f"{path / RECORD} has a malformed field: {plain_text(error)}"
        ) from error
    for name, fingerprint in record.files.items():
        if name not in (WEIGHTS, REST):
            raise FileFormatError(f"{path / RECORD} lists an unknown file: {plain_text(name)}")
        _check(path / name, fingerprint)
    return record


def _check(file: Path, fingerprint: str) -> None:
    try:
        if not file.is_file():
            raise FileFormatError(f"{file} is missing")
        found = atomic_files.fingerprint(file)
    except OSError as error:
        raise FileFormatError(f"{file} cannot be read: {error}") from error
    if found != fingerprint:
        raise FileFormatError(f"{file} was modified or damaged: its checksum does not match")
