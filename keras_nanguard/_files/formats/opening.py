"""Opening of model files, recognized by their contents and not by their names.

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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import IO, Any

import h5py

from keras_nanguard._core.errors import FileFormatError, expected
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._files.formats.contents import Contents, ModelArray
from keras_nanguard._files.formats.hdf5 import SIGNATURE, Window, stored_arrays
from keras_nanguard._files.formats.limits import (
    MAX_CONFIG,
    PARSE_ERRORS,
    READ_BYTES,
    readable,
    refuse_bomb,
    refuse_missing,
)
from keras_nanguard._files.formats.names import identities
from keras_nanguard._files.formats.npz import archived_arrays
from keras_nanguard._files.formats.orbax import orbax_tree, read_orbax

WEIGHTS = "model.weights.h5"
"""Name of the weights in a `.keras` archive."""

_KINDS = ".keras, .weights.h5, .npz or an Orbax checkpoint"

_UNNAMED = "layers are named by their location in the file"


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Contents]:
    """Open a model file for reading.

    Args:
        path: a `.keras`, `.weights.h5` or `.npz` file, or the folder of an Orbax checkpoint.

    Returns:
        Context manager of the contents; arrays can be read while it is open.

    Raises:
        FileFormatError: if the file is missing, truncated, malicious or of another format.
    """
    name = os.fspath(path)
    with ExitStack() as stack:
        with readable(name):
            contents = _contents(name, stack)
            named = zip(contents.arrays, identities(contents), strict=True)
            contents = replace(contents, arrays=[replace(array, who=who) for array, who in named])
        yield contents


def _contents(path: str, stack: ExitStack) -> Contents:
    refuse_missing(path, "a model file")
    if os.path.isdir(path):
        return _folder(path)
    with open(path, "rb") as file:
        head = file.read(8)
    if head == SIGNATURE:
        return _hdf5(path, stack)
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _archive(path, stack)
    received = f"{plain_text(path)}, which starts with {head!r}" if head else "an empty file"
    remedy = "Pass a file that Keras 3 saved; of sharded weights one .weights.h5 after the other."
    raise FileFormatError(expected(f"one of {_KINDS}", received, remedy))


def _hdf5(path: str, stack: ExitStack) -> Contents:
    file = stack.enter_context(h5py.File(path, "r", locking=False))
    if "model_weights" in file or "layer_names" in file.attrs:
        received, model = f"{plain_text(path)}, a legacy .h5 file", "keras.models.load_model"
        remedy = f"Load it with {model} and pass the model, or save that as .keras."
        raise FileFormatError(expected(f"one of {_KINDS}", received, remedy))
    return Contents("weights.h5", *_stored(file, path))


def _stored(file: h5py.File, path: str) -> tuple[list[ModelArray], str, dict[str, str]]:
    """Return arrays, source and names of the contents of an HDF5 file."""
    arrays, names = stored_arrays(file)
    return arrays, plain_text(path), names


def _folder(path: str) -> Contents:
    if (tree := orbax_tree(path)) is not None:
        return read_orbax(path, tree)
    remedy = f"It contains no checkpoint. Of an unzipped model pass its {WEIGHTS}."
    raise FileFormatError(expected(f"one of {_KINDS}", f"the folder {plain_text(path)}", remedy))


def _archive(path: str, stack: ExitStack) -> Contents:
    """Return the contents of a `.keras` or `.npz` archive."""
    archive = stack.enter_context(zipfile.ZipFile(path))
    names = archive.namelist()
    if WEIGHTS in names:
        return _keras(archive, path, stack)
    if names and all(name.endswith(".npy") for name in names):
        return Contents("npz", archived_arrays(archive, path), plain_text(path))
    what = f"a zip archive with {WEIGHTS!r} (.keras) or of .npy arrays (.npz)"
    listed = f"{len(names)} members, such as {plain_text(names[:3])}"
    remedy = "Save the model with model.save('name.keras')."
    raise FileFormatError(expected(what, f"{plain_text(path)} with {listed}", remedy))


def _keras(archive: zipfile.ZipFile, path: str, stack: ExitStack) -> Contents:
    config, note = _config(archive)
    file = stack.enter_context(h5py.File(_weights(archive, path, stack), "r"))
    notes = (note,) if note else ()
    return Contents("keras", *_stored(file, path), config, notes)


def _config(archive: zipfile.ZipFile) -> tuple[dict[str, Any] | None, str]:
    """Return the configuration, `None` if it is not a dict; and a note if it cannot be parsed."""
    try:
        with archive.open("config.json") as member:
            text = member.read(MAX_CONFIG + 1)
        if len(text) > MAX_CONFIG:
            raise ValueError(f"it has more than {MAX_CONFIG} bytes")
        parsed = json.loads(text)
    except PARSE_ERRORS as error:
        reason = f"could not be parsed ({plain_text(error, 120)}): {_UNNAMED}."
        return None, f"config.json {reason}"
    return (parsed if isinstance(parsed, dict) else None), ""


def _weights(archive: zipfile.ZipFile, path: str, stack: ExitStack) -> Window:
    """Return the weights: in place if they are stored uncompressed, else unpacked."""
    info = archive.getinfo(WEIGHTS)
    refuse_bomb(info)
    if info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size:
        raw = stack.enter_context(open(path, "rb", buffering=0))  # noqa: SIM115
        return Window(raw, _data_start(raw, info), info.file_size)
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
