"""What every reader of model files hands on: arrays that stand in a file and can be read in pieces.

Nothing in a file is trusted: whatever a reader meets becomes an array, an array with the reason why it was not looked
at, or a `FileFormatError` of one sentence. Level 0: imports no backend.
"""

from __future__ import annotations

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

from keras_nanguard._errors import FileFormatError

__all__ = ["BOMB_FLOOR", "READ_FAULTS", "Contents", "StoredArray", "plain_text", "readable"]

BOMB_FLOOR = 1 << 32
"""Bytes below which nothing is taken for a bomb: 4 GiB, the floor of Keras' own loader (`saving_lib`)."""

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
        pieces: function that returns its values in pieces, in order.
        key: the location as the file spells it, by which to write to it.
        order: `"C"` or `"F"`, the order in which the values stand.
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

    def read(self) -> NDArray[Any]:
        """Return the whole array.

        Raises:
            FileFormatError: if it cannot be read.
        """
        with readable(self.location):
            if self.unread:
                raise FileFormatError(f"{self.location} cannot be read: {self.unread}")
            parts = [np.array(piece).reshape(-1) for piece in self.pieces()]
            flat = np.concatenate(parts) if parts else np.zeros(0)
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
    except FileFormatError:
        raise
    except READ_FAULTS as error:
        reason = plain_text(str(error).strip() or type(error).__name__, 200).rstrip(".")
        raise FileFormatError(f"{plain_text(os.fspath(path))} cannot be read: {reason}.") from error
