"""The common interface of all readers of model files: arrays in a file that can be read in pieces.

Nothing in a file is trusted: everything in it becomes an array, an array with the reason why it was
not read, or a `FileFormatError` of one sentence. Imports no backend.
"""

from __future__ import annotations

import io
import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core.errors import FileFormatError, NanGuardError
from keras_nanguard._core.plain_text import plain_text

__all__ = [
    "BOMB_FLOOR",
    "MAX_JSON",
    "MAX_UNBACKED",
    "PARSE_ERRORS",
    "Alive",
    "Contents",
    "StoredArray",
    "Window",
    "first_line",
    "plain_text",
    "readable",
]

BOMB_FLOOR = 1 << 32
"""Size below which nothing counts as a zip bomb: 4 GiB, the threshold of Keras' own loader
(`saving_lib`)."""

MAX_RATIO = 16
"""An array, or all arrays together, may take this many times the bytes that the file stores for
them ..."""

MAX_UNBACKED = 128 << 20
"""... plus this many bytes: a file that declares gigabytes and stores none is never loaded."""

MAX_JSON = 32 << 20
"""Maximum size of JSON that is parsed. The configuration of a model of 10,000 layers takes about 15
MiB; JSON that consists of empty lists takes 25 times its size in memory."""

PARSE_ERRORS = (
    *(
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        RuntimeError,
        ArithmeticError,
    ),
    *(MemoryError, EOFError, SyntaxError, NotImplementedError, AssertionError),
    *(struct.error, tokenize.TokenError, zlib.error, zipfile.BadZipFile),
)
"""Exceptions of h5py, zipfile, zlib, json and NumPy for damaged or malicious files (found by
fuzzing).

`RuntimeError` includes `RecursionError`; NumPy's header parser raises `SyntaxError` and
`TokenError`; `UnicodeError` is a `ValueError`.
"""

Alive = Callable[[], None]
"""Called between two calls of a library that reads a file: the process that reads is not
hanging."""


class Window(io.RawIOBase):
    """A read-only section of an open file, such as an uncompressed member of a zip archive.

    Args:
        file: an unbuffered file, which the caller closes.
        start: offset of the first byte.
        size: number of bytes.
    """

    def __init__(self, file: BinaryIO, start: int, size: int):
        super().__init__()
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

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


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array in a file.

    Attributes:
        location: its location in the file, such as `"layers/dense/vars/0"`, safe to print.
        dtype: name of the dtype (`"float32"`, `"bfloat16"`), or its name in the file.
        shape: shape of the array.
        nbytes: its size in memory, in bytes.
        is_float: whether its values can be non-finite.
        unread: why it cannot be read; empty if it can.
        pieces: function that returns its values in pieces, each once.
        key: the exact location in the file, for writing.
        order: `"C"` or `"F"`, the memory order of the values.
        stored: its size in the file, in bytes.
        whole: function that returns all values at once; `None` if the pieces are in order.
    """

    location: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    is_float: bool
    unread: str = ""
    pieces: Callable[[], Iterator[NDArray[Any]]] = lambda: iter(())
    key: str = ""
    order: Literal["C", "F"] = "C"
    stored: int = 0
    whole: Callable[[], NDArray[Any]] | None = None

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
            if self.unread:
                raise FileFormatError(f"{self.location} cannot be read: {self.unread}")
            if self.unbacked > MAX_UNBACKED:
                declared = f"it takes {self.nbytes} bytes and the file stores {self.stored}"
                raise FileFormatError(f"{self.location} is not read: {declared}.")
            return self._in_order() if self.whole is None else self.whole()

    def _in_order(self) -> NDArray[Any]:
        pieces = self.pieces()
        first = next(pieces, None)
        if first is None:
            return np.zeros(self.shape)
        flat, at = np.empty(math.prod(self.shape), first.dtype), first.size
        flat[:at] = first.reshape(-1)
        for piece in pieces:
            flat[at : at + piece.size] = piece.reshape(-1)
            at += piece.size
        return flat.reshape(self.shape, order=self.order)


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
        close: closes the file.
    """

    kind: str
    arrays: list[StoredArray]
    names: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    close: Callable[[], None] = lambda: None


def first_line(error: BaseException) -> str:
    """Return the first nonempty line of an error, safe to print, or the name of its class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    return plain_text(lines[0]).rstrip(".")


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
