"""What every reader of model files hands on: arrays that stand in a file and can be read in pieces.

Nothing in a file is trusted: whatever a reader meets becomes an array, an array with the reason why it was not looked
at, or a `FileFormatError` of one sentence. Level 0: imports no backend.
"""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core.errors import FileFormatError, NanGuardError

__all__ = ["BOMB_FLOOR", "MAX_UNBACKED", "READ_FAULTS", "Contents", "StoredArray", "plain_text", "readable"]

BOMB_FLOOR = 1 << 32
"""Bytes below which nothing is taken for a bomb: 4 GiB, the floor of Keras' own loader (`saving_lib`)."""

BACKED = 16
"""A whole array, or all arrays together, may take so many times the bytes that the file spends on them ..."""

MAX_UNBACKED = 128 << 20
"""... and so many bytes more: a file that declares gigabytes and stores none is never brought into memory."""

READ_FAULTS = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    RuntimeError,
    ArithmeticError,
    MemoryError,
    EOFError,
    SyntaxError,
    NotImplementedError,
    AssertionError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
)
"""What h5py, zipfile, zlib, json and NumPy raise on damaged or hostile bytes (found by fuzzing them).

`RuntimeError` includes `RecursionError`; `SyntaxError` comes from NumPy's header parser; `UnicodeError` is a
`ValueError`.
"""


@dataclass(frozen=True, slots=True)
class StoredArray:
    """One array in a file.

    Attributes:
        location: where it stands in the file, such as `"layers/dense/vars/0"`; text fit to print.
        dtype: name of the dtype (`"float32"`, `"bfloat16"`), or what the file calls it.
        shape: shape of the array.
        nbytes: bytes that reading it takes.
        is_float: whether its values can be non-finite.
        unread: why it cannot be read; empty where it can.
        pieces: function that returns its values in pieces, each once.
        key: the location as the file spells it, by which to write to it.
        order: `"C"` or `"F"`, the order in which the values stand.
        stored: bytes that the file spends on it.
        whole: function that returns all values at once; `None` where the pieces come in order.
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
        """Bytes of memory that it takes and that nothing in the file justifies."""
        return max(0, self.nbytes - BACKED * self.stored)

    def read(self) -> NDArray[Any]:
        """Return the whole array.

        Raises:
            FileFormatError: if it cannot be read.
        """
        with readable(self.location):
            if self.unread:
                raise FileFormatError(f"{self.location} cannot be read: {self.unread}")
            if self.unbacked > MAX_UNBACKED:
                raise FileFormatError(f"{self.location} is not read as a whole: it takes {self.nbytes} bytes and {self.stored} are stored.")
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
    """What stands in one model file.

    Attributes:
        kind: `"keras"`, `"weights.h5"`, `"h5"` (legacy), `"npz"`, `"sharded"`, `"folder"` or `"orbax"`.
        arrays: every array, as the file orders them.
        names: name that Keras wrote beside the variables of a group, by the location of that group.
        config: the model's configuration, or `None` where the file has none.
        notes: sentences about what was left out and why.
        close: releases what is open.
    """

    kind: str
    arrays: list[StoredArray]
    names: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    close: Callable[[], None] = lambda: None


def plain_text(text: object, longest: int = 300) -> str:
    """Return text from a file made safe to print: no control characters, no lone surrogates, not endless."""
    shown = str(text)
    if not shown.isprintable():
        shown = "".join(character if character.isprintable() else _escaped(character) for character in shown)
    return shown if len(shown) <= longest else f"{shown[: longest - 3]}..."


def first_line(error: BaseException) -> str:
    """Return the first line of an error that says something, made safe to print; its class where none does."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return plain_text(lines[0]).rstrip(".")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


@contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever a parser raises on a damaged file into a `FileFormatError` of one sentence that names the file."""
    try:
        yield
    except NanGuardError:
        raise
    except READ_FAULTS as error:
        reason = plain_text(str(error).strip() or type(error).__name__, 200).rstrip(".")
        raise FileFormatError(f"{plain_text(os.fspath(path))} cannot be read: {reason}.") from error
