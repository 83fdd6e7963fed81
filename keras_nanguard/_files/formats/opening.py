"""Opening of model files of every kind that Keras 3 writes, recognized by their contents and not by
their names.

No model is built, no backend imported, no pickle loaded and no link in a file followed. A member of
an archive that is stored uncompressed (as Keras and `numpy.savez` write it) is read in place; a
compressed HDF5 member is first unpacked to an unnamed temporary file, within limits.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import h5py

from keras_nanguard._core.errors import FileFormatError, expected
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._files.formats.contents import Contents, ModelArray
from keras_nanguard._files.formats.hdf5 import SIGNATURE, Window, attribute_text, stored_arrays
from keras_nanguard._files.formats.limits import (
    MAX_JSON,
    MAX_RATIO,
    MAX_UNBACKED,
    PARSE_ERRORS,
    READ_BYTES,
    readable,
    refuse_bomb,
    refuse_missing,
)
from keras_nanguard._files.formats.names import named_arrays
from keras_nanguard._files.formats.npz import archived_arrays
from keras_nanguard._files.formats.orbax import orbax_tree, read_orbax

WEIGHTS = "model.weights.h5"
"""Name of the weights in a `.keras` archive."""

_KINDS = ".keras, .weights.h5, .h5, .npz, a sharded .weights.json or an Orbax checkpoint"

_UNNAMED = "layers are named by their location in the file"


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Contents]:
    """Open a model file for reading.

    Args:
        path: a `.keras`, `.weights.h5`, legacy `.h5` or `.npz` file, the `.json` index of sharded
            weights, or the folder of an unzipped model or an Orbax checkpoint.

    Returns:
        Context manager of the contents; arrays can be read while it is open.

    Raises:
        FileFormatError: if the file is missing, truncated, malicious or of another format.
    """
    name = os.fspath(path)
    with ExitStack() as stack:
        with readable(name):
            contents = _contents(name, stack)
            named = named_arrays(contents)
        yield replace(contents, arrays=named, source=plain_text(name))


def _contents(path: str, stack: ExitStack) -> Contents:
    refuse_missing(path, "a model file")
    if os.path.isdir(path):
        return _folder(path, stack)
    with open(path, "rb") as file:
        head = file.read(8)
    if head == SIGNATURE:
        return _hdf5(path, stack)
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _archive(path, stack)
    if head.lstrip()[:1] == b"{":
        return _sharded(path, stack)
    received = f"{plain_text(path)}, which starts with {head!r}" if head else "an empty file"
    raise FileFormatError(expected(f"one of {_KINDS}", received, "Pass a file that Keras 3 saved."))


def _hdf5(path: str, stack: ExitStack) -> Contents:
    file = _file(path, stack)
    arrays, names = stored_arrays(file)
    legacy = "model_weights" in file or "layer_names" in file.attrs
    text = attribute_text(file, "model_config") or ""
    what = "The attribute model_config"
    config, notes = _configuration(what, text.encode) if text else (None, ())
    return Contents("h5" if legacy else "weights.h5", arrays, names, config, notes)


def _file(source: str | Window, stack: ExitStack) -> h5py.File:
    """Open an HDF5 file, or a window on another file."""
    options = {"locking": False} if isinstance(source, str) else {}
    return stack.enter_context(h5py.File(source, "r", **options))


def _configuration(
    what: str, read: Callable[[], bytes]
) -> tuple[Mapping[str, Any] | None, tuple[str, ...]]:
    """Return the configuration, and a note if it cannot be parsed."""
    try:
        if len(text := read()) > MAX_JSON:
            raise ValueError(f"it has more than {MAX_JSON} bytes")
        parsed = json.loads(text)
        return parsed if isinstance(parsed, dict) else None, ()
    except PARSE_ERRORS as error:
        reason = f"could not be parsed ({plain_text(error, 120)}): {_UNNAMED}."
        return None, (f"{what} {reason}",)


def _folder(path: str, stack: ExitStack) -> Contents:
    weights, config = os.path.join(path, WEIGHTS), os.path.join(path, "config.json")
    if os.path.isfile(weights):
        contents = replace(_hdf5(weights, stack), kind="folder")
        if os.path.isfile(config) and os.path.getsize(config) <= MAX_JSON:
            found, notes = _configuration("config.json", Path(config).read_bytes)
            contents = replace(contents, config=found, notes=(*contents.notes, *notes))
        return contents
    if (tree := orbax_tree(path)) is not None:
        return read_orbax(path, tree)
    remedy = f"It contains neither {WEIGHTS} nor a checkpoint."
    raise FileFormatError(expected(f"one of {_KINDS}", f"the folder {plain_text(path)}", remedy))


def _sharded(path: str, stack: ExitStack) -> Contents:
    arrays, names = list[ModelArray](), dict[str, str]()
    for name in _shard_names(path):
        shard = os.path.join(os.path.dirname(path), name)
        if not os.path.isfile(shard):
            listed = f"The shard {plain_text(name)} that {plain_text(path)} lists"
            raise FileFormatError(f"{listed} is missing.")
        more, groups = stored_arrays(_file(shard, stack))
        arrays += more
        names |= groups
    return Contents("sharded", arrays, names)


def _shard_names(path: str) -> list[str]:
    """Return the file names of the shards that an index lists, each once and in order; they are in
    its folder."""
    shown = plain_text(path)
    if os.path.getsize(path) > MAX_JSON:
        what = "is not an index of sharded weights"
        raise FileFormatError(f"{shown} {what}: it has more than {MAX_JSON} bytes.")
    index = json.loads(Path(path).read_bytes())
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        what, received = "an index of sharded weights", f"{shown} without weight_map"
        raise FileFormatError(expected(what, received, f"Pass one of {_KINDS}."))
    found: dict[str, None] = {}
    for listed in weight_map.values():
        for name in listed if isinstance(listed, list) else [listed]:
            if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\:\0"):
                received = f"the shard name {plain_text(name)!r}"
                remedy = "It points outside the folder."
                what = "shards in the folder of the index"
                raise FileFormatError(expected(what, received, remedy))
            found[name] = None
    return list(found)


def _archive(path: str, stack: ExitStack) -> Contents:
    """Return the contents of a `.keras` or `.npz` archive."""
    archive = stack.enter_context(zipfile.ZipFile(path))
    names = archive.namelist()
    if WEIGHTS in names:
        return _keras(archive, path, stack)
    if names and all(name.endswith(".npy") for name in names):
        return Contents("npz", archived_arrays(archive, path))
    what = f"a zip archive with {WEIGHTS!r} (.keras) or of .npy arrays (.npz)"
    listed = f"{len(names)} members, such as {plain_text(names[:3])}"
    remedy = "Save the model with model.save('name.keras')."
    raise FileFormatError(expected(what, f"{plain_text(path)} with {listed}", remedy))


def _keras(archive: zipfile.ZipFile, path: str, stack: ExitStack) -> Contents:
    def read() -> bytes:
        info = archive.getinfo("config.json")
        refuse_bomb(info)
        with archive.open(info) as member:
            return member.read(MAX_JSON + 1)

    config, notes = _configuration("config.json", read)
    arrays, names = stored_arrays(_file(_weights(archive, path, stack), stack))
    return Contents("keras", arrays, names, config, notes)


def _weights(archive: zipfile.ZipFile, path: str, stack: ExitStack) -> Window:
    """Return the weights: in place if they are stored uncompressed, else unpacked."""
    info = archive.getinfo(WEIGHTS)
    refuse_bomb(info)
    if info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size:
        raw = stack.enter_context(open(path, "rb", buffering=0))  # noqa: SIM115
        return Window(raw, _data_start(raw, info), info.file_size)
    if info.file_size > MAX_RATIO * info.compress_size + MAX_UNBACKED:
        declared = f"unpacks to {info.file_size} bytes and stores {info.compress_size}"
        raise FileFormatError(f"{WEIGHTS} {declared}. Save the model again with model.save.")
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
    return int(info.header_offset + 30 + sum(struct.unpack("<HH", header[26:30])))
