"""Reading of zip archives: `.keras` and `.npz` files, without unpacking what can be read in place.

An uncompressed member (as Keras and `numpy.savez` write it) is read in place; a compressed HDF5
member is first unpacked to an unnamed temporary file, within limits. No pickle is ever loaded.
Imports no backend.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from keras_nanguard._core.errors import FileFormatError, expected
from keras_nanguard._files.arrays import float_name
from keras_nanguard._files.hdf5 import Window, open_hdf5, stored_arrays
from keras_nanguard._files.stored import (
    BOMB_FLOOR,
    MAX_JSON,
    PARSE_ERRORS,
    READ_BYTES,
    Contents,
    StoredArray,
    declared_too_much,
    plain_text,
)

__all__ = ["WEIGHTS", "read_archive", "read_arrays", "read_json", "refuse_bomb"]

WEIGHTS = "model.weights.h5"
"""Name of the weights in a `.keras` archive."""

_MAX_MEMBER_EXPANSION = 100
"""Maximum expansion of a compressed member: the limit of Keras' own loader (`saving_lib`)."""

_MAX_HEADER = 1 << 16
"""Maximum size of the header of an array; NumPy takes 10,000 bytes. A header may declare 4 GiB, all
of which NumPy would read before it looks at the length."""

_UNNAMED = "layers are named by their location in the file"


def read_archive(path: str) -> Contents:
    """Return the contents of a `.keras` or `.npz` archive, open until `close` is called.

    Raises:
        FileFormatError: if the archive contains neither weights nor arrays, or is malicious.
    """
    with ExitStack() as stack:
        archive = stack.enter_context(zipfile.ZipFile(path))
        names = archive.namelist()
        if WEIGHTS in names:
            contents = _read_keras(archive, path, stack)
        elif names and all(name.endswith(".npy") for name in names):
            contents = Contents("npz", _members(archive, path))
        else:
            what = f"a zip archive with {WEIGHTS!r} (.keras) or of .npy arrays (.npz)"
            listed = f"{len(names)} members, such as {plain_text(names[:3])}"
            remedy = "Save the model with model.save('name.keras')."
            raise FileFormatError(expected(what, f"{plain_text(path)} with {listed}", remedy))
        contents.close = stack.pop_all().close
        return contents


def read_arrays(path: str) -> Contents:
    """Return the contents of an archive of `.npy` arrays, open until `close` is called: no part of
    it reaches the HDF5 library, so it may be read in this process.

    Raises:
        FileFormatError: if it contains anything else.
    """
    with ExitStack() as stack:
        archive = stack.enter_context(zipfile.ZipFile(path))
        if not all(name.endswith(".npy") for name in archive.namelist()):
            raise FileFormatError(f"{plain_text(path)} contains more than .npy arrays.")
        contents = Contents("npz", _members(archive, path))
        contents.close = stack.pop_all().close
        return contents


def read_json(text: bytes, what: str, notes: list[str]) -> Any:
    """Return parsed JSON, or `None` with a note of the reason."""
    try:
        if len(text) > MAX_JSON:
            raise ValueError(f"it has more than {MAX_JSON} bytes")
        return json.loads(text)
    except PARSE_ERRORS as error:
        notes.append(f"{what} could not be parsed ({plain_text(error, 120)}): {_UNNAMED}.")
        return None


def refuse_bomb(info: zipfile.ZipInfo) -> None:
    """Raise a `FileFormatError` for a member that is encrypted or declares far more data than it
    stores."""
    name = plain_text(info.filename)
    if info.flag_bits & 1:
        raise FileFormatError(f"{name} is encrypted; Keras files never are.")
    limit = max(BOMB_FLOOR, _MAX_MEMBER_EXPANSION * info.compress_size)
    if info.file_size > limit:
        declared = f"declares {info.file_size} bytes and stores {info.compress_size}"
        raise FileFormatError(f"{name} {declared}: a zip bomb.")


def _read_keras(archive: zipfile.ZipFile, path: str, stack: ExitStack) -> Contents:
    notes: list[str] = []
    config = None
    try:
        with archive.open("config.json") as member:
            config = read_json(member.read(MAX_JSON + 1), "config.json", notes)
    except PARSE_ERRORS as error:
        notes.append(f"config.json was not read ({plain_text(error, 120)}): {_UNNAMED}.")
    source = _weights(archive, path, stack)
    arrays, names = stored_arrays(stack.enter_context(open_hdf5(source)))
    return Contents("keras", arrays, names, config if isinstance(config, dict) else None, notes)


def _weights(archive: zipfile.ZipFile, path: str, stack: ExitStack) -> Window:
    """Return the weights: in place if they are stored uncompressed, else unpacked."""
    info = archive.getinfo(WEIGHTS)
    refuse_bomb(info)
    if info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size:
        raw = stack.enter_context(open(path, "rb", buffering=0))  # noqa: SIM115
        return Window(raw, _data_start(raw, info), info.file_size)
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if info.file_size > free:
        needed = f"{WEIGHTS} takes {info.file_size} bytes unpacked"
        raise FileFormatError(f"{needed} and {tempfile.gettempdir()} has {free}.")
    unpacked = stack.enter_context(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115
    with archive.open(info) as member:  # ends after `file_size` bytes
        shutil.copyfileobj(member, unpacked, READ_BYTES)
    return Window(unpacked, 0, info.file_size)


def _data_start(raw: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Return the offset of a member's data: after its local header, whose name and extra field vary
    in length."""
    raw.seek(info.header_offset)
    header = raw.read(30)
    name = plain_text(info.filename)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise FileFormatError(f"The archive's entry for {name} points to no local header.")
    start = int(info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30])))
    if start + info.file_size > os.fstat(raw.fileno()).st_size:
        raise FileFormatError(f"The archive ends before its member {name} does: it is truncated.")
    return start


def _members(archive: zipfile.ZipFile, path: str) -> list[StoredArray]:
    """Return the arrays of an `.npz` file. Several entries may share their data, so what all of
    them declare is limited."""
    before, found = 0, []
    for info in archive.infolist():
        location = plain_text(info.filename.removesuffix(".npy"))
        try:
            array = _member(archive, info, location, before, os.path.getsize(path))
        except (*PARSE_ERRORS, FileFormatError) as error:
            array = StoredArray(location, unread=plain_text(error, 200), key=info.filename)
        before += info.file_size
        found.append(array)
    return found


def _member(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, location: str, before: int, file_size: int
) -> StoredArray:
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
    reading = {"stored": info.compress_size, "pieces": pieces, "whole": whole}
    name = float_name(dtype)
    return StoredArray.found(location, info.filename, dtype, name, shape, reason, **reading)


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
