"""Loading of models and data for the commands that need a live model, and atomic saving of a
model."""

from __future__ import annotations

import math
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from keras_nanguard._core import atomic_files
from keras_nanguard._core.errors import FileFormatError, GuardError, expected
from keras_nanguard._files import reading
from keras_nanguard._files.archives import npy_header, refuse_bomb
from keras_nanguard._files.hdf5 import SIGNATURE
from keras_nanguard._files.repair_file import repaired_path
from keras_nanguard._files.stored import BOMB_FLOOR, PARSE_ERRORS, first_line, plain_text

__all__ = ["data_arrays", "first_rows", "load_model", "refuse_code_in_hdf5", "save_model"]


def load_model(path: str) -> Any:
    """Load a model.

    Args:
        path: a `.keras` or legacy `.h5` file of a whole model.

    Returns:
        The model, compiled if the file has a compile configuration.

    Raises:
        FileFormatError: if it cannot be loaded; code in a file (a Lambda layer) is never executed.
    """
    if not os.path.exists(path):
        raise FileFormatError(
            expected("a model file", f"path={plain_text(path)!r}", "There is no such file.")
        )
    if not (os.path.isfile(path) or os.path.isdir(path)):  # a pipe would block
        raise FileFormatError(
            expected(
                "a model file", f"{plain_text(path)}, which is not a file", "Name a model file."
            )
        )
    refuse_code_in_hdf5(path)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras

    try:
        return keras.models.load_model(path, safe_mode=True)
    except Exception as error:  # Keras and its backend raise anything on a foreign file
        raise FileFormatError(
            f"{plain_text(path)} cannot be loaded as a model: {first_line(error)}."
        ) from error


def refuse_code_in_hdf5(path: str) -> None:
    """Raise a `FileFormatError` for a legacy `.h5` file with a Lambda layer: Keras 3.6, for one,
    runs its code in safe mode, too."""
    if not os.path.isfile(path):
        return
    with open(path, "rb") as file:
        if file.read(len(SIGNATURE)) != SIGNATURE:
            return

    config = reading.ask("configuration", path)["config"]
    if config is None:
        raise FileFormatError(
            f"{plain_text(path)} cannot be loaded as a model: it has no configuration."
        )
    if _has_lambda(config):
        raise FileFormatError(
            f"{plain_text(path)} cannot be loaded as a model: it has a Lambda layer, which is code "
            "and never runs."
        )


def _has_lambda(config: Any) -> bool:
    """Whether a configuration names a class or a function that is code in the file."""
    level = [config]
    while level:
        nodes = [node for node in level if isinstance(node, dict)]
        words = [
            str(node.get(key, ""))
            for node in nodes
            for key in ("class_name", "registered_name", "function_type")
        ]
        if any("lambda" in word.lower() for word in words):
            return True
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        level = [inner for inner in level if isinstance(inner, (dict, list))]
    return False


def data_arrays(path: str) -> tuple[Any, Any]:
    """Load inputs and targets from an `.npz` or `.npy` file; nothing pickled is loaded.

    Args:
        path: an `.npy` file with the inputs, or an `.npz` file: `x` and `y` are inputs and targets,
            and if there is no `x`, all arrays except `y` are inputs by name.

    Returns:
        Inputs and targets; the latter may be `None`.

    Raises:
        FileFormatError: if the file cannot be read.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileFormatError(
            expected(
                "an .npz or .npy file",
                f"{plain_text(path)}, which is not a file",
                "Name a file with the inputs.",
            )
        )
    try:
        _refuse_bombs(path)
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            arrays = {"x": loaded}
        else:
            with loaded:
                arrays = {name: loaded[name] for name in loaded.files}
    except FileFormatError:
        raise
    except PARSE_ERRORS as error:
        raise FileFormatError(
            f"{plain_text(path)} cannot be read as data: {plain_text(error, 200)}."
        ) from error
    _refuse_no_data(arrays, path)
    targets = arrays.pop("y", None)
    if not arrays:
        raise FileFormatError(
            expected("inputs in the data", f"{plain_text(path)} without any", "Name an array x.")
        )
    if "x" in arrays or len(arrays) == 1:
        return arrays.get("x", next(iter(arrays.values()))), targets
    return arrays, targets


def _refuse_no_data(arrays: Mapping[str, NDArray[Any]], path: str) -> None:
    """Raise a `FileFormatError` for arrays that are no numbers, have no rows, or not the same
    number of rows."""
    for name, array in arrays.items():
        if array.dtype.kind not in "biufc" or not array.ndim or not len(array):
            received = (
                f"{plain_text(name)} of {array.dtype} and shape {array.shape} in {plain_text(path)}"
            )
            raise FileFormatError(
                expected("arrays of numbers with at least one row", received, "Check the data.")
            )
    if len({len(array) for array in arrays.values()}) > 1:
        lengths = ", ".join(
            f"{plain_text(name)} with {len(array)}" for name, array in arrays.items()
        )
        received = f"{lengths} in {plain_text(path)}"
        raise FileFormatError(
            expected("arrays with the same number of rows", received, "Check the data.")
        )


def _refuse_bombs(path: str) -> None:
    """Raise a `FileFormatError` for data that would take far more memory than their file
    contains."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            declared, stored = (
                sum(info.file_size for info in archive.infolist()),
                os.path.getsize(path),
            )
            if declared > BOMB_FLOOR and declared > 100 * stored:
                raise FileFormatError(
                    f"{plain_text(path)} declares {declared} bytes and stores {stored}: a zip bomb."
                )
            for info in archive.infolist():
                refuse_bomb(info)
        return
    with open(path, "rb") as file:
        if file.read(6) != npy.MAGIC_PREFIX:
            return
        file.seek(0)
        shape, _, dtype, offset = npy_header(file)
        stored = os.path.getsize(path) - offset
        if not dtype.hasobject and math.prod(shape) * dtype.itemsize > stored:
            raise FileFormatError(
                f"{plain_text(path)} is truncated: its header declares more than the {stored} "
                "bytes that follow."
            )


def first_rows(data: Any, count: int) -> Any:
    """Return the first rows of an array, or of every array of a dict; `None` for `None`."""
    if isinstance(data, dict):
        return {name: array[:count] for name, array in data.items()}
    return None if data is None else data[:count]


def save_model(model: Any, path: str, output: str | None, overwrite: bool) -> str:
    """Save a model next to the file that it was loaded from, atomically.

    Args:
        model: the model.
        path: the file that it was loaded from.
        output: path of the new file, by default as for a repair.
        overwrite: allow the output to exist.

    Returns:
        The path of the new file.

    Raises:
        GuardError: if the output exists or is not a `.keras` file.
    """
    final = os.path.abspath(output or repaired_path(path))
    if not final.endswith(".keras"):
        raise GuardError(
            expected("an output that ends in .keras", f"output={final!r}", "Name another one.")
        )
    if os.path.exists(final) and not overwrite:
        raise GuardError(
            expected("an output that does not exist", f"output={final!r}", "Pass overwrite=True.")
        )
    folder = os.path.dirname(final)
    if not os.path.isdir(folder):
        raise GuardError(
            expected(
                "an existing folder", f"output={final!r}", f"Create the folder {folder} first."
            )
        )
    with atomic_files.beside(Path(os.path.realpath(final))) as unfinished:
        model.save(unfinished)
        atomic_files.flush_to_disk(unfinished)
        if os.path.isfile(path):
            shutil.copymode(path, unfinished)
    return final
