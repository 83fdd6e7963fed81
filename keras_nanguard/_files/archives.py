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
from typing import IO, Any, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from keras_nanguard._core.errors import FileFormatError, expected
from keras_nanguard._files.arrays import float_name
from keras_nanguard._files.hdf5 import open_hdf5, stored_arrays
from keras_nanguard._files.stored import (
    BOMB_FLOOR,
    MAX_JSON,
    PARSE_ERRORS,
    Alive,
    Contents,
    StoredArray,
    Window,
    plain_text,
)

__all__ = ["WEIGHTS", "npy_header", "read_archive", "read_arrays", "read_json", "refuse_bomb"]

WEIGHTS = "model.weights.h5"
"""Name of the weights in a `.keras` archive."""

_MAX_EXPANSION = 100
"""Maximum expansion of a compressed member: the limit of Keras' own loader (`saving_lib`)."""

_MAX_DECLARED = 1000
"""Maximum ratio of what all arrays declare to the size of the archive, as of all datasets of an
HDF5 file."""

_READ_BYTES = 4 << 20

_MAX_HEADER = 1 << 16
"""Maximum size of the header of an array; NumPy takes 10,000 bytes."""

_UNNAMED = "layers are named by their location in the file"


def read_archive(path: str, alive: Alive = lambda: None) -> Contents:
    """Read a `.keras` or `.npz` archive.

    Args:
        path: path of the archive.
        alive: called for each array that is found.

    Returns:
        Its contents, open until `close` is called.

    Raises:
        FileFormatError: if the archive contains neither weights nor arrays, or is malicious.
    """
    with ExitStack() as stack:
        archive = stack.enter_context(zipfile.ZipFile(path))
        names = archive.namelist()
        if WEIGHTS in names:
            contents = _read_keras(archive, path, stack, alive)
        elif names and all(name.endswith(".npy") for name in names):
            contents = Contents("npz", _npy_members(archive, path, alive))
        else:
            raise FileFormatError(
                expected(
                    f"a zip archive with {WEIGHTS!r} (a .keras file) or of .npy arrays (an .npz "
                    "file)",
                    f"{plain_text(path)} with {len(names)} members, such as "
                    f"{plain_text(names[:3])}",
                    "Save the model with model.save('name.keras').",
                )
            )
        contents.close = stack.pop_all().close
        return contents


def read_arrays(path: str) -> Contents:
    """Read an archive of `.npy` arrays and nothing else: no part of it reaches the HDF5 library, so
    it may be read in this process.

    Args:
        path: path of the archive.

    Returns:
        Its contents, open until `close` is called.

    Raises:
        FileFormatError: if it contains anything else.
    """
    with ExitStack() as stack:
        archive = stack.enter_context(zipfile.ZipFile(path))
        if not all(name.endswith(".npy") for name in archive.namelist()):
            raise FileFormatError(f"{plain_text(path)} contains more than .npy arrays.")
        contents = Contents("npz", _npy_members(archive, path))
        contents.close = stack.pop_all().close
        return contents


def read_json(text: bytes, what: str, notes: list[str]) -> Any:
    """Return parsed JSON, or `None` with a note of the reason."""
    try:
        return json.loads(text)
    except PARSE_ERRORS as error:
        notes.append(f"{what} could not be parsed ({plain_text(error, 120)}): {_UNNAMED}.")
        return None


def _read_keras(archive: zipfile.ZipFile, path: str, stack: ExitStack, alive: Alive) -> Contents:
    notes: list[str] = []
    config = _member_json(archive, "config.json", notes)
    info = archive.getinfo(WEIGHTS)
    window = _window(archive, info, path, stack, alive)
    packed = min(1.0, info.compress_size / max(1, info.file_size))
    arrays, names = stored_arrays(stack.enter_context(open_hdf5(window)), window, alive, packed)
    return Contents("keras", arrays, names, config if isinstance(config, dict) else None, notes)


def _member_json(archive: zipfile.ZipFile, name: str, notes: list[str]) -> Any:
    try:
        info = archive.getinfo(name)
        if info.file_size > MAX_JSON:
            notes.append(f"{name} declares {info.file_size} bytes and was skipped: {_UNNAMED}.")
            return None
        with archive.open(info) as member:
            return read_json(member.read(MAX_JSON), name, notes)
    except PARSE_ERRORS as error:
        notes.append(f"{name} was not read ({plain_text(error, 120)}): {_UNNAMED}.")
        return None


def _window(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: str, stack: ExitStack, alive: Alive
) -> Window:
    refuse_bomb(info)
    if info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size:
        raw = stack.enter_context(open(path, "rb", buffering=0))  # noqa: SIM115
        return Window(raw, _data_start(raw, info), info.file_size)
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if info.file_size > free:
        raise FileFormatError(
            f"{plain_text(info.filename)} takes {info.file_size} bytes unpacked and "
            f"{tempfile.gettempdir()} has {free}."
        )
    unpacked = stack.enter_context(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115
    with archive.open(
        info
    ) as member:  # ends after `file_size` bytes, whatever the compressed data holds
        while block := member.read(_READ_BYTES):
            unpacked.write(block)
            alive()
    return Window(unpacked, 0, info.file_size)


def _data_start(raw: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Return the offset of a member's data: after its local header, whose name and extra field vary
    in length."""
    raw.seek(info.header_offset)
    header = raw.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise FileFormatError(
            f"The archive's entry for {plain_text(info.filename)} points to no local header."
        )
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    start = int(info.header_offset + 30 + name_length + extra_length)
    if start + info.file_size > os.fstat(raw.fileno()).st_size:
        raise FileFormatError(
            f"The archive ends before its member {plain_text(info.filename)} does: it is truncated."
        )
    return start


def refuse_bomb(info: zipfile.ZipInfo) -> None:
    """Raise a `FileFormatError` for a member that is encrypted or declares far more data than it
    stores."""
    if info.flag_bits & 1:
        raise FileFormatError(f"{plain_text(info.filename)} is encrypted; Keras files never are.")
    if info.file_size > BOMB_FLOOR and info.file_size > _MAX_EXPANSION * max(1, info.compress_size):
        raise FileFormatError(
            f"{plain_text(info.filename)} declares {info.file_size} bytes and stores "
            f"{info.compress_size}: a zip bomb."
        )


def _npy_members(
    archive: zipfile.ZipFile, path: str, alive: Alive = lambda: None
) -> list[StoredArray]:
    """Return all arrays; not those that are left where all together declare far more than the
    archive has: entries may share their data."""
    left, found = max(BOMB_FLOOR, _MAX_DECLARED * os.path.getsize(path)), []
    for info in archive.infolist():
        left -= info.file_size
        alive()
        found.append(_npy_member(archive, info, left))
    return found


def _npy_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, left: int) -> StoredArray:
    location = plain_text(info.filename.removesuffix(".npy"))
    try:
        refuse_bomb(info)
        if left < 0:
            raise ValueError("the members of the archive declare far more than it has")
        with archive.open(info) as member:
            shape, fortran, dtype, offset = npy_header(member)
        size = math.prod(shape) * dtype.itemsize
        if dtype.hasobject:
            raise ValueError("an array of pickled Python objects, which is never loaded")
        if dtype.kind == "V":
            raise ValueError(f"values of the unnamed kind {dtype}, which no reader can interpret")
        if min(shape, default=0) < 0 or size != info.file_size - offset:
            raise ValueError(
                f"its header declares {size} bytes, but {info.file_size - offset} follow"
            )
    except PARSE_ERRORS as error:
        return StoredArray(location, "?", (), 0, False, plain_text(error, 200), key=info.filename)
    except FileFormatError as error:
        return StoredArray(location, "?", (), 0, False, str(error), key=info.filename)
    name = float_name(dtype)

    def pieces() -> Iterator[NDArray[Any]]:
        return _npy_pieces(archive, info, dtype, offset)

    shown = name or plain_text(dtype, 40)
    order: Literal["C", "F"] = "F" if fortran else "C"
    return StoredArray(
        location,
        shown,
        shape,
        size,
        name is not None,
        "",
        pieces,
        info.filename,
        order,
        info.compress_size,
    )


def npy_header(member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, order, dtype and length of the header, which NumPy parses as a literal of
    limited length.

    A header may declare that it has 4 GiB, all of which NumPy reads before it looks at the length.
    """
    head = io.BytesIO(member.read(_MAX_HEADER))
    major, _ = npy.read_magic(head)
    if major == 1:
        shape, fortran, dtype = npy.read_array_header_1_0(head)
    else:
        shape, fortran, dtype = npy.read_array_header_2_0(head)
    return shape, fortran, dtype, head.tell()


def _npy_pieces(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, dtype: np.dtype[Any], offset: int
) -> Iterator[NDArray[Any]]:
    block_bytes = max(dtype.itemsize, _READ_BYTES // max(1, dtype.itemsize) * dtype.itemsize)
    left = info.file_size - offset
    with archive.open(info) as member:
        member.read(offset)
        while left:
            block = member.read(min(left, block_bytes))
            if len(block) % dtype.itemsize or not block:
                raise ValueError(f"the archive ends within {plain_text(info.filename)}")
            left -= len(block)
            yield np.frombuffer(block, dtype)
