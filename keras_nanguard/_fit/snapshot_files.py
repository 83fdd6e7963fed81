"""One snapshot on disk: its record and its files.

Each snapshot is one folder::

    snapshots/
      guard_state.json           the policy's changes, written at every incident
      snapshot-00000012/
        state.weights.h5         what Keras itself saves: weights, statistics, optimizers
        rest.npz                 the rest: seeds, states of stateful RNNs, metrics
        snapshot.json            position, verified or not, checksums of the files and of itself
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import keras
import numpy as np
from pydantic import Field, ValidationError

from keras_nanguard._backends import current
from keras_nanguard._core import atomic_files
from keras_nanguard._core.errors import FileFormatError, expected
from keras_nanguard._core.plain_text import plain_text
from keras_nanguard._files.stored import PARSE_ERRORS
from keras_nanguard._keras import (
    optimizers as keras_optimizers,
    saving as keras_saving,
    variables as keras_variables,
    whole_writes,
)
from keras_nanguard._keras.overrides import without_warnings
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._policy.records import Record
from keras_nanguard._version import __version__

__all__ = [
    *("GUARD_STATE", "SnapshotRecord", "build_optimizers", "folder_of", "left_out", "load"),
    *("next_number", "read", "save", "signature", "written"),
]

FORMAT = 1
"""Version of the format of `snapshot.json`."""

NAME = re.compile(r"snapshot-([0-9]{8,})")
"""Name of a snapshot. Other entries of the folder are ignored."""

FOLDER, GUARD_STATE = "snapshots", "guard_state.json"
WEIGHTS, REST, RECORD = "state.weights.h5", "rest.npz", "snapshot.json"

GENERATOR = "generator"
"""Key in `rest.npz` of the state of PyTorch's generator."""

Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Array = np.ndarray[Any, Any]


class SnapshotRecord(Record):
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

    step: Count
    epoch: Count
    batch: Count
    verified: bool
    files: dict[str, str]
    signature: str
    rest: tuple[tuple[Count, str, str], ...]
    metrics: Count
    optimizers: tuple[tuple[Count, ...] | None, ...]
    guard_state: dict[str, Any]
    measured: dict[str, Any]
    versions: dict[str, str]

    @property
    def untrained(self) -> bool:
        """Whether no optimizer was built, so that no step can have run."""
        return all(weights is None for weights in self.optimizers)

    def write(self, folder: Path) -> None:
        """Write the record into the folder of its snapshot."""
        data = {"format": FORMAT, **self.model_dump(mode="json")}
        atomic_files.write_json(folder / RECORD, data)


# The folder


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
    named = ((NAME.fullmatch(path.name), path) for path in entries)
    return [(int(match[1]), path) for match, path in named if match is not None]


def next_number(folder: Path) -> int:
    """Return the number of the next snapshot, which is higher than all in the folder."""
    return max((number for number, _ in _numbered(folder)), default=0) + 1


# Reading


def read(path: Path) -> SnapshotRecord:
    """Return the record of a snapshot after checking all of its files.

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


def load(
    model: Any, variables: Sequence[Any], metrics: Sequence[Any], path: Path, record: SnapshotRecord
) -> Array | None:
    """Write a snapshot that `read` has checked into the variables of a model.

    Args:
        model: the model.
        variables: all variables of its train state, in their order.
        metrics: the variables of its metrics, which are written if there are as many.
        path, record: the snapshot.

    Returns:
        The state of the generator that belongs to no variable, `None` if there is none.

    Raises:
        FileFormatError: if it belongs to a model of another shape; some variables may be written.
    """
    if record.signature != signature(variables):
        what = "its variables have other shapes or dtypes"
        raise FileFormatError(f"{path} belongs to another model: {what}")
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
            drawn: Array | None = arrays.get(GENERATOR)
            return drawn
    except PARSE_ERRORS as error:
        raise FileFormatError(f"{path} does not fit this model: {plain_text(error)}") from error


def signature(variables: Iterable[Any]) -> str:
    """Return a hash that is the same for two models if the state of one fits the other."""
    text = ";".join(f"{tuple(v.shape)} {v.dtype}" for v in variables)
    return hashlib.sha256(text.encode()).hexdigest()


def build_optimizers(train_state: TrainState, trained: Sequence[Sequence[int] | None]) -> None:
    """Build the optimizers that were built when the snapshot was taken, for the same weights."""
    weights = [*train_state.trainable, *train_state.other]
    for optimizer, numbers in zip(train_state.optimizers, trained):
        known = numbers is not None and max(numbers, default=0) < len(weights)
        if numbers is not None and known and not optimizer.built:
            optimizer.build([weights[number] for number in numbers])


# Writing


def save(
    model: Any,
    train_state: TrainState,
    folder: Path,
    unsaved: dict[str, frozenset[int]],
    **about: Any,
) -> SnapshotRecord:
    """Write the files of a snapshot into an empty folder, and return its record.

    Args:
        model: the model.
        train_state: its train state.
        folder: the folder.
        unsaved: the numbers of the variables that Keras does not save, by `signature`; what is
            missing is found by trial and added.
        **about: the fields of the record that do not follow from the state.
    """
    variables = list(train_state.everything)
    files, own = {}, signature(variables)
    numbers = frozenset(range(len(variables)))
    if hasattr(model, "save_weights") and model.built:  # a layer alone has no file format
        keras_saving.save_weights(model, folder / WEIGHTS)  # checked already: past the firewall
        files[WEIGHTS] = _sealed(folder / WEIGHTS)
        if own not in unsaved:
            unsaved[own] = left_out(model, folder / WEIGHTS, variables)
        numbers = unsaved[own]
    rest = {number: keras_variables.read(variables[number]) for number in sorted(numbers)}
    arrays = {f"v{number}": _plain(array) for number, array in rest.items()}
    arrays |= {f"m{n}": keras_variables.read(v) for n, v in enumerate(train_state.metrics)}
    if (drawn := current.host().generator_state()) is not None:
        arrays[GENERATOR] = drawn
    with (folder / REST).open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)  # type: ignore[arg-type]
    files[REST] = _sealed(folder / REST)
    record = SnapshotRecord(
        files=files,
        signature=own,
        rest=tuple((n, str(variables[n].path), rest[n].dtype.name) for n in sorted(rest)),
        metrics=len(train_state.metrics),
        optimizers=_trained_by_each(train_state),
        measured=_measured(train_state),
        versions={
            "keras": keras.__version__,
            "backend": current.name(),
            "numpy": np.__version__,
            "keras_nanguard": __version__,
        },
        **about,
    )
    record.write(folder)
    return record


def left_out(model: Any, weights: Path, variables: Sequence[Any]) -> frozenset[int]:
    """Return the numbers of the variables that loading this file, just saved, does not restore.

    This works for any layer and release of Keras. It takes no copy of the state: the first entry of
    each variable is changed, and restored afterwards.
    """
    firsts = [(v, np.array(keras_variables.view(v).flat[:1])) for v in variables]
    marked = [(v, first) for v, first in firsts if first.size]
    try:
        for variable, first in marked:
            _put_first(variable, (first == 0).astype(first.dtype))
        with without_warnings():
            keras_saving.load_weights(model, weights)
        return frozenset(n for n, (v, first) in enumerate(firsts) if _differs(v, first))
    finally:
        whole_writes.finish(partial(_restore_first, *pair) for pair in marked)


def _put_first(variable: Any, entry: Array) -> None:
    array = keras_variables.read(variable)
    array.flat[:1] = entry
    keras_variables.assign(variable, array)


def _differs(variable: Any, first: Array) -> bool:
    return np.array(keras_variables.view(variable).flat[:1]).tobytes() != first.tobytes()


def _restore_first(variable: Any, first: Array) -> None:
    if _differs(variable, first):
        _put_first(variable, first)


def _measured(train_state: TrainState) -> dict[str, Any]:
    """Return learning rates and loss scales, for people who read the record."""
    rates = [str(keras_optimizers.learning_rate(o)) for o in train_state.optimizers]
    scales = [str(float(keras_variables.read(scale))) for scale, _ in train_state.scales]
    return {"learning_rate": rates, "loss_scale": scales}


def _trained_by_each(train_state: TrainState) -> tuple[tuple[int, ...] | None, ...]:
    """Return the numbers of the weights for which each optimizer is built."""
    weights = (*train_state.trainable, *train_state.other)
    numbers = {id(v): number for number, v in enumerate(weights)}
    built = [keras_optimizers.trained_by(o) if o.built else None for o in train_state.optimizers]
    return tuple(
        None if b is None else tuple(numbers[id(v)] for v in b if id(v) in numbers) for b in built
    )


def _sealed(path: Path) -> str:
    """Sync a file to disk; return its SHA-256."""
    atomic_files.flush_to_disk(path)
    return atomic_files.fingerprint(path)


def _plain(array: Array) -> Array:
    """Return an array in a dtype that NumPy can write: bfloat16 and float8 as their bytes."""
    if array.dtype.kind == "V" or array.dtype.isbuiltin != 1:
        return array.view(f"u{array.dtype.itemsize}")
    return array


def _typed(array: Array, dtype: str) -> Array:
    """Undo `_plain`."""
    if array.dtype.name == dtype:
        return array
    import ml_dtypes

    return array.view(getattr(ml_dtypes, dtype))
