"""The contents of a snapshot on disk: what is written into its files, and read into a model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._core import atomic_files
from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._core.plain_text import plain_text
from keras_nanguard._files.stored import PARSE_ERRORS
from keras_nanguard._fit.snapshot_files import REST, WEIGHTS, SnapshotRecord
from keras_nanguard._keras import (
    optimizers as keras_optimizers,
    saving as keras_saving,
    variables as keras_variables,
)
from keras_nanguard._keras.overrides import without_warnings
from keras_nanguard._keras.train_state import TrainState
from keras_nanguard._version import __version__

__all__ = [
    *("build_optimizers", "load", "measured", "sealed", "signature", "trained_by_each"),
    *("variables_of", "versions", "write_rest"),
]

GENERATOR = "generator"
"""Key in `rest.npz` of the state of PyTorch's generator."""


def variables_of(train_state: TrainState) -> list[Any]:
    """Return all variables of a snapshot on disk in their order, without metrics."""
    return list(train_state.everything)


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


def load(
    model: Any,
    variables: Sequence[Any],
    metrics: Sequence[Any],
    path: Path,
    record: SnapshotRecord,
) -> np.ndarray[Any, Any] | None:
    """Write a snapshot that `read` has checked into the variables of a model.

    Args:
        model: the model.
        variables: its variables, as `variables_of` returns them.
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
            drawn: np.ndarray[Any, Any] | None = arrays.get(GENERATOR)
            return drawn
    except PARSE_ERRORS as error:
        raise FileFormatError(f"{path} does not fit this model: {plain_text(error)}") from error


def write_rest(path: Path, rest: dict[int, Any], metrics: Iterable[Any]) -> None:
    """Write what Keras does not save, by the number of the variable, and the metrics."""
    arrays = {f"v{number}": _plain(array) for number, array in rest.items()}
    arrays |= {f"m{number}": keras_variables.read(metric) for number, metric in enumerate(metrics)}
    if (drawn := current.host().generator_state()) is not None:
        arrays[GENERATOR] = drawn
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)  # type: ignore[arg-type]


def measured(train_state: TrainState) -> dict[str, Any]:
    """Return learning rates and loss scales, for people who read the record."""
    rates = [str(keras_optimizers.learning_rate(o)) for o in train_state.optimizers]
    scales = [str(float(keras_variables.read(scale))) for scale, _ in train_state.scales]
    return {"learning_rate": rates, "loss_scale": scales}


def versions() -> dict[str, str]:
    """Return the versions of Keras, its backend, NumPy and this library."""
    return {
        "keras": keras.__version__,
        "backend": current.name(),
        "numpy": np.__version__,
        "keras_nanguard": __version__,
    }


def trained_by_each(train_state: TrainState) -> tuple[tuple[int, ...] | None, ...]:
    """Return the numbers of the weights for which each optimizer is built."""
    numbers = {
        id(v): number for number, v in enumerate((*train_state.trainable, *train_state.other))
    }
    built = [keras_optimizers.trained_by(o) if o.built else None for o in train_state.optimizers]
    return tuple(
        None if b is None else tuple(numbers[id(v)] for v in b if id(v) in numbers) for b in built
    )


def sealed(path: Path) -> str:
    """Sync a file to disk; return its SHA-256."""
    atomic_files.flush_to_disk(path)
    return atomic_files.fingerprint(path)


def _plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array in a dtype that NumPy can write: bfloat16 and float8 as their bytes."""
    return (
        array.view(f"u{array.dtype.itemsize}")
        if array.dtype.kind == "V" or array.dtype.isbuiltin != 1
        else array
    )


def _typed(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Undo `_plain`."""
    if array.dtype.name == dtype:
        return array
    import ml_dtypes

    return array.view(getattr(ml_dtypes, dtype))
