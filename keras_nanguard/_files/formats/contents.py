"""The contents of a model, in a file or live: its arrays, each with its names and its role.

Everything in a file becomes an array, or an array with the reason why it was not read. Imports no
backend.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keras_nanguard._core import finiteness
from keras_nanguard._core.errors import FileFormatError
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._files.formats.limits import MAX_RATIO, MAX_UNBACKED, READ_BYTES, readable


@dataclass(frozen=True, slots=True)
class Identity:
    """The names and the role of an array.

    Attributes:
        layer: names of the layers that contain it, outermost first, joined by `/`.
        name: name of the variable, or its number if the name is not known.
        role: `"weight"` (trained, or set by the user), `"statistics"` (moving averages of
            BatchNormalization, mean and variance of Normalization), `"slot"` (belongs to an
            optimizer) or `"other"` (counters, seeds, metrics).
        layer_class: class of the layer, or `""` if it is not known; of a slot that of an optimizer
            of Keras, or the name of the optimizer in a file.
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


@dataclass(frozen=True, slots=True)
class ModelArray:
    """One array of a model: in a file, or the value of a variable.

    Attributes:
        location: its exact location in the file, such as `"layers/dense/vars/0"`, whose text nobody
            has checked; of a variable its Keras path.
        dtype: name of the dtype (`"float32"`, `"bfloat16"`), or its name in the file.
        nbytes: its size in memory, in bytes.
        stored: its size in the file, in bytes.
        is_float: whether its values can be non-finite.
        unread: why it cannot be read; empty if it can.
        pieces: function that returns its values in pieces, each once.
        whole: function that returns all values at once.
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
    who: Identity = Identity("", "", "other")

    @classmethod
    def found(
        cls,
        location: str,
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        stored: int,
        pieces: Callable[[], Iterable[NDArray[Any]]],
        whole: Callable[[], NDArray[Any]],
        reason: str,
    ) -> ModelArray:
        """Return an array of a file.

        Args:
            reason: why it is not read, `""` if nothing is wrong.
        """
        is_float = finiteness.is_float(dtype.name)
        shown = dtype.name if is_float else plain_text(dtype, 40)
        if dtype.kind == "V" and not is_float:
            reason = reason or f"values of the unnamed kind {shown}, which no reader can interpret"
        if reason:
            return cls(location, shown, shape, unread=reason)
        size = math.prod(shape) * dtype.itemsize
        return cls(location, shown, shape, size, stored, is_float, "", pieces, whole)

    @property
    def unbacked(self) -> int:
        """Bytes of memory beyond `MAX_RATIO` times its size in the file."""
        return max(0, self.nbytes - MAX_RATIO * self.stored)

    def read(self) -> NDArray[Any]:
        """Return the whole array.

        Raises:
            FileFormatError: if it cannot be read.
        """
        shown = plain_text(self.location)
        with readable(shown):
            if self.unread or self.whole is None:
                raise FileFormatError(f"{shown} cannot be read: {self.unread}")
            if self.unbacked > MAX_UNBACKED:
                declared = f"it takes {self.nbytes} bytes and the file stores {self.stored}"
                raise FileFormatError(f"{shown} is not read: {declared}.")
            return self.whole()


@dataclass(frozen=True, slots=True)
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
    arrays: Sequence[ModelArray]
    names: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    notes: Sequence[str] = ()
    source: str = ""


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
        shape, chunk, itemsize: see `declared_too_much`.
    """
    tile = chunk or (1, *shape[1:])
    rows = max(1, READ_BYTES // max(1, math.prod(tile) * itemsize))
    return map(get, tiles(shape, (tile[0] * rows, *tile[1:]) if shape else ()))
