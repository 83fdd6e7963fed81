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
from keras_nanguard._files.stored import (
    MAX_JSON,
    Alive,
    Contents,
    StoredArray,
    Window,
    plain_text,
    readable,
)

__all__ = ["opened", "shard_names", "size_on_disk"]

_KINDS = ".keras, .weights.h5, .h5, .npz, a sharded .weights.json or an Orbax checkpoint"


@contextmanager
def opened(path: str | os.PathLike[str], alive: Alive = lambda: None) -> Iterator[Contents]:
    """Open a model file for reading.

    Args:
        path: a `.keras`, `.weights.h5`, legacy `.h5` or `.npz` file, the `.json` index of sharded
            weights, or the folder of an unzipped model or an Orbax checkpoint.
        alive: called for each array that is found.

    Returns:
        Context manager of the contents; arrays can be read while it is open.

    Raises:
        FileFormatError: if the file is missing, truncated, malicious or of another format.
    """
    name = os.fspath(path)
    with readable(name):
        contents = _contents(name, alive)
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
        count = counts[array.location]
        found.append(
            array if count == 1 else replace(array, location=f"{array.location} ({count})")
        )
    return found


def size_on_disk(path: str) -> int:
    """Return the size of a file, or of all files in a folder; for the index of sharded weights, of
    all files in its folder."""
    try:
        folder = (
            path
            if os.path.isdir(path)
            else os.path.dirname(os.path.abspath(path))
            if path.endswith(".json")
            else ""
        )
        files = [os.path.join(folder, name) for name in os.listdir(folder)] if folder else [path]
        return sum(os.path.getsize(file) for file in files if os.path.isfile(file))
    except (OSError, ValueError):
        return 0


def _contents(path: str, alive: Alive) -> Contents:
    if "\0" in path or not os.path.exists(path):
        raise FileFormatError(
            expected("a model file", f"path={plain_text(path)!r}", "There is no such file.")
        )
    if os.path.isdir(path):
        return _folder(path, alive)
    if not os.path.isfile(path):
        raise FileFormatError(
            expected("a file or a folder", f"path={plain_text(path)!r}", "Name a model file.")
        )
    with open(path, "rb") as file:
        head = file.read(8)
    if head == SIGNATURE:
        return _hdf5(path, alive)
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return read_archive(path, alive)
    if head.lstrip()[:1] == b"{":
        return _sharded(path, alive)
    received = "an empty file" if not head else f"{plain_text(path)}, which starts with {head!r}"
    raise FileFormatError(expected(f"one of {_KINDS}", received, "Name a file that Keras 3 saved."))


def _hdf5(path: str, alive: Alive) -> Contents:
    notes: list[str] = []
    with ExitStack() as stack:
        file, arrays, names = _weights(path, stack, alive)
        text = attribute_text(file, "model_config")
        config = read_json(text.encode(), "The attribute model_config", notes) if text else None
        legacy = "model_weights" in file or "layer_names" in file.attrs
        known = config if isinstance(config, dict) else None
        return Contents(
            "h5" if legacy else "weights.h5", arrays, names, known, notes, stack.pop_all().close
        )


def _weights(
    path: str, stack: ExitStack, alive: Alive
) -> tuple[Any, list[StoredArray], dict[str, str]]:
    raw = stack.enter_context(open(path, "rb", buffering=0))  # noqa: SIM115
    file = stack.enter_context(open_hdf5(path))
    arrays, names = stored_arrays(file, Window(raw, 0, os.fstat(raw.fileno()).st_size), alive)
    return file, arrays, names


def _folder(path: str, alive: Alive) -> Contents:
    weights, config = os.path.join(path, WEIGHTS), os.path.join(path, "config.json")
    if os.path.isfile(weights):
        contents = _hdf5(weights, alive)
        contents.kind = "folder"
        if os.path.isfile(config) and os.path.getsize(config) <= MAX_JSON:
            parsed = read_json(Path(config).read_bytes(), "config.json", contents.notes)
            contents.config = parsed if isinstance(parsed, dict) else None
        return contents
    if is_orbax(path):
        return read_orbax(path, alive)
    remedy = f"It contains neither {WEIGHTS} nor a checkpoint."
    raise FileFormatError(expected(f"one of {_KINDS}", f"the folder {plain_text(path)}", remedy))


def shard_names(path: str) -> list[str]:
    """Return the file names of the shards that an index lists, each once and in order.

    Args:
        path: the `.json` index in the folder of the shards.

    Returns:
        Names of files in the folder of the index.

    Raises:
        FileFormatError: if it is not such an index, or a name in it leads out of its folder.
    """
    if os.path.getsize(path) > MAX_JSON:
        raise FileFormatError(
            f"{plain_text(path)} is not an index of sharded weights: it has more than {MAX_JSON} "
            "bytes."
        )
    index = json.loads(Path(path).read_bytes())
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise FileFormatError(
            expected(
                "an index of sharded weights",
                f"{plain_text(path)} without weight_map",
                f"Name one of {_KINDS}.",
            )
        )
    found: dict[str, None] = {}
    for listed in weight_map.values():
        for name in listed if isinstance(listed, list) else [listed]:
            found[_inside(name)] = None
    return list(found)


def _inside(name: Any) -> str:
    if (
        not isinstance(name, str)
        or name in ("", ".", "..")
        or "\0" in name
        or set(name) & set("/\\:")
    ):
        raise FileFormatError(
            expected(
                "shards beside the index",
                f"the shard name {plain_text(name)!r}",
                "It leads out of the folder.",
            )
        )
    return name


def _sharded(path: str, alive: Alive) -> Contents:
    folder = os.path.dirname(path)
    contents = Contents("sharded", [])
    names: dict[str, str] = {}
    with ExitStack() as stack:
        for name in shard_names(path):
            shard = os.path.join(folder, name)
            if not os.path.isfile(shard):
                raise FileFormatError(
                    f"The shard {plain_text(name)} that {plain_text(path)} lists is missing."
                )
            _, arrays, found = _weights(shard, stack, alive)
            contents.arrays.extend(arrays)
            names.update(found)
        contents.close = stack.pop_all().close
    contents.names = names
    return contents
