"""Finds rows of a batch in the arrays that `fit` trains on.

A few distinguishing entries of a row are compared first, one after the other. They leave few
candidates, and these are compared completely.
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

_PROBES = 8
"""Entries of a row that are compared first."""


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
        nowhere: list[tuple[int, ...]] = [()] * len(rows)
        inputs, targets = dict(leaves("inputs", x)), dict(leaves("targets", y))
        paths = {path for role, path in arrays if role == "inputs"}
        if x is None or not paths or not paths <= inputs.keys() or self.seconds >= MAX_SECONDS:
            return nowhere
        started = time.perf_counter()
        end = started + MAX_SECONDS - self.seconds
        try:
            whole = {path: _flat(inputs[path]) for path in sorted(paths)}
            ones = ({key: array[row] for key, array in arrays.items()} for row in rows)
            return [_found(whole, targets, one, end) for one in ones]
        except _TooLong:
            return nowhere
        finally:
            self.seconds += time.perf_counter() - started


def _found(
    inputs: Mapping[str, Array | None],
    targets: Mapping[str, Any],
    row: Mapping[Key, Array],
    end: float,
) -> tuple[int, ...]:
    """Return the indices of all rows of the training arrays with these inputs, and of those the
    ones with the same targets, if there are several.
    """
    first = next(iter(inputs.values()))
    rows = np.arange(0 if first is None else len(first))
    for path, whole in inputs.items():
        rows = _equal(whole, row["inputs", path], rows, end)
    for (role, path), one in row.items():
        if len(rows) > 1 and role == "targets" and path in targets:
            narrowed = _equal(_flat(targets[path]), one, rows, end)
            rows = narrowed if len(narrowed) else rows
    return tuple(int(number) for number in rows)


def _flat(whole: Any) -> Array | None:
    """Return an array on the host as one row of numbers for each of its rows; `None` if it is too
    large to copy.
    """
    stays = isinstance(whole, np.ndarray) and (whole.ndim <= 2 or whole.flags.c_contiguous)
    shape = (int(size) for size in getattr(whole, "shape", ()) if size is not None)
    if not stays and math.prod(shape) > MAX_COPIED:
        return None
    found: Array = whole if isinstance(whole, np.ndarray) else keras_variables.dense(whole)
    return found.reshape(len(found), -1) if found.size else found.reshape(len(found), 0)


def _equal(whole: Array | None, one: Array, rows: Array, end: float) -> Array:
    """Return those of some rows of an array that equal this one."""
    flat = np.asarray(one).reshape(-1)
    if whole is None or whole.shape[1] != flat.size:
        return rows[:0]
    rows = rows[rows < len(whole)]
    for columns in (*_telling(flat)[:, None], np.arange(flat.size)):
        chunk = max(_CHUNK // max(len(columns), 1), 1)
        kept = [rows[:0]]
        for start in range(0, len(rows), chunk):
            if time.perf_counter() > end:
                raise _TooLong
            part = rows[start : start + chunk]
            kept.append(part[_same(whole[np.ix_(part, columns)], flat[columns])])
        rows = np.concatenate(kept)
    return rows


def _telling(flat: Array) -> Array:
    """Return the positions of a few entries that distinguish a row from others: those not finite,
    then the largest.
    """
    size = np.abs(finiteness.widen(flat)) if flat.dtype.kind not in "bUSO" else flat != flat[:1]
    if size.dtype.kind == "f":
        size = np.where(np.isfinite(size), size, np.inf)
    return np.argsort(size, kind="stable")[::-1][:_PROBES]


def _same(found: Array, wanted: Array) -> Array:
    """Return which rows equal the given one, in its dtype, with NaN equal to NaN."""
    cast = found.astype(wanted.dtype, copy=False)
    same = cast == wanted
    if wanted.dtype.kind in "fcV":
        same |= (cast != cast) & (wanted != wanted)
    return np.asarray(same.all(axis=1))
