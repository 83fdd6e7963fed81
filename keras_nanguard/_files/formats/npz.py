"""Reading of the `.npy` arrays in a zip archive: an `.npz` file of a user, or of this library.

No part of such a file reaches the HDF5 library, and nothing is unpickled.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._files.formats.contents import ModelArray
from keras_nanguard._files.formats.limits import (
    MAX_UNBACKED,
    PARSE_ERRORS,
    READ_BYTES,
    declared_too_much,
    refuse_bomb,
)

_MAX_HEADER = 1 << 16
"""Maximum size of the header of an array; NumPy takes 10,000 bytes. A header may declare 4 GiB, all
of which NumPy would read before it checks the length.
"""


@contextmanager
def opened_arrays(path: str | os.PathLike[str]) -> Iterator[dict[str, ModelArray]]:
    """Open an archive of `.npy` arrays and return them by name: no part of it reaches the HDF5
    library, so it may be read in this process.

    Raises:
        FileFormatError: if it contains anything else, or unpacks to far more data than it stores.
        OSError, ValueError, ...: those of `PARSE_ERRORS`, if it is damaged.
    """
    with zipfile.ZipFile(path) as archive:
        if not all(name.endswith(".npy") for name in archive.namelist()):
            raise FileFormatError(f"{plain_text(path)} contains more than .npy arrays.")
        arrays = archived_arrays(archive, os.fspath(path))
        if sum(array.unbacked for array in arrays) > MAX_UNBACKED:
            raise FileFormatError(f"{plain_text(path)} unpacks to far more data than it stores.")
        yield {array.location: array for array in arrays}


def archived_arrays(archive: zipfile.ZipFile, path: str) -> list[ModelArray]:
    """Return the arrays of an `.npz` file. Several entries may share their data, so their total
    declared size is limited.
    """
    before, found = 0, []
    for info in archive.infolist():
        location = info.filename.removesuffix(".npy")
        try:
            array = _member(archive, info, location, before, os.path.getsize(path))
        except (*PARSE_ERRORS, FileFormatError) as error:
            array = ModelArray(location, unread=plain_text(error, 200))
        before += info.file_size
        found.append(array)
    return found


def _member(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, location: str, before: int, file_size: int
) -> ModelArray:
    refuse_bomb(info)
    if reason := declared_too_much((info.file_size,), None, 1, before, file_size):
        raise ValueError(reason)
    with archive.open(info) as member:
        head = io.BytesIO(member.read(_MAX_HEADER))
    read_header = {1: npy.read_array_header_1_0}.get(npy.read_magic(head)[0])
    shape, _, dtype = (read_header or npy.read_array_header_2_0)(head)
    start, size = head.tell(), math.prod(shape) * dtype.itemsize
    reason = ""
    if dtype.hasobject:
        reason = "an array of pickled Python objects, which is never loaded"
    elif min(shape, default=0) < 0 or size != info.file_size - start:
        reason = f"its header declares {size} bytes, but {info.file_size - start} follow"
    pieces, whole = partial(_pieces, archive, info, dtype, start), partial(_whole, archive, info)
    return ModelArray.found(location, dtype, shape, info.compress_size, pieces, whole, reason)


def _pieces(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, dtype: np.dtype[Any], start: int
) -> Iterator[NDArray[Any]]:
    """Read the values in the order of the file, without their shape."""
    values = max(1, READ_BYTES // max(1, dtype.itemsize))
    left = info.file_size - start
    with archive.open(info) as member:
        member.read(start)
        while left:
            block = member.read(min(left, values * dtype.itemsize))
            if not block:
                raise ValueError(f"the archive ends within {plain_text(info.filename)}")
            left -= len(block)
            yield np.frombuffer(block, dtype)


def _whole(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(info) as member:
        return npy.read_array(member, allow_pickle=False)
