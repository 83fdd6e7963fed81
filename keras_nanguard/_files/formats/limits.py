"""What is read of a file that nobody trusts: how much, which errors parsers raise, and how these
become a `FileFormatError` of one sentence. Imports neither NumPy nor a backend.
"""

from __future__ import annotations

import math
import os
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from keras_nanguard._core.errors import FileFormatError, NanGuardError, expected
from keras_nanguard._core.plain_values import first_line, plain_text

try:
    from lzma import LZMAError
except ImportError:  # Python was built without it
    LZMAError = zlib.error  # type: ignore[misc,assignment]

READ_BYTES = 4 << 20
"""Bytes per read."""

BOMB_FLOOR = 1 << 32
"""Size below which nothing counts as a bomb: 4 GiB, the threshold of Keras' own loader
(`saving_lib`)."""

MAX_EXPANSION = 1000
"""Maximum ratio of declared to stored bytes: the limit of Keras' own loader for a dataset."""

MAX_MEMBER_EXPANSION = 100
"""Maximum expansion of a compressed member: the limit of Keras' own loader (`saving_lib`)."""

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
    *(struct.error, tokenize.TokenError, zlib.error, LZMAError, zipfile.BadZipFile),
)
"""Exceptions of h5py, zipfile, zlib, json and NumPy for damaged or malicious files (found by
fuzzing).

`RuntimeError` includes `RecursionError`; NumPy's header parser raises `SyntaxError` and
`TokenError`; `UnicodeError` is a `ValueError`.
"""


def declared_too_much(
    shape: tuple[int, ...],
    chunk: tuple[int, ...] | None,
    itemsize: int,
    before: int,
    file_size: int,
) -> str:
    """Return why an array is not read, if it declares too much, else `""`.

    Args:
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


def refuse_bomb(info: zipfile.ZipInfo) -> None:
    """Raise a `FileFormatError` for a member that is encrypted, or that declares or can unpack to
    far more data than it stores.

    Only of a stored or deflated member does `zipfile` unpack no more than it is asked for.
    """
    name = plain_text(info.filename)
    if info.flag_bits & 1:
        raise FileFormatError(f"{name} is encrypted; Keras files never are.")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        received = f"{name}, compressed by method {info.compress_type}"
        remedy = "Write the file again with model.save or numpy.savez."
        raise FileFormatError(expected("a member that is stored or deflated", received, remedy))
    if info.file_size > max(BOMB_FLOOR, MAX_MEMBER_EXPANSION * info.compress_size):
        declared = f"declares {info.file_size} bytes and stores {info.compress_size}"
        raise FileFormatError(f"{name} {declared}: a zip bomb.")


def refuse_missing(path: str, what: str) -> None:
    """Raise a `FileFormatError`, which names what is expected, unless the path is a file or a
    folder: a pipe would block its reader."""
    shown = plain_text(path)
    if "\0" in path or not os.path.exists(path):
        raise FileFormatError(expected(what, f"path={shown!r}", "There is no such file."))
    if not (os.path.isfile(path) or os.path.isdir(path)):
        raise FileFormatError(expected(what, f"{shown}, which is not a file", f"Pass {what}."))


def size_on_disk(path: str) -> int:
    """Return the size of a file in bytes, or of all files in a folder. For the index of sharded
    weights it is the size of its folder. Links count as the files that they lead to."""
    named, total = Path(path), 0
    with suppress(OSError, ValueError):
        entries: Iterable[Path] = (named,)
        if named.is_dir():
            entries = named.rglob("*")
        elif named.suffix == ".json":
            entries = named.absolute().parent.iterdir()
        for entry in entries:
            with suppress(OSError):  # a link that leads nowhere
                total += entry.stat().st_size
    return total


@contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Convert the exceptions of parsers for a damaged file to a `FileFormatError` that names the
    file."""
    try:
        yield
    except NanGuardError:
        raise
    except PARSE_ERRORS as error:
        named = plain_text(os.fspath(path))
        raise FileFormatError(f"{named} cannot be read: {first_line(error)}.") from error
