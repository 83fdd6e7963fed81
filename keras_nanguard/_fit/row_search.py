"""Finds rows of a batch in the arrays that `fit` trains on.

One pass finds all of them: a hash of a few distinguishing entries leaves few candidates, and these
are compared completely.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_nanguard._core import finiteness
from keras_nanguard._core.data_names import leaves
from keras_nanguard._keras import variables as keras_variables

__all__ = ["RowSearch"]

Array = np.ndarray[Any, Any]
Key = tuple[str, str]
"""Role and path of an array."""

MAX_COPIED = 1 << 28
"""Maximum size of an array that is copied because it is not a NumPy array in host memory."""

MAX_SECONDS = 30.0
"""Time limit of all searches of one guard."""

_CHUNK = 1 << 22
"""Numbers of the training data that are compared at a time."""

_HASHED = 1 << 16
"""Rows that are hashed at a time: few enough for the processor's cache."""

_PROBES = 8
"""Entries of a row that are compared first."""

_MAX_PROBES = 32
"""Maximum number of entries that are hashed for all rows."""

_ODD = np.uint64(0x9E3779B97F4A7C15)


class _TooLong(Exception):
    """The time limit of the search is reached."""


class RowSearch:
    """The search for rows of batches, for one guard."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def indices(
        self, arrays: Mapping[Key, Array], rows: Sequence[int], x: Any, y: Any
    ) -> list[tuple[int, ...]]:
        """Return the indices of each of these rows of a batch in the training arrays.

        Args:
            arrays: those of the batch, by role and path.
            rows: the rows to search for.
            x, y: the data of `fit`; `None` if they are not arrays.

        Returns:
            For each row the indices of all rows with the same contents. Empty if there are none, if
            the arrays are too large to be copied, or if the time limit is reached.
        """
        inputs, targets = dict(leaves("inputs", x)), dict(leaves("targets", y))
        wanted = {
            path: array[rows]
            for (role, path), array in sorted(arrays.items(), key=lambda item: item[0])
            if role == "inputs"
        }
        if (
            x is None
            or not wanted
            or not wanted.keys() <= inputs.keys()
            or self.seconds >= MAX_SECONDS
        ):
            return [()] * len(rows)
        started = time.perf_counter()
        try:
            batch = {key: array[rows] for key, array in arrays.items()}
            return _found(inputs, wanted, targets, batch, started + MAX_SECONDS - self.seconds)
        except _TooLong:
            return [()] * len(rows)
        finally:
            self.seconds += time.perf_counter() - started


def _found(
    inputs: Mapping[str, Any],
    wanted: Mapping[str, Array],
    targets: Mapping[str, Any],
    batch: Mapping[Key, Array],
    end: float,
) -> list[tuple[int, ...]]:
    count = len(next(iter(wanted.values())))
    pairs = []
    for path, ones in wanted.items():
        whole, flat = _flat(inputs[path]), ones.reshape(count, -1)
        if whole is None or whole.shape[1] != flat.shape[1]:
            return [()] * count
        pairs.append((whole, flat))
    others: dict[str, Array | None] = {}
    indices: list[tuple[int, ...]] = []
    for number, rows in enumerate(_narrowed(pairs, end)):
        for whole, ones in pairs:
            rows = _equal(whole, ones[number], rows, end)
        for (role, path), array in batch.items():
            if len(rows) > 1 and role == "targets" and path in targets:
                if path not in others:
                    others[path] = _flat(targets[path])
                narrowed = _equal(others[path], array[number], rows, end)
                rows = narrowed if len(narrowed) else rows
        indices.append(tuple(int(row) for row in rows))
    return indices


def _flat(whole: Any) -> Array | None:
    """Return an array on the host as one row of numbers for each of its rows; `None` if it is too
    large to copy.
    """
    stays = isinstance(whole, np.ndarray) and (whole.ndim <= 2 or whole.flags.c_contiguous)
    if (
        not stays
        and math.prod(int(size) for size in getattr(whole, "shape", ()) if size is not None)
        > MAX_COPIED
    ):
        return None
    found: Array = whole if isinstance(whole, np.ndarray) else keras_variables.dense(whole)
    return found.reshape(len(found), -1) if found.size else found.reshape(len(found), 0)


def _narrowed(pairs: Sequence[tuple[Array, Array]], end: float) -> list[Array]:
    """Return the candidates for each row: those with the same hash of a few distinguishing entries
    of all inputs.
    """
    columns = [_probes(ones) for _, ones in pairs]
    keys = _hash([ones[:, own] for (_, ones), own in zip(pairs, columns)])
    order = np.argsort(keys, kind="stable")
    total = min(len(whole) for whole, _ in pairs)
    rows, found = [], []
    for start in range(0, total, _HASHED):
        _check(end)
        part = slice(start, min(start + _HASHED, total))
        hashed = _hash(
            [
                whole[part][:, own].astype(ones.dtype, copy=False)
                for (whole, ones), own in zip(pairs, columns)
            ]
        )
        place = np.minimum(np.searchsorted(keys, hashed, sorter=order), len(keys) - 1)
        hits = np.flatnonzero(keys[order[place]] == hashed)
        rows.append(hits + start)
        found.append(hashed[hits])
    every, of = (
        np.concatenate([np.zeros(0, np.int64), *rows]),
        np.concatenate([np.zeros(0, np.uint64), *found]),
    )
    return [every[of == key] for key in keys]


def _probes(ones: Array) -> Array:
    """Return the entries to hash: all of them if few, else the most distinguishing ones of each
    row.
    """
    if ones.shape[1] <= _PROBES:
        return np.arange(ones.shape[1])
    telling = np.stack([_telling(one) for one in ones], axis=1).ravel()
    _, first = np.unique(telling, return_index=True)
    return np.sort(telling[np.sort(first)[:_MAX_PROBES]])


def _hash(parts: Sequence[Array]) -> Array:
    """Return a number for each row. Equal rows have equal numbers, with NaN equal to NaN, and other
    rows rarely.
    """
    key = np.zeros(len(parts[0]), np.uint64)
    for part in parts:
        wide = np.array(finiteness.widen(part).real.T, np.float64, order="C")
        wide += 0.0  # one zero
        wide[wide != wide] = np.nan  # one NaN
        for column in wide.view(np.uint64):
            key ^= column
            key *= _ODD
            key ^= key >> np.uint64(32)
    return key


def _equal(whole: Array | None, one: Array, rows: Array, end: float) -> Array:
    """Return those of some rows of an array that equal this one: compare a few distinguishing
    entries first.
    """
    flat = np.asarray(one).reshape(-1)
    if whole is None or whole.shape[1] != flat.size:
        return np.zeros(0, int)
    for columns in (_telling(flat), np.arange(flat.size)):
        step = max(_CHUNK // max(len(columns), 1), 1)
        kept = [rows[:0]]
        for start in range(0, len(rows), step):
            _check(end)
            part = rows[start : start + step]
            kept.append(part[_same(whole[np.ix_(part, columns)], flat[columns])])
        rows = np.concatenate(kept)
    return rows


def _check(end: float) -> None:
    if time.perf_counter() > end:
        raise _TooLong


def _telling(flat: Array) -> Array:
    """Return the positions of a few entries that distinguish a row from others: those not finite,
    then the largest.
    """
    size = np.abs(finiteness.widen(flat)) if flat.dtype.kind not in "bUSO" else flat != flat[:1]
    order = np.argsort(
        np.where(np.isfinite(size), size, np.inf) if size.dtype.kind == "f" else size, kind="stable"
    )
    return order[::-1][:_PROBES]


def _same(found: Array, wanted: Array) -> Array:
    """Return which rows equal the given one, in its dtype, with NaN equal to NaN."""
    cast = found.astype(wanted.dtype, copy=False)
    same = cast == wanted
    if wanted.dtype.kind in "fcV":
        same |= (cast != cast) & (wanted != wanted)
    return np.asarray(same.all(axis=1))
