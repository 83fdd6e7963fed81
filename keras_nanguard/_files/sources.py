"""The source of a repair, a good model or a file, as a file of arrays. Imports no backend."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keras_nanguard._core.atomic_files import save_arrays
from keras_nanguard._core.finiteness import widen
from keras_nanguard._files import isolated
from keras_nanguard._files.formats.contents import ModelArray
from keras_nanguard._files.formats.npz import opened_arrays


@contextmanager
def stored(source: Any, names: Collection[str] | None = None) -> Iterator[str | None]:
    """Yield the path of a file with the values of a source: its own, or an `.npz` file with those
    of a live model; `None` if there is no source.

    Args:
        source: a model, the path of a file, or `None`.
        names: the paths of the variables that are needed of a live model, `None` for all.
    """
    if source is None or isinstance(source, (str, os.PathLike)):
        yield None if source is None else os.fsdecode(source)
        return
    from keras_nanguard._files.live import live_arrays

    live = {array.who.path: array for array in reversed(live_arrays(source))}
    found = {path: widen(a.read()) for path, a in live.items() if names is None or path in names}
    with tempfile.TemporaryDirectory(prefix="nanguard-") as folder:
        path = os.path.join(folder, "source.npz")
        save_arrays(Path(path), found)
        yield path


@contextmanager
def opened_source(source: Any, names: Collection[str]) -> Iterator[Mapping[str, ModelArray]]:
    """Yield the arrays of a source that have one of these paths; none if there is no source."""
    with stored(source, names) as path, tempfile.TemporaryDirectory(prefix="nanguard-") as folder:
        if path is None:
            yield {}
            return
        copy = os.path.join(folder, "values.npz")
        isolated.ask("values", path, names=list(names), output=copy)
        with opened_arrays(copy) as arrays:
            yield arrays
