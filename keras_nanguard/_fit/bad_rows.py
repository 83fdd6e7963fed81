"""Bad rows of the data, known by more than their place in a batch.

Where `fit` trains on arrays, a row of a batch is looked for in them by its own values, so that it does not matter who has shuffled.
Elsewhere it is known by a fingerprint: SHA-256 of its inputs. Nothing is done for a step that has no incident.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from keras_nanguard._backends.shared import batches
from keras_nanguard._core import finiteness
from keras_nanguard._core.data_names import argument_path
from keras_nanguard._core.incident import Incident
from keras_nanguard._core.verdict import Report
from keras_nanguard._fit.row_search import RowSearch
from keras_nanguard._keras import fitting as keras_fitting
from keras_nanguard._recording.recorder import Recorder
from keras_nanguard._recording.records import BadSample
from keras_nanguard._report import console

__all__ = ["BadRows"]

Array = np.ndarray[Any, Any]

MAX_SAMPLES = 4096
"""How many bad rows are remembered."""

MAX_ROWS = 64
"""How many rows of one batch are looked at."""

MAX_OTHERS, MAX_BYTES = 256, 16 << 20
"""Rows of a batch, and bytes of all of it, up to which known bad rows are looked for in it."""

MAX_STEPS = 16
"""Of how many steps the numbers are kept with a bad row."""

LISTED = 5
"""How many bad rows a line names."""


class BadRows:
    """The bad rows of one guard, over all of its fits.

    Args:
        recorder: keeps them.
        ids: the user's own names: one for each row of `x`, or the key of the batch that holds them.
    """

    def __init__(self, recorder: Recorder, ids: Sequence[Any] | str | None):
        self._recorder, self._ids = recorder, ids
        self._reported, self._search = 0, RowSearch()

    def note(self, incident: Incident, report: Report | None) -> None:
        """Note the rows that are to blame for an incident, and known bad ones in its batch. Never raises."""
        if report is None or report.batch is None:
            return
        try:
            self._note(incident, report.batch)
        except Exception:  # noqa: BLE001  data of a kind that has no rows to compare; training goes on
            return

    @np.errstate(all="ignore")  # what is looked at is not finite
    def _note(self, incident: Incident, batch: Any) -> None:
        count, diagnosis = batches.row_count(batch), incident.diagnosis
        known = self._recorder.samples
        blamed = [row for row in (diagnosis.samples if diagnosis is not None else ()) if row < count][:MAX_ROWS]
        if not blamed and not (known and incident.refused):
            return
        parts = {(part.role, part.path): part.array for part in batches.parts(batch) if not hasattr(part.value, "nested_row_splits")}
        arrays = {key: array for key, array in parts.items() if array.ndim and array.shape[0] == count}
        if not any(role == "inputs" for role, _ in arrays):
            return  # of ragged tensors: nothing that a row could be known by
        names = self._taken_out(arrays)
        small = known and sum(array.nbytes for array in arrays.values()) <= MAX_BYTES
        others = [row for row in range(min(count, MAX_OTHERS)) if row not in blamed] if small else []
        marks = {row: _fingerprint(arrays, row) for row in (*blamed, *others)}
        room = len(known) < MAX_SAMPLES
        fresh = {marks[row]: row for row in reversed(blamed) if room and marks[row] not in known}  # of two that are the same the first
        indices = self._indices(arrays, list(fresh.values()))
        for row, mark in marks.items():
            if mark in known or (mark in fresh and len(known) < MAX_SAMPLES):
                self._again(known.get(mark) or self._found(arrays, row, mark, names, indices[fresh[mark]], incident), incident)

    def _indices(self, arrays: Mapping[tuple[str, str], Array], rows: list[int]) -> dict[int, int | None]:
        """Return which rows of the arrays that `fit` trains on these are."""
        return dict(zip(rows, self._search.indices(arrays, rows, *keras_fitting.running_arrays()))) if rows else {}

    def _taken_out(self, arrays: dict[tuple[str, str], Array]) -> Array | None:
        """Take the array of names out of those of a batch, and return it."""
        key = next((key for key in arrays if isinstance(self._ids, str) and key[1].rpartition("/")[2] == self._ids), None)
        return None if key is None else arrays.pop(key)

    def _again(self, sample: BadSample, incident: Incident) -> None:
        step = incident.step + self._recorder.base
        if sample.times and step in sample.steps:  # the step was run again
            return
        steps = (*sample.steps, step)[:MAX_STEPS]
        self._recorder.sample(
            BadSample(sample.label, sample.index, sample.fingerprint, sample.times + 1, steps, sample.why),
        )

    def _found(
        self, arrays: Mapping[tuple[str, str], Array], row: int, mark: str, names: Array | None, index: int | None, incident: Incident
    ) -> BadSample:
        """Return a bad row that was not known before, which is this one of `x`."""
        label = f"row {mark[:12]}" if index is None else f"x[{index}]"
        if names is not None:
            label = _name(names[row])
        elif index is not None and self._ids is not None and not isinstance(self._ids, str) and index < len(self._ids):
            label = _name(self._ids[index])
        return BadSample(label, index, mark, 0, (), _why(arrays, row, incident))

    def line(self) -> str:
        """Return the line that says which bad rows there are, `""` where there is no new one since the last."""
        found = list(self._recorder.samples.values())
        if len(found) <= self._reported:
            return ""
        self._reported = len(found)
        listed = ", ".join(_shown(sample.label) for sample in found[:LISTED]) + (", ..." if len(found) > LISTED else "")
        return f"NanGuard: {len(found)} distinct bad {'row' if len(found) == 1 else 'rows'} so far: {listed}"


def _shown(label: str) -> str:
    """Return a name, which comes from the data, as it may stand in a line of a terminal."""
    return console.printable(" ".join(label.splitlines()))


def _name(value: Any) -> str:
    value = value.item() if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.size == 1) else value
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _inputs(arrays: Mapping[tuple[str, str], Array]) -> Iterator[tuple[str, Array]]:
    yield from ((path, array) for (role, path), array in sorted(arrays.items(), key=lambda item: item[0]) if role == "inputs")


def _fingerprint(arrays: Mapping[tuple[str, str], Array], row: int) -> str:
    """Return SHA-256 of the inputs of one row, each NaN as the same one."""
    digest = hashlib.sha256()
    for path, array in _inputs(arrays):
        digest.update(f"{path}:{array.dtype}:{array.shape[1:]};".encode())
        digest.update(_plain(array[row]).tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> Array:
    """Return numbers whose bytes are the same where they are: one NaN, one zero."""
    array = np.ascontiguousarray(finiteness.widen(np.asarray(value)))
    if array.dtype.kind != "f":
        return array
    return np.where(np.isnan(array), np.array(np.nan, array.dtype), array + np.array(0.0, array.dtype))


def _why(arrays: Mapping[tuple[str, str], Array], row: int, incident: Incident) -> str:
    """Return what is wrong with a row, as a clause."""
    for (_, path), array in arrays.items():
        nan, inf, size = finiteness.counts(np.asarray(array[row]))
        if nan or inf:
            counts = " and ".join(f"{number} {name}" for number, name in ((nan, "NaN"), (inf, "Inf")) if number)
            return f"{counts} of {size} in {argument_path(path)}"
    cause = incident.diagnosis.cause if incident.diagnosis is not None else "unknown"
    largest = {path: finiteness.largest(np.asarray(array[row])) for path, array in _inputs(arrays)}
    worst = max(largest, key=lambda path: largest[path], default="")
    return f"{cause}; its largest magnitude in {argument_path(worst)} is {largest[worst]:.3g}" if worst else cause
