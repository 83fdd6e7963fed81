"""The result of every reader of model files: arrays that can be read in pieces, and their limits.

Nothing in a file is trusted: everything in it becomes an array, an array with the reason why it was
not read, or a `FileFormatError` of one sentence. Imports no backend.
"""

from __future__ import annotations

import itertools
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core.errors import FileFormatError, NanGuardError
from keras_nanguard._core.plain_values import plain_text as plain_text

READ_BYTES = 4 << 20
"""Bytes per read."""

BOMB_FLOOR = 1 << 32
"""Size below which nothing counts as a bomb: 4 GiB, the threshold of Keras' own loader
(`saving_lib`)."""

MAX_EXPANSION = 1000
"""Maximum ratio of declared to stored bytes: the limit of Keras' own loader for a dataset."""

MAX_CHUNK = 256 << 20
"""Maximum size of a chunk, which is loaded as a whole; or four times the size of the file, if that
is more."""

MAX_CHUNKS = 1 << 20
"""Maximum number of chunks of an array beyond one per byte of the file: each is looked up, stored
or not."""

MAX_RATIO = 16
"""An array, or all arrays together, may take this many times the bytes that the file stores for
them ..."""

MAX_UNBACKED = 128 << 20
"""... plus this many bytes: a file that declares gigabytes and stores none is never loaded."""

MAX_JSON = 32 << 20
"""Maximum size of JSON that is parsed. The configuration of a model of 10,000 layers takes about 15
MiB; JSON that consists of empty lists takes 25 times its size in memory."""

PARSE_ERRORS = (
    *(OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError),
    *(ArithmeticError, MemoryError, EOFError, SyntaxError, NotImplementedError, AssertionError),
    *(struct.error, tokenize.TokenError, zlib.error, zipfile.BadZipFile),
)
"""Exceptions of h5py, zipfile, zlib, json and NumPy for damaged or malicious files (found by
fuzzing).

`RuntimeError` includes `RecursionError`; NumPy's header parser raises `SyntaxError` and
`TokenError`; `UnicodeError` is a `ValueError`.
"""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array in a file.

    Attributes:
        location: its location in the file, such as `"layers/dense/vars/0"`, safe to print.
        dtype: name of the dtype (`"float32"`, `"bfloat16"`), or its name in the file.
        shape: shape of the array.
        nbytes: its size in memory, in bytes.
        stored: its size in the file, in bytes.
        is_float: whether its values can be non-finite.
        unread: why it cannot be read; empty if it can.
        pieces: function that returns its values in pieces, each once.
        whole: function that returns all values at once.
        key: the exact location in the file, for writing.
    """

    location: str
    dtype: str = "?"
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    stored: int = 0
    is_float: bool = False
    unread: str = ""
    pieces: Callable[[], Iterator[NDArray[Any]]] = lambda: iter(())
    whole: Callable[[], NDArray[Any]] | None = None
    key: str = ""

    @classmethod
    def found(
        cls,
        location: str,
        key: str,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        reason: str,
        **reading: Any,
    ) -> StoredArray:
        """Return an array of this dtype and shape.

        Args:
            location, key, dtype, shape: see above.
            reason: why it is not read, `""` if nothing is wrong.
            reading: `stored`, `pieces` and `whole`.
        """
        name = float_name(dtype)
        shown = name or plain_text(dtype, 40)
        if dtype.kind == "V" and name is None:
            reason = reason or f"values of the unnamed kind {shown}, which no reader can interpret"
        if reason:
            return cls(location, shown, shape, unread=reason, key=key)
        size = math.prod(shape) * dtype.itemsize
        return cls(location, shown, shape, size, is_float=name is not None, key=key, **reading)

    @property
    def unbacked(self) -> int:
        """Bytes of memory beyond `MAX_RATIO` times its size in the file."""
        return max(0, self.nbytes - MAX_RATIO * self.stored)

    def read(self) -> NDArray[Any]:
        """Return the whole array.

        Raises:
            FileFormatError: if it cannot be read.
        """
        with readable(self.location):
            if self.unread or self.whole is None:
                raise FileFormatError(f"{self.location} cannot be read: {self.unread}")
            if self.unbacked > MAX_UNBACKED:
                declared = f"it takes {self.nbytes} bytes and the file stores {self.stored}"
                raise FileFormatError(f"{self.location} is not read: {declared}.")
            return self.whole()


@dataclass(slots=True)
class Contents:
    """The contents of one model file.

    Attributes:
        kind: `"keras"`, `"weights.h5"`, `"h5"` (legacy), `"npz"`, `"sharded"`, `"folder"` or
            `"orbax"`.
        arrays: every array, in the order of the file.
        names: name that Keras stored with the variables of a group, by the location of the group.
        config: the model's configuration, or `None` if the file has none.
        notes: sentences about what was not read, and why.
    """

    kind: str
    arrays: list[StoredArray]
    names: dict[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


_SMALL_FLOATS = ("bfloat16", "float8", "float6", "float4")


def named_dtype(name: str) -> np.dtype[Any] | None:
    """Return the dtype of a name, including those of `ml_dtypes`; `None` if there is none."""
    try:
        return np.dtype(name)
    except TypeError:
        pass
    if not name.startswith(_SMALL_FLOATS):
        return None
    import ml_dtypes  # only here, to keep `--help` and float32 files fast

    kind = getattr(ml_dtypes, name, None)
    return None if kind is None else np.dtype(kind)


def float_name(dtype: np.dtype[Any]) -> str | None:
    """Return the name of a float or complex dtype (`"float32"`, `"bfloat16"`), else `None`."""
    name = str(dtype.name)
    is_float = name.startswith(_SMALL_FLOATS) or (dtype.kind in "fc" and dtype.fields is None)
    return name if is_float else None


def tiles(shape: tuple[int, ...], tile: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield the indices of the tiles of a shape, which cover it once.

    Args:
        shape: shape of an array.
        tile: shape of a tile, such as a chunk of an HDF5 dataset.
    """
    grid = [range(0, length, max(1, step)) for length, step in zip(shape, tile, strict=True)]
    for corner in itertools.product(*grid):
        ends = (min(start + step, n) for start, step, n in zip(corner, tile, shape))
        yield tuple(slice(start, end) for start, end in zip(corner, ends))


def declared_too_much(
    shape: tuple[int, ...],
    chunk: tuple[int, ...] | None,
    itemsize: int,
    before: int,
    file_size: int,
) -> str:
    """Return why an array is not read, if it declares too much, else `""`.

    Args:
        shape: shape of the array.
        chunk: shape of its chunks, or `None` if it has none.
        itemsize: bytes per value.
        before: bytes that the arrays before it in the file declare.
        file_size: size of the file in bytes.
    """
    if before + math.prod(shape) * itemsize > max(BOMB_FLOOR, MAX_EXPANSION * file_size):
        return f"the file of {file_size} bytes declares more than {MAX_EXPANSION} times that"
    if chunk is None:
        return ""
    if (size := math.prod(chunk) * itemsize) > max(MAX_CHUNK, 4 * file_size):
        return f"one chunk declares {size} bytes"
    count = math.prod(-(-length // max(1, step)) for length, step in zip(shape, chunk))
    if count > MAX_CHUNKS + file_size:
        return f"it declares {count} chunks in a file of {file_size} bytes"
    return ""


def first_line(error: BaseException) -> str:
    """Return the first nonempty line of an error, safe to print, or the name of its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return plain_text((lines or [type(error).__name__])[0]).rstrip(".")


@contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert the exceptions of parsers for a damaged file to a `FileFormatError` that names the
    file."""
    try:
        yield
    except NanGuardError:
        raise
    except PARSE_ERRORS as error:
        reason = plain_text(str(error).strip() or type(error).__name__, 200).rstrip(".")
        raise FileFormatError(f"{plain_text(os.fspath(path))} cannot be read: {reason}.") from error
