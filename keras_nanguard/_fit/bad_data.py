"""Bad rows of the data, identified independently of their place in a batch.

If `fit` trains on arrays, a row of a batch is found in them by its values, also with shuffling. All
rows with the same contents are reported. Other data are identified by a fingerprint, the SHA-256 of
the values of a row. A step without an incident costs nothing.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from keras_nanguard._backends.shared import batches
from keras_nanguard._core import finiteness
from keras_nanguard._core.data import argument_path, leaves
from keras_nanguard._core.incident import Incident
from keras_nanguard._core.plain_values import printable
from keras_nanguard._core.verdict import Report
from keras_nanguard._keras import arrays as keras_arrays, fitting as keras_fitting
from keras_nanguard._recording.recorder import Recorder
from keras_nanguard._recording.recording import BadSample

Array = np.ndarray[Any, Any]
Arrays = dict[tuple[str, str], Array]
"""The arrays of a batch by their role and path."""

Key = tuple[str, str]
"""Fingerprint of a row, and its name in the batch, `""` without names."""

MAX_SAMPLES = 4096
"""Maximum number of bad rows."""

MAX_ROWS = 64
"""Maximum number of rows of one batch that are checked."""

MAX_OTHERS, MAX_BYTES = 256, 16 << 20
"""Known bad rows are searched for only in batches of at most this many rows and bytes."""

MAX_STEPS = 16
"""Maximum number of steps that are stored with a bad row: the first ones and the last one."""

LISTED = 5
"""Number of bad rows in a line."""

MAX_SECONDS = 30.0
"""Time limit of all searches of one guard."""

MAX_COPIED = 1 << 28
"""Maximum size of an array that is copied because it is not a NumPy array in host memory."""

_CHUNK = 1 << 22
"""Numbers of the training data that are compared at a time, at least one of each row."""


class BadRows:
    """The bad rows of one guard, over all of its fits.

    Args:
        ids: the user's names of the rows: a sequence with one name for each row of `x`, or the key
            under which each batch has its names; `None` if the rows have no names.
    """

    def __init__(self, recorder: Recorder, ids: Sequence[Any] | str | None):
        self._recorder, self._ids = recorder, ids
        self._reported, self._seconds = 0, MAX_SECONDS

    def note(self, incident: Incident, report: Report | None) -> None:
        """Store the bad rows of an incident, and known bad ones in its batch. Never raises."""
        if report is None or report.batch is None:
            return
        with suppress(Exception):  # data without rows that can be compared; training continues
            self._note(incident, report.batch)

    @np.errstate(all="ignore")  # the rows are not finite
    def _note(self, incident: Incident, batch: Any) -> None:
        count, diagnosis = batches.row_count(batch), incident.diagnosis
        samples = diagnosis.samples if diagnosis is not None else ()
        blamed = [row for row in samples if row < count][:MAX_ROWS]
        known = self._known()
        if not blamed and not (known and incident.refused):
            return
        arrays = _row_arrays(batch, count)
        if not any(role == "inputs" for role, _ in arrays):
            return  # ragged tensors alone have no rows to compare
        name = self._ids if isinstance(self._ids, str) else None
        key = next((key for key in arrays if key[1].rpartition("/")[2] == name), None)
        names = None if key is None else arrays.pop(key)
        small = known and sum(array.nbytes for array in arrays.values()) <= MAX_BYTES
        keys = {
            row: (_fingerprint(arrays, row), "" if names is None else _name(names[row]))
            for row in (*blamed, *range(min(count, MAX_OTHERS) if small else 0))
        }
        new = {keys[row]: row for row in reversed(blamed) if keys[row] not in known}
        for key, places in zip(new, self._places(arrays, [*new.values()]) if new else ()):
            known[key] = self._found(key, places, _why(arrays, new[key], incident))
        step = incident.step + self._recorder.base
        for key in dict.fromkeys(keys.values()):
            for sample in known.get(key, ()):
                if not sample.times or step not in sample.steps:  # else a replay of the same step
                    steps = (*sample.steps[: MAX_STEPS - 1], step)
                    self._recorder.sample(replace(sample, times=sample.times + 1, steps=steps))

    def _known(self) -> dict[Key, list[BadSample]]:
        """Return the bad rows so far by their keys. Rows with the same contents share a key."""
        known: dict[Key, list[BadSample]] = {}
        for sample in self._recorder.samples.values():
            name = sample.label if isinstance(self._ids, str) else ""
            known.setdefault((sample.fingerprint, name), []).append(sample)
        return known

    def _places(self, arrays: Arrays, rows: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the indices of rows of a batch in the arrays that `fit` trains on."""
        began, data = time.perf_counter(), keras_fitting.running_arrays()
        found = indices(arrays, rows, *data, self._seconds)
        self._seconds -= time.perf_counter() - began
        return found

    def _found(self, key: Key, places: tuple[int, ...], why: str) -> list[BadSample]:
        """Return a new bad row, once for each of its places in the training arrays."""
        mark, name = key
        room = max(MAX_SAMPLES - len(self._recorder.samples), 0)
        return [
            BadSample(name or self._label(mark, place), place, mark, 0, (), why)
            for place in (places or (None,))[:room]
        ]

    def _label(self, mark: str, place: int | None) -> str:
        if place is None:
            return f"row {mark[:12]}"
        if self._ids is None or isinstance(self._ids, str) or place >= len(self._ids):
            return f"x[{place}]"
        by_place = getattr(self._ids, "iloc", self._ids)  # a table of pandas has its own labels
        return _name(by_place[place])

    def line(self) -> str:
        """Return the line with all bad rows of this run, `""` if there is no new one since the last
        line.
        """
        known, first = self._recorder.samples.values(), self._recorder.earlier.steps or 0
        found = [sample for sample in known if max(sample.steps, default=0) >= first]
        if len(found) <= self._reported:
            return ""
        self._reported = len(found)
        more = ", ..." if len(found) > LISTED else ""
        labels = (" ".join(sample.label.splitlines()) for sample in found[:LISTED])
        listed = ", ".join(map(printable, labels)) + more
        rows = "row" if len(found) == 1 else "rows"
        return f"NanGuard: {len(found)} distinct bad {rows} so far: {listed}"


def _name(value: Any) -> str:
    if isinstance(value, (np.generic, np.ndarray)) and value.size == 1:
        value = value.item()
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _row_arrays(batch: Any, count: int) -> Arrays:
    """Return the arrays of a batch with one entry per row."""
    dense = (part for part in batches.parts(batch) if not keras_arrays.is_ragged(part.value))
    arrays = {(part.role, part.path): part.array for part in dense}
    return {key: array for key, array in arrays.items() if array.ndim and array.shape[0] == count}


def _fingerprint(arrays: Arrays, row: int) -> str:
    """Return the SHA-256 of the values of one row, including its targets. All NaN count as equal,
    and so do both zeros.
    """
    digest = hashlib.sha256()
    for (_, path), array in sorted(arrays.items(), key=lambda item: item[0]):
        digest.update(f"{path}:{array.dtype}:{array.shape[1:]};".encode())
        values = np.ascontiguousarray(finiteness.widen(array[row]))
        if values.dtype.kind == "f":
            values = np.where(np.isnan(values), values.dtype.type(np.nan), values + 0)
        digest.update(values.tobytes())
    return digest.hexdigest()


def _why(arrays: Arrays, row: int, incident: Incident) -> str:
    """Return the fault of a row, as a clause."""
    for (_, path), array in arrays.items():
        nan, inf, size = finiteness.counts(array[row])
        if nan or inf:
            named = ((nan, "NaN"), (inf, "Inf"))
            counts = " and ".join(f"{number} {name}" for number, name in named if number)
            return f"{counts} of {size} in {argument_path(path)}"
    cause = incident.diagnosis.cause if incident.diagnosis is not None else "unknown"
    sizes = {
        path: finiteness.largest(array[row])
        for (role, path), array in sorted(arrays.items(), key=lambda item: item[0])
        if role == "inputs"
    }
    if not sizes:
        return cause
    worst = max(sizes, key=lambda path: sizes[path])
    return f"{cause}; its largest magnitude in {argument_path(worst)} is {sizes[worst]:.3g}"


# The indices of rows in the data of `fit`


def indices(
    arrays: Mapping[tuple[str, str], Array],
    rows: Sequence[int],
    x: Any,
    y: Any,
    seconds: float,
) -> list[tuple[int, ...]]:
    """Return the indices of each of these rows of a batch in the training arrays.

    The entries that distinguish a row are compared first: at first one at a time, then more, as
    they leave fewer candidates.

    Args:
        arrays: those of the batch, by role and path.
        x, y: the data of `fit`; `None` if they are not arrays.
        seconds: the time limit.

    Returns:
        For each row the indices of all rows with the same inputs; if there are several, only of
        those with the same targets, if any. Empty if no row is equal, if the arrays are too large
        to be copied, or if the time limit is reached.
    """
    end, found = time.perf_counter() + seconds, []
    inputs, targets = dict(leaves("inputs", x)), dict(leaves("targets", y))
    paths = sorted(path for role, path in arrays if role == "inputs")
    if x is None or not paths or not {*paths} <= inputs.keys():
        return [()] * len(rows)
    whole = {path: _flat(inputs[path]) for path in paths}
    first = whole[paths[0]]
    for row in rows:
        places = np.arange(0 if first is None else len(first))
        for path in paths:
            places = _equal(whole[path], arrays["inputs", path][row], places, end)
        for (role, path), array in arrays.items():
            if len(places) > 1 and role == "targets" and path in targets:
                narrowed = _equal(_flat(targets[path]), array[row], places, end)
                places = narrowed if len(narrowed) else places
        found.append(tuple(int(place) for place in places))
    return found


def _flat(whole: Any) -> Array | None:
    """Return an array on the host as one row of numbers for each of its rows; `None` if it is too
    large to copy.
    """
    stays = isinstance(whole, np.ndarray) and (whole.ndim <= 2 or whole.flags.c_contiguous)
    shape = (int(size) for size in getattr(whole, "shape", ()) if size is not None)
    if not stays and math.prod(shape) > MAX_COPIED:
        return None
    found: Array = whole if isinstance(whole, np.ndarray) else keras_arrays.dense(whole)
    return found.reshape(len(found), -1) if found.size else found.reshape(len(found), 0)


def _equal(whole: Array | None, one: Array, rows: Array, end: float) -> Array:
    """Return the candidate rows of an array that equal this row; none after the time `end`."""
    flat = np.asarray(one).reshape(-1)
    if whole is None or whole.shape[1] != flat.size:
        return rows[:0]
    rows, order = rows[rows < len(whole)], _most_telling_first(flat)
    start, width = 0, 1
    while start < flat.size and len(rows):
        if time.perf_counter() > end:
            return rows[:0]
        columns = order[start : start + min(width, max(_CHUNK // len(rows), 1))]
        rows = rows[_same(whole[np.ix_(rows, columns)], flat[columns])]
        start, width = start + len(columns), 2 * width
    return rows


def _most_telling_first(flat: Array) -> Array:
    """Return the positions of the entries of a row: first those that distinguish it from others,
    which are not finite, or the largest.
    """
    size = np.abs(finiteness.widen(flat)) if flat.dtype.kind not in "bUSO" else flat != flat[:1]
    if size.dtype.kind == "f":
        size = np.where(np.isfinite(size), size, np.inf)
    return np.argsort(size, kind="stable")[::-1]


def _same(found: Array, wanted: Array) -> Array:
    """Return which rows equal the given one, in its dtype, with NaN equal to NaN."""
    cast = found.astype(wanted.dtype, copy=False)
    same = cast == wanted
    if wanted.dtype.kind in "fcV":
        same |= (cast != cast) & (wanted != wanted)
    return np.asarray(same.all(axis=1))
