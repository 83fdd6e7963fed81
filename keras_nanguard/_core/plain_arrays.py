"""Arrays in files that any program with NumPy reads: `.npz` without compression and without pickle.

Imports no backend.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from keras_nanguard._core import atomic_files, finiteness

Array = np.ndarray[Any, Any]


def save_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays by name, and sync the file to disk. Arrays of a dtype that NumPy cannot name
    (bfloat16, float8) are written as unsigned integers of their bytes; see `typed`.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            named = array.dtype.kind in "biufcSU"
            plain = array if named else array.view(f"u{array.dtype.itemsize}")
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                npy.write_array(member, plain, allow_pickle=False)
    atomic_files.flush_to_disk(path)


def typed(array: Array, dtype: str) -> Array:
    """Return an array from a file in its original dtype, which is given by name."""
    if array.dtype.name == dtype or not finiteness.is_float(dtype):
        return array
    import ml_dtypes

    return array.view(np.dtype(getattr(ml_dtypes, dtype)))
