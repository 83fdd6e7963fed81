"""Opening of model files of every kind that Keras 3 writes, recognized by their contents and not by
their names.

No model is built, no backend is imported, no pickle is loaded and no link is followed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from keras_nanguard._core.errors import FileFormatError, expected
from keras_nanguard._files.archives import WEIGHTS, read_archive, read_json
from keras_nanguard._files.hdf5 import SIGNATURE, attribute_text, open_hdf5, stored_arrays
from keras_nanguard._files.orbax import is_orbax, read_orbax
from keras_nanguard._files.stored import MAX_JSON, Contents, StoredArray, plain_text, readable

__all__ = ["opened"]

_KINDS = ".keras, .weights.h5, .h5, .npz, a sharded .weights.json or an Orbax checkpoint"


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
    with readable(name):
        contents = _contents(name)
        contents.arrays = _distinct(contents.arrays)
    try:
        yield contents
    finally:
        contents.close()


def _distinct(arrays: list[StoredArray]) -> list[StoredArray]:
    """Make the locations unique: names that differ in the file may be equal after they are made
    safe to print."""
    counts: Counter[str] = Counter()
    found = []
    for array in arrays:
        counts[array.location] += 1
        if (count := counts[array.location]) > 1:
            array = replace(array, location=f"{array.location} ({count})")
        found.append(array)
    return found


def _contents(path: str) -> Contents:
    shown = plain_text(path)
    if "\0" in path or not os.path.exists(path):
        remedy = "There is no such file."
        raise FileFormatError(expected("a model file", f"path={shown!r}", remedy))
    if os.path.isdir(path):
        return _folder(path)
    if not os.path.isfile(path):
        remedy = "Pass a model file."
        raise FileFormatError(expected("a file or a folder", f"path={shown!r}", remedy))
    with open(path, "rb") as file:
        head = file.read(8)
    if head == SIGNATURE:
        return _hdf5(path)
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return read_archive(path)
    if head.lstrip()[:1] == b"{":
        return _sharded(path)
    received = f"{shown}, which starts with {head!r}" if head else "an empty file"
    raise FileFormatError(expected(f"one of {_KINDS}", received, "Pass a file that Keras 3 saved."))


def _hdf5(path: str) -> Contents:
    notes: list[str] = []
    with ExitStack() as stack:
        file = stack.enter_context(open_hdf5(path))
        arrays, names = stored_arrays(file)
        text = attribute_text(file, "model_config")
        config = read_json(text.encode(), "The attribute model_config", notes) if text else None
        legacy = "model_weights" in file or "layer_names" in file.attrs
        kind = "h5" if legacy else "weights.h5"
        known = config if isinstance(config, dict) else None
        return Contents(kind, arrays, names, known, notes, stack.pop_all().close)


def _folder(path: str) -> Contents:
    weights, config = os.path.join(path, WEIGHTS), os.path.join(path, "config.json")
    if os.path.isfile(weights):
        contents = _hdf5(weights)
        contents.kind = "folder"
        if os.path.isfile(config) and os.path.getsize(config) <= MAX_JSON:
            parsed = read_json(Path(config).read_bytes(), "config.json", contents.notes)
            contents.config = parsed if isinstance(parsed, dict) else None
        return contents
    if is_orbax(path):
        return read_orbax(path)
    remedy = f"It contains neither {WEIGHTS} nor a checkpoint."
    raise FileFormatError(expected(f"one of {_KINDS}", f"the folder {plain_text(path)}", remedy))


def _sharded(path: str) -> Contents:
    contents = Contents("sharded", [])
    names: dict[str, str] = {}
    with ExitStack() as stack:
        for name in _shard_names(path):
            shard = os.path.join(os.path.dirname(path), name)
            if not os.path.isfile(shard):
                listed = f"The shard {plain_text(name)} that {plain_text(path)} lists"
                raise FileFormatError(f"{listed} is missing.")
            arrays, found = stored_arrays(stack.enter_context(open_hdf5(shard)))
            contents.arrays.extend(arrays)
            names.update(found)
        contents.close = stack.pop_all().close
    contents.names = names
    return contents


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
            found[_inside(name)] = None
    return list(found)


def _inside(name: Any) -> str:
    """Return the name of a file in the same folder, or raise a `FileFormatError`."""
    if isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\:\0"):
        return name
    received = f"the shard name {plain_text(name)!r}"
    remedy = "It leads out of the folder."
    raise FileFormatError(expected("shards beside the index", received, remedy))
