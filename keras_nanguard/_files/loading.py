"""Models and data that a command line names by path: loaded and saved, and the names in a file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core import atomic_files
from keras_nanguard._core.errors import FileFormatError, expected
from keras_nanguard._core.plain_values import first_line, plain_text
from keras_nanguard._files import isolated
from keras_nanguard._files.formats.hdf5 import SIGNATURE
from keras_nanguard._files.formats.limits import readable, refuse_missing
from keras_nanguard._files.formats.npz import opened_arrays


def load_model(path: str) -> Any:
    """Load a model.

    Args:
        path: a `.keras` file of a whole model.

    Returns:
        The model, compiled if the file has a compile configuration.

    Raises:
        FileFormatError: if it cannot be loaded, or is a legacy `.h5` file; code in a file (a Lambda
            layer) is never executed.
    """
    refuse_missing(path, "a model file")
    refuse_legacy(path)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras

    try:
        return keras.models.load_model(path, safe_mode=True)
    except Exception as error:  # Keras and its backend raise anything on a foreign file
        reason = f"cannot be loaded as a model: {first_line(error)}"
        raise FileFormatError(f"{plain_text(path)} {reason}.") from error


def refuse_legacy(path: str) -> None:
    """Raise a `FileFormatError` for a legacy `.h5` file, which Keras knows by its extension: it may
    contain code, and Keras 3.6, for one, runs that in safe mode, too."""
    if not os.path.isfile(path):
        return
    with readable(path), open(path, "rb") as file:
        head = file.read(len(SIGNATURE))
    if head == SIGNATURE or path.endswith((".h5", ".hdf5")):
        received = f"{plain_text(path)}, a legacy file, which may contain code"
        remedy = "If you trust it, load it with Keras, and save it as .keras."
        if path.endswith(".weights.h5"):
            received = f"{plain_text(path)}, which has only weights"
            remedy = "Load them into your model, and save it as .keras."
        raise FileFormatError(expected("a .keras file of a whole model", received, remedy))


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
    refuse_missing(path, "an .npz or .npy file")
    with readable(path):
        with open(path, "rb") as file:
            is_archive = file.read(2) == b"PK"
        if is_archive:
            with opened_arrays(path) as stored:
                arrays = {name: array.read() for name, array in stored.items()}
        else:  # mapped into memory, it cannot declare more than it contains
            arrays = {"x": np.array(np.load(path, mmap_mode="r", allow_pickle=False))}
    _refuse_no_data(arrays, path)
    targets = arrays.pop("y", None)
    if not arrays:
        received = f"{plain_text(path)} without one"
        remedy = "Save the inputs under the name x."
        raise FileFormatError(expected("an array with inputs", received, remedy))
    if "x" in arrays or len(arrays) == 1:
        return arrays.get("x", next(iter(arrays.values()))), targets
    return arrays, targets


def _refuse_no_data(arrays: Mapping[str, NDArray[Any]], path: str) -> None:
    """Raise a `FileFormatError` for arrays that are not numeric, have no rows, or differ in their
    number of rows."""
    for name, array in arrays.items():
        if array.dtype.kind not in "biufc" or not array.ndim or not len(array):
            what = "arrays of numbers with at least one row"
            received = f"{plain_text(name)} of {array.dtype} and shape {array.shape}"
            in_file = f"{received} in {plain_text(path)}"
            raise FileFormatError(expected(what, in_file, "Check the data."))
    if len({len(array) for array in arrays.values()}) > 1:
        what = "arrays with the same number of rows"
        lengths = ", ".join(f"{plain_text(name)} with {len(a)}" for name, a in arrays.items())
        in_file = f"{lengths} in {plain_text(path)}"
        raise FileFormatError(expected(what, in_file, "Check the data."))


def first_rows(data: Any, count: int) -> Any:
    """Return the first rows of an array, or of every array of a dict; `None` for `None`."""
    if isinstance(data, dict):
        return {name: array[:count] for name, array in data.items()}
    return None if data is None else data[:count]


def save_model(model: Any, path: str, final: str) -> None:
    """Save a model atomically, with the permissions of the file that it was loaded from.

    Args:
        path: the file that it was loaded from.
    """
    with atomic_files.beside(Path(os.path.realpath(final))) as unfinished:
        model.save(unfinished)
        atomic_files.flush_to_disk(unfinished)
        if os.path.isfile(path):
            shutil.copymode(path, unfinished)


_COMMON_NAMES = (
    *("kernel", "bias", "gamma", "beta", "embeddings", "scale", "moving_mean", "moving_variance"),
)
"""Common names of variables of layers: what only has a number in the file may have any of them."""


def model_names(path: str) -> tuple[str, tuple[str, ...]]:
    """Return the name of the model in a file, and the Keras paths of its variables, each without
    and with the name of the model, which only some paths of Keras contain.

    Args:
        path: any model file that `scan` reads.

    Raises:
        FileFormatError: if the file is missing, truncated, malicious or of another format.
    """
    described = isolated.run_in_subprocess("names", path)
    root, paths = described["root"], []
    for layer, name, role in described["variables"]:
        for known in _COMMON_NAMES if name.isdigit() else (name,):
            if role != "other":
                paths.append(f"{layer}/{known}".removeprefix("/"))
    inside = tuple(f"{root}/{path}" for path in paths) if root else ()
    return root or os.path.basename(plain_text(path)), (*paths, *inside)
