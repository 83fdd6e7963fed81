"""Reading of HDF5 files: their arrays in pieces, without following references out of the file.

Soft and external links, external storage and virtual datasets are reported and not followed; a
dataset that declares far more data than it stores is not read (the limits of Keras' own loader).
Imports no backend.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from keras_nanguard._files.arrays import blocks, chunk_blocks, float_name, named_dtype
from keras_nanguard._files.stored import (
    BOMB_FLOOR,
    PARSE_ERRORS,
    Alive,
    StoredArray,
    Window,
    plain_text,
)

__all__ = [
    "MAX_CHUNK",
    "MAX_CHUNKS",
    "MAX_EXPANSION",
    "SIGNATURE",
    "attribute_text",
    "open_hdf5",
    "stored_arrays",
]

SIGNATURE = b"\x89HDF\r\n\x1a\n"

_READ_BYTES = 4 << 20
"""Bytes per read. A 256 MiB file was read at 1.7, 2.2 and 3.2 GB/s in reads of 256 KiB, 1 MiB and 4
MiB."""

_CHUNK_CACHE = 0
"""Size of the chunk cache of HDF5. Every open dataset has one, and it is useless because each chunk
is read once."""

MAX_CHUNK = 256 << 20
"""Maximum size of a chunk, which HDF5 loads as a whole; or four times the size of the file, if that
is more."""

MAX_CHUNKS = 1 << 20
"""Maximum number of chunks of a dataset beyond one per byte of the file; HDF5 looks up each, stored
or not."""

MAX_EXPANSION = 1000
"""Maximum ratio of declared to stored bytes of a dataset: the limit of Keras' own loader
(`saving_lib`)."""

_MAX_TEXT = 64 << 20
"""Maximum size of an attribute that is read; the configuration of a model of 10,000 layers takes
about 15 MiB."""

_MAX_DEPTH = 128
"""Maximum depth of nested groups; a nested Keras model takes about three per level."""


def open_hdf5(source: str | Window) -> h5py.File:
    """Open an HDF5 file for reading.

    Args:
        source: path, or a window on another file.

    Returns:
        The open file.
    """
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_cache(0, 521, _CHUNK_CACHE, 0.75)  # the defaults of HDF5 except for the size
    access.set_sieve_buf_size(
        0
    )  # otherwise every open dataset keeps 64 KiB that a single read never uses
    access.set_file_locking(False, True)
    name = b"window"
    if isinstance(source, Window):
        access.set_fileobj_driver(h5py.h5fd.fileobj_driver, source)
    else:
        name = os.fsencode(source)
    return h5py.File(h5py.h5f.open(name, h5py.h5f.ACC_RDONLY, access))


def attribute_text(node: Any, name: str) -> str | None:
    """Return an attribute that is a single string, or `None` if it is missing or something else.

    Args:
        node: a file, group or dataset, or its low-level identifier.
        name: name of the attribute.

    Returns:
        The string, read through h5py's low-level interface, which takes a third of the time.
    """
    identifier = node.id if isinstance(node, h5py.HLObject) else node
    encoded = name.encode()
    try:
        if not h5py.h5a.exists(identifier, encoded):
            return None
        attribute = h5py.h5a.open(identifier, encoded)
        if attribute.shape != () or attribute.get_storage_size() > _MAX_TEXT:
            return None
        buffer = np.empty((), attribute.dtype)
        attribute.read(buffer)
    except PARSE_ERRORS:
        return None
    value = buffer[()]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value if isinstance(value, str) else None


def stored_arrays(
    file: h5py.File, raw: Window, alive: Alive = lambda: None, packed: float = 1.0
) -> tuple[list[StoredArray], dict[str, str]]:
    """List every array of an open file.

    Args:
        file: the open file; it has to stay open while pieces are read.
        raw: the same file as plain bytes, from which contiguous arrays are read.
        alive: called for each array that is found.
        packed: bytes on disk per byte of the file, below 1 if it was unpacked from a compressed
            archive.

    Returns:
        The arrays in the order of the file, and the layer names that Keras stored with the
        variables, by group.
    """
    links, trouble = _links(file)
    names: dict[str, str] = {}
    groups: dict[str, list[StoredArray]] = {}
    reader = _Reader(int(file.id.get_filesize()), raw if file.userblock_size == 0 else None, packed)
    near, within = file.id, ""  # the group opened last, which usually contains the next link
    for (key, refusal), (following, _) in itertools.pairwise([*links, ("", "")]):
        alive()
        location = plain_text(key)
        group = location.rpartition("/")[0]
        variables = key == "vars" or key.endswith("/vars")
        if following.startswith(f"{key}/") and not variables:
            continue  # an intermediate group, from which nothing is needed
        if not key.startswith(within):
            near, within = file.id, ""
        node = refusal or _opened(near, key[len(within) :])
        if isinstance(node, h5py.h5g.GroupID):
            near, within = node, f"{key}/"
            name = attribute_text(node, "name") if variables else None
            if name:
                names[group] = plain_text(name)
        elif isinstance(node, h5py.h5d.DatasetID):
            groups.setdefault(group, []).append(reader.stored_array(node, key, location))
        else:
            groups.setdefault(group, []).append(_unread(key, str(node)))
    arrays = [array for listed in groups.values() for array in sorted(listed, key=_numbered)]
    return arrays + [_unread("(the rest of the file)", reason) for reason in trouble], names


def _numbered(array: StoredArray) -> tuple[int, str]:
    last = array.location.rpartition("/")[2]
    return (int(last), "") if last.isascii() and last.isdigit() and len(last) < 9 else (-1, last)


def _links(file: h5py.File) -> tuple[list[tuple[str, str]], list[str]]:
    """Return every link once with the reason why it is not followed, if any, and why the list is
    incomplete, if it is.

    HDF5 lists links without opening their targets, and enters a group once however many links lead
    to it.
    """
    found: list[tuple[str, str]] = []
    trouble: list[str] = []
    seen: set[Any] = set()

    def visit(name: bytes, info: Any) -> bool | None:
        key = name.decode("utf-8", "surrogateescape")
        if info.type != h5py.h5l.TYPE_HARD:
            found.append((key, "a soft or external link, which is not followed"))
        elif info.u not in seen:
            seen.add(info.u)
            found.append((key, ""))
        if name.count(b"/") < _MAX_DEPTH:
            return None
        trouble.append(
            f"more than {_MAX_DEPTH} groups within groups, at {plain_text(key, 80)}: the rest was "
            "not listed"
        )
        return True

    try:
        file.id.links.visit(visit, info=True)
    except PARSE_ERRORS as error:
        trouble.append(f"damaged ({plain_text(error, 120)}): the rest was not listed")
    return found, trouble


def _opened(group: Any, key: str) -> Any:
    """Return the low-level group or dataset within a group, or the reason why it cannot be
    opened."""
    try:
        node = h5py.h5o.open(group, key.encode("utf-8", "surrogateescape"))
    except PARSE_ERRORS as error:
        return f"damaged ({plain_text(error, 120)})"
    if isinstance(node, (h5py.h5d.DatasetID, h5py.h5g.GroupID)):
        return node
    return f"a {type(node).__name__}, which contains no values"


def _unread(key: str, reason: str, dtype: str = "?", shape: tuple[int, ...] = ()) -> StoredArray:
    return StoredArray(plain_text(key), dtype, shape, 0, False, reason, key=key)


class _Reader:
    """Creates the stored arrays of the datasets of one file; they share one buffer."""

    def __init__(self, file_size: int, raw: Window | None, packed: float):
        self._buffer = np.empty(_READ_BYTES, np.uint8)
        self._file_size, self._raw, self._packed = file_size, raw, packed
        self._declared = 0
        self._kinds: list[tuple[Any, np.dtype[Any], bool]] = []

    def stored_array(self, dataset: Any, key: str, location: str) -> StoredArray:
        """Return the array of a dataset, or the reason why it is not read."""
        try:
            shape = dataset.shape
            dtype, as_in_memory = self._kind(dataset)
            if shape is None:
                return StoredArray(location, str(dtype), (0,), 0, False, key=key)
            size = math.prod(shape) * dtype.itemsize
            offset = dataset.get_offset() if as_in_memory and self._raw is not None else None
            reason, chunk = self._judge(dataset, size, dtype.itemsize, offset)
            stored = size if offset is not None else int(dataset.get_storage_size())
        except PARSE_ERRORS as error:
            return _unread(key, f"damaged ({plain_text(error, 120)})")
        name = float_name(dtype)
        shown = name or plain_text(dtype, 40)
        if dtype.kind == "V" and name is None and not reason:
            reason = f"values of the unnamed kind {shown}, which no reader can interpret"
        if reason:
            return _unread(key, reason, shown, shape)
        self._declared += size

        def pieces() -> Iterator[NDArray[Any]]:
            if offset is not None and name is not None:
                return self._contiguous(offset, size, dtype)
            return self._pieces(dataset, shape, dtype, chunk)

        whole = None if chunk is None else lambda: self._whole(dataset, shape, dtype)
        backed = int(stored * self._packed)
        return StoredArray(
            location,
            shown,
            shape,
            size,
            name is not None,
            "",
            pieces,
            key,
            stored=backed,
            whole=whole,
        )

    def _kind(self, dataset: Any) -> tuple[np.dtype[Any], bool]:
        """Return a dataset's dtype, and whether its values have the same layout in the file and in
        memory.

        A file uses few types, and HDF5 compares two of them faster than h5py converts one. Keras
        saves bfloat16 as two unnamed bytes and stores the name in an attribute.
        """
        stored = dataset.get_type()
        found = next((kind for kind in self._kinds if stored.equal(kind[0])), None)
        if found is None:
            dtype = stored.dtype
            same = dtype.kind == "V" or (
                dtype.kind == "f" and stored.equal(h5py.h5t.py_create(dtype))
            )
            found = (stored, dtype, same and dtype.isnative)
            self._kinds.append(found)
        _, dtype, as_in_memory = found
        if dtype.kind == "V" and dtype.fields is None:
            named = named_dtype(attribute_text(dataset, "dtype") or "")
            if named is not None and named.itemsize == dtype.itemsize and float_name(named):
                return named, True
        return dtype, as_in_memory

    def _judge(
        self, dataset: Any, size: int, itemsize: int, offset: int | None
    ) -> tuple[str, tuple[int, ...] | None]:
        """Return why a dataset is not read, if so, and the shape of its chunks, `None` if it has
        none."""
        most = max(BOMB_FLOOR, MAX_EXPANSION * self._file_size)
        beyond = (
            f"the file of {self._file_size} bytes declares more than {MAX_EXPANSION} times that"
        )
        if (
            offset is not None
        ):  # contiguous in this file: it contains what it declares, or reading it fails
            return beyond if self._declared + size > most else "", None
        plan = dataset.get_create_plist()
        if plan.get_external_count():
            return "its values are in another file, which is not opened", None
        layout, chunk = plan.get_layout(), None
        if layout == h5py.h5d.VIRTUAL:
            return "a virtual dataset, whose sources are not opened", None
        if size > BOMB_FLOOR and size > MAX_EXPANSION * max(1, dataset.get_storage_size()):
            return f"it declares {size} bytes and stores {dataset.get_storage_size()}", None
        if self._declared + size > most:
            return beyond, None
        if layout == h5py.h5d.CHUNKED:
            chunk = plan.get_chunk()
            if math.prod(chunk) * itemsize > max(MAX_CHUNK, 4 * self._file_size):
                return f"one chunk declares {math.prod(chunk) * itemsize} bytes", None
            count = math.prod(-(-length // part) for length, part in zip(dataset.shape, chunk))
            if count > MAX_CHUNKS + self._file_size:
                return f"it declares {count} chunks in a file of {self._file_size} bytes", None
        return "", chunk

    def _contiguous(self, offset: int, size: int, dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
        """Read a contiguous array without HDF5: 24 ms instead of 31 ms for the 170 MB of a
        ResNet101V2."""
        for start in range(0, size, _READ_BYTES):
            target = self._buffer[: min(_READ_BYTES, size - start)]
            if (
                self._raw is None
                or self._raw.seek(offset + start) < 0
                or self._raw.readinto(target) < target.size
            ):
                raise ValueError("the file ends before the array does")
            yield target.view(dtype)

    def _whole(self, dataset: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        native, memory_type = _in_memory(dataset, dtype)
        target = np.empty(shape, f"V{dtype.itemsize}" if dtype.kind == "V" else native)
        if target.size:
            dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, target, memory_type)
        return target.view(native)

    def _pieces(
        self,
        dataset: Any,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        chunk: tuple[int, ...] | None,
    ) -> Iterator[NDArray[Any]]:
        native, memory_type = _in_memory(dataset, dtype)
        values = max(1, _READ_BYTES // max(1, dtype.itemsize))
        for block in blocks(shape, values) if chunk is None else chunk_blocks(shape, chunk, values):
            start, count = (
                tuple(part.start for part in block),
                tuple(part.stop - part.start for part in block),
            )
            size = math.prod(count) * dtype.itemsize
            if size == 0:
                continue
            raw = self._buffer[:size] if size <= self._buffer.size else np.empty(size, np.uint8)
            target = raw.view(f"V{dtype.itemsize}" if dtype.kind == "V" else native).reshape(count)
            if count == shape:
                dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, target, memory_type)
            else:
                space = dataset.get_space()
                space.select_hyperslab(start, count)
                dataset.read(h5py.h5s.create_simple(count), space, target, memory_type)
            yield target.view(native)


def _in_memory(dataset: Any, dtype: np.dtype[Any]) -> tuple[np.dtype[Any], Any]:
    """Return the dtype of the values in memory, and the HDF5 type for it."""
    native = dtype.newbyteorder("=") if dtype.kind in "fc" else dtype
    return native, dataset.get_type() if dtype.kind == "V" else h5py.h5t.py_create(native)
