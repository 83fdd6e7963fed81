"""The arrays of a model, in a file or live, and the limits of what is read from a file.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
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
class Identity:
    """The names and the role of an array.

    Attributes:
        layer: names of the layers that contain it, outermost first, joined by `/`.
        name: name of the variable, or its number if the name is not known.
        role: `"weight"` (trained, or set by the user), `"statistics"` (moving averages of
            BatchNormalization, mean and variance of Normalization), `"slot"` (belongs to an
            optimizer) or `"other"` (counters, seeds, metrics).
        layer_class: class of the layer, or `""` if it is not known.
        settings: the layer's configuration, empty if the file has none; of a layer of a live model
            only its dtype policy.
    """

    layer: str
    name: str
    role: str
    layer_class: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Layer and variable, as one path."""
        return f"{self.layer}/{self.name}" if self.layer else self.name

    @property
    def in_float16(self) -> bool:
        """Whether the layer computes in float16."""
        policy = self.settings.get("dtype")
        named = policy.get("config") if isinstance(policy, Mapping) else None
        name = named.get("name") if isinstance(named, Mapping) else policy
        return name in ("float16", "mixed_float16")


@dataclass(slots=True)
class ModelArray:
    """One array of a model: in a file, or the value of a variable.

    Attributes:
        location: its location in the file, such as `"layers/dense/vars/0"`, safe to print; of a
            variable its Keras path.
        dtype: name of the dtype (`"float32"`, `"bfloat16"`), or its name in the file.
        shape: shape of the array.
        nbytes: its size in memory, in bytes.
        stored: its size in the file, in bytes.
        is_float: whether its values can be non-finite.
        unread: why it cannot be read; empty if it can.
        pieces: function that returns its values in pieces, each once.
        whole: function that returns all values at once.
        key: the exact location in the file, for writing.
        who: its names and role.
    """

    location: str
    dtype: str = "?"
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    stored: int = 0
    is_float: bool = False
    unread: str = ""
    pieces: Callable[[], Iterable[NDArray[Any]]] = tuple
    whole: Callable[[], NDArray[Any]] | None = None
    key: str = ""
    who: Identity = Identity("", "", "other")

    @classmethod
    def found(
        cls,
        location: str,
        key: str,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        reason: str,
        **reading: Any,
    ) -> ModelArray:
        """Return an array of a file.

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
    """The contents of one model file, or of a live model.

    Attributes:
        kind: `"keras"`, `"weights.h5"`, `"h5"` (legacy), `"npz"`, `"sharded"`, `"folder"`,
            `"orbax"` or `"model"`.
        arrays: every array, in the order of the file.
        names: name that Keras stored with the variables of a group, by the location of the group.
        config: the model's configuration, or `None` if the file has none.
        notes: sentences about what was not read, and why.
        source: path of the file, safe to print, or name of the model.
    """

    kind: str
    arrays: list[ModelArray]
    names: dict[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    source: str = ""


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


def pieces_of(
    get: Callable[[tuple[slice, ...]], NDArray[Any]],
    shape: tuple[int, ...],
    chunk: tuple[int, ...] | None,
    itemsize: int,
) -> Iterator[NDArray[Any]]:
    """Read an array in slabs of about `READ_BYTES`, which cut no chunk in two.

    Args:
        get: returns a part of the array.
        shape, chunk, itemsize: see `declared_too_much`.
    """
    tile = chunk or (1, *shape[1:])
    rows = max(1, READ_BYTES // max(1, math.prod(tile) * itemsize))
    return map(get, tiles(shape, (tile[0] * rows, *tile[1:]) if shape else ()))


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
