"""Reading of HDF5 files: their arrays in pieces, without following references out of the file.

Soft and external links, external storage and virtual datasets are reported and not followed.
"""

from __future__ import annotations

import io
import os
from functools import partial
from typing import Any, BinaryIO

import h5py
import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core.finiteness import is_float, named_dtype
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._files.formats.contents import ModelArray, pieces_of
from keras_nanguard._files.formats.limits import PARSE_ERRORS, declared_too_much

SIGNATURE = b"\x89HDF\r\n\x1a\n"

_MAX_DEPTH = 128
"""Maximum depth of nested groups; a nested Keras model takes about three per level."""


class Window(io.RawIOBase):
    """A read-only section of an open file, such as an uncompressed member of a zip archive.

    Args:
        file: an unbuffered file, which the caller closes.
        start: offset of the first byte.
    """

    def __init__(self, file: BinaryIO, start: int, size: int):
        super().__init__()
        self._file, self._start, self._size, self._at = file, start, size, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position and return it."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer up to the end of the section and return the number of bytes."""
        view = memoryview(buffer).cast("B")[: max(0, self._size - self._at)]
        self._file.seek(self._start + self._at)
        done, count = 0, 1
        while count and done < len(view):
            count = self._file.readinto(view[done:])  # type: ignore[attr-defined]
            done += count
        self._at += done
        return done


def attribute_text(node: Any, name: str) -> str | None:
    """Return an attribute of a file, group or dataset that is a string, `None` if it is missing or
    something else."""
    try:
        value = node.attrs.get(name)
    except PARSE_ERRORS:
        return None
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value if isinstance(value, str) else None


def stored_arrays(file: h5py.File) -> tuple[list[ModelArray], dict[str, str]]:
    """List every array of an open file, which has to stay open while arrays are read.

    Returns:
        The arrays in the order of the file, and the layer names that Keras stored with the
        variables, by group.
    """
    links, cut_off = _links(file)
    names: dict[str, str] = {}
    arrays: list[ModelArray] = []
    declared = 0
    for key, reason in links:
        node = reason or _opened(file, key)
        if isinstance(node, h5py.Dataset):
            arrays.append(_stored_array(file, node, key, declared))
            declared += arrays[-1].nbytes
        elif not isinstance(node, h5py.Group):
            arrays.append(ModelArray(key, unread=node))
        elif f"/{key}".endswith("/vars") and (name := attribute_text(node, "name")):
            names[key.rpartition("/")[0]] = plain_text(name)
    arrays += [ModelArray("(the rest of the file)", unread=why) for why in cut_off]
    return arrays, names


def _links(file: h5py.File) -> tuple[list[tuple[str, str]], list[str]]:
    """Return every link once, with the reason if it is not followed; and the reason if the list is
    incomplete.

    HDF5 lists links without opening their targets, and enters a group once however many links lead
    to it.
    """
    found: list[tuple[str, str]] = []
    cut_off: list[str] = []
    seen: set[Any] = set()

    def visit(name: bytes, info: Any) -> bool | None:
        key = name.decode("utf-8", "surrogateescape")
        if info.type != h5py.h5l.TYPE_HARD:
            found.append((key, "a soft or external link, which is not followed"))
        elif info.u not in seen:
            seen.add(info.u)
            found.append((key, ""))
        if key.count("/") < _MAX_DEPTH:
            return None
        where = f"{_MAX_DEPTH} groups within groups, at {plain_text(key, 80)}"
        cut_off.append(f"more than {where}: the rest was not listed")
        return True

    try:
        file.id.links.visit(visit, info=True)
    except PARSE_ERRORS as error:
        cut_off.append(f"damaged ({plain_text(error, 120)}): the rest was not listed")
    return found, cut_off


def _node(file: h5py.File, key: str) -> Any:
    return file[key.encode("utf-8", "surrogateescape")]


def _opened(file: h5py.File, key: str) -> Any:
    """Return a group or dataset, or the reason why it cannot be opened."""
    try:
        node = _node(file, key)
    except PARSE_ERRORS as error:
        return f"damaged ({plain_text(error, 120)})"
    if isinstance(node, (h5py.Group, h5py.Dataset)):
        return node
    return f"a {type(node).__name__}, which contains no values"


def _stored_array(file: h5py.File, dataset: h5py.Dataset, key: str, before: int) -> ModelArray:
    """Return the array of a dataset at this exact location; the arrays before it declare `before`
    bytes."""
    try:
        dtype, shape, chunk = _dtype(dataset), dataset.shape, dataset.chunks
        stored, file_size = int(dataset.id.get_storage_size()), int(file.id.get_filesize())
        elsewhere = dataset.is_virtual or dataset.external
    except PARSE_ERRORS as error:
        return ModelArray(key, unread=f"damaged ({plain_text(error, 120)})")
    if shape is None:
        return ModelArray(key, str(dtype), (0,))
    reason = declared_too_much(shape, chunk, dtype.itemsize, before, file_size)
    if elsewhere:
        reason = "its values are in another file, which is not opened"

    def get(part: Any) -> NDArray[Any]:
        return np.asarray(_node(file, key)[part]).view(dtype)

    pieces = partial(pieces_of, get, shape, chunk, dtype.itemsize)
    whole = partial(get, ())
    return ModelArray.found(key, dtype, shape, stored, pieces, whole, reason)


def _dtype(dataset: h5py.Dataset) -> np.dtype[Any]:
    """Return a dataset's dtype. Keras saves bfloat16 as two unnamed bytes and stores the name in an
    attribute."""
    dtype: np.dtype[Any] = dataset.dtype
    if dtype.kind == "V" and dtype.fields is None:
        named = named_dtype(attribute_text(dataset, "dtype") or "")
        if named is not None and named.itemsize == dtype.itemsize and is_float(named.name):
            return named
    return dtype
