"""`Recording`: the measurements and events of a run, from memory or from its file.

The file may be damaged or malicious. Every value is checked here, so code that shows or continues a
recording needs no further checks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from keras_nanguard._core import plain_values
from keras_nanguard._core.errors import GuardError, NanGuardError, expected, require_one_of
from keras_nanguard._core.incident import Incident
from keras_nanguard._recording.database import (
    MEASURED,
    NAME,
    OVERFLOW,
    REFUSED,
    STEP_COLUMNS,
    Array,
    Row,
)
from keras_nanguard._recording.reading import opened, rows_of

MAX_WHOLE = 1 << 53
"""Largest step, epoch or row number; two of them can be added in 64 bits."""


class Totals(NamedTuple):
    """Numbers of steps of one or several fits.

    Attributes:
        steps: complete train steps, including refused ones; `None` if unknown.
        overflows: those of them that were ordinary float16 overflows, which are not incidents.
        run_again: further steps that were refused, undone by a rollback or a restart, and run
            again.
    """

    steps: int | None = 0
    refused: int = 0
    overflows: int = 0
    run_again: int = 0

    @property
    def replayed(self) -> str:
        """The further steps in words, after a comma; `""` without any."""
        again = plain_values.times(self.run_again, "skipped step")
        return f", {again} undone and run again" if self.run_again else ""


COUNTED = Totals._fields[1:]
"""Entries of `meta` with numbers of refused steps."""

_META: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("model", "backend", "policy", "status", "writer"), (str,)),
    **dict.fromkeys(("began", "written"), (int, float)),
    **dict.fromkeys(COUNTED, (int,)),
    **dict.fromkeys(("format", "epochs", "steps_per_epoch", "base", "since"), (int, type(None))),
    "versions": (dict,),
}
"""Types of the known entries of `meta`."""


EventKind = Literal[
    "begin",
    "epoch",
    "incident",
    "rollback",
    "learning_rate",
    "snapshot",
    "firewall",
    "resume",
    "end",
]
"""What happened."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a run.

    Attributes:
        step: its step, from 0.
        epoch: its epoch, from 0.
        time: its time in seconds since 1970.
        kind: an `EventKind`.
        text: a sentence that describes it.
        data: details as plain JSON values; for an incident `Incident.to_dict()`.
    """

    step: int
    epoch: int
    time: float
    kind: str
    text: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BadSample:
    """A row of the data that caused at least one bad step.

    Attributes:
        label: its name: `x[217]`, the user's own name, or the beginning of its fingerprint.
        index: its index in the `x` of `fit`, or `None` if unknown.
        fingerprint: SHA-256 of its values, in hexadecimal.
        times: number of bad steps in which a row with these values was found.
        steps: the first of those steps and the last one, from 0.
        reason: a few words: `1 NaN of 8 in x`.
    """

    label: str
    index: int | None
    fingerprint: str
    times: int
    steps: tuple[int, ...]
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "steps": list(self.steps)}


def no_steps() -> dict[str, Array]:
    """Return the columns of `Recording.steps` without rows."""
    return {name: np.zeros(0, dtype) for name, dtype in STEP_COLUMNS.items()}


@dataclass(frozen=True)
class Recording:
    """The measurements and events of a run, as a copy that does not change during the run.

    Steps, epochs and batches count from 0.

    Attributes:
        meta: facts about the run: `format`, `model`, `backend`, `versions`, `policy` (as text),
            `began` and `written` (seconds since 1970), `status` (`"running"`, `"finished"`,
            `"failed"`), `epochs`, `steps_per_epoch`, and the numbers of `refused` steps, of
            `overflows` among them, and of further ones that were undone and run again
            (`run_again`).
        steps: the steps in the order in which they ran, as one array for each of `step`, `epoch`,
            `batch`, `loss`, `gradient_norm`, `learning_rate`, `loss_scale`, `time`, `status`
            (0 committed, 1 refused, 2 overflow that the loss scale handles) and `undone`
            (by a rollback or a restart). A step that ran again has a second row with the same
            number. Above 32,768 rows every second committed step is removed, and every second step
            if most are refused, except among the last 8,192 rows.
        events: events in order of time.
        samples: bad rows of the data.
    """

    meta: Mapping[str, Any] = field(default_factory=dict)
    steps: Mapping[str, Array] = field(default_factory=no_steps)
    events: tuple[Event, ...] = ()
    samples: tuple[BadSample, ...] = ()

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Recording:
        """Read the recording from the directory of a run, during the run or later.

        Args:
            path: the `directory` of the guard, or the file `recording.sqlite` in it.

        Raises:
            GuardError: if the file is missing, is not a recording, is of a newer version, or is
                damaged or too large.
        """
        return read(Path(path, NAME) if os.path.isdir(path) else Path(path))[0]

    def __repr__(self) -> str:
        model, status = self.meta.get("model", ""), self.meta.get("status", "")
        counts = f"steps={len(self)}, events={len(self.events)}, samples={len(self.samples)}"
        return f"Recording({model!r}, status={status!r}, {counts})"

    def __len__(self) -> int:
        """Number of recorded steps, including undone ones."""
        return len(self.steps["step"])

    def series(self, name: str, points: int = 2000) -> tuple[Array, Array, Array]:
        """Return one measured column over all steps, for a plot.

        Args:
            name: one of `loss`, `gradient_norm`, `learning_rate`, `loss_scale`.
            points: maximum number of points.

        Returns:
            `(step, low, high)`: the first step of each point, in ascending order, and the smallest
            and largest finite value from there to the next point. Undone steps are included. Points
            without a finite value are omitted.

        Raises:
            GuardError: if there is no such column, or `points` is not at least 1.
        """
        require_one_of("name", name, MEASURED)
        if points < 1:
            remedy = "Pass a larger number."
            raise GuardError(expected("points to be at least 1", repr(points), remedy))
        step, values, _ = measured(self, name)
        if not len(step):
            return step, values, values
        first, group = thinned(step, points)
        low, high = np.full(len(first), np.inf), np.full(len(first), -np.inf)
        np.minimum.at(low, group, values)
        np.maximum.at(high, group, values)
        return first, low, high


def read(file: Path) -> tuple[Recording, dict[str, list[Row]]]:
    """Return the recording in a file, and the rows of its other tables, of which `reading.rows_of`
    says which are left out.

    Raises:
        GuardError: if the file is not a recording, or cannot be read.
    """
    with opened(file) as connection:
        rows = rows_of(connection, file)
        return from_rows(_steps(rows.pop("steps")), rows), rows


def from_rows(steps: Mapping[str, Array], rows: Mapping[str, Iterable[Row]]) -> Recording:
    """Return the recording with these steps, and these rows of each other table.

    Raises:
        ValueError, TypeError, OverflowError: if the rows hold anything else.
    """
    return Recording(
        meta=_meta({str(key): plain_values.loads(value) for key, value in rows["meta"]}),
        steps=steps,
        events=tuple(_event(*row) for row in rows["events"]),
        samples=tuple(_sample(*row) for row in rows["samples"]),
    )


def _steps(rows: Sequence[Row]) -> dict[str, Array]:
    """Return the rows of `steps` as columns."""
    values = [*zip(*rows)][1:] if rows else [()] * len(STEP_COLUMNS)
    columns = zip(STEP_COLUMNS.items(), values)
    return {name: _column(column, dtype) for (name, dtype), column in columns}


def _column(values: Sequence[Any], dtype: type) -> Any:
    if np.dtype(dtype).kind == "f":
        return np.array(values, dtype)  # of NULL it makes NaN
    found = np.array(values, np.int64)
    for end in (found.min(initial=0), found.max(initial=0)):
        _whole(end)
    return found.astype(dtype)


def _whole(value: Any) -> int:
    found = int(value)
    if not -MAX_WHOLE <= found <= MAX_WHOLE:
        raise ValueError("a step number is out of range")
    return found


def _meta(found: dict[str, Any]) -> dict[str, Any]:
    for key, kinds in _META.items():
        value = found.get(key)
        if key in found and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise ValueError(f"its {key} is a {type(value).__name__}")
        if isinstance(value, (int, float)) and not abs(value) <= MAX_WHOLE:
            raise ValueError(f"its {key} is {value}")
    found.pop("writer", None)
    return found


def _event(_: int, step: Any, epoch: Any, moment: Any, kind: Any, text: Any, data: Any) -> Event:
    details = plain_values.loads(data)
    if not isinstance(details, dict):
        raise ValueError("the data of an event is not an object")
    return Event(_whole(step), _whole(epoch), float(moment), str(kind), str(text), details)


def _sample(
    _: int, fingerprint: Any, label: Any, index: Any, times: Any, steps: Any, reason: Any
) -> BadSample:
    index = None if index is None else _whole(index)
    listed = tuple(_whole(step) for step in plain_values.loads(steps))
    return BadSample(str(label), index, str(fingerprint), _whole(times), listed, str(reason))


def measured(recording: Recording, name: str) -> tuple[Array, Array, Array]:
    """Return the steps with a finite value of a measured column, the values, and whether a rollback
    has undone the step."""
    steps = recording.steps
    finite = np.isfinite(steps[name])
    return steps["step"][finite], steps[name][finite], _undone(steps)[finite]


def _undone(steps: Mapping[str, Any]) -> Any:
    """Return which steps were undone. A refused step also counts as undone if the step before it
    was undone: its values belong to the abandoned run."""
    refused = np.isin(steps["status"], (REFUSED, OVERFLOW))
    before = np.maximum.accumulate(np.where(refused, -1, np.arange(len(refused))))
    return steps["undone"] | (refused & (before >= 0) & steps["undone"][before])


def thinned(step: Array, points: int) -> tuple[Array, Array]:
    """Return the first steps of at most `points` groups of neighbours, in ascending order, and the
    group of each step."""
    width = max(-(-(int(step.max()) - int(step.min()) + 1) // points), 1)
    groups, place = np.unique((step - step.min()) // width, return_inverse=True)
    first = np.full(len(groups), np.iinfo(np.int64).max)
    np.minimum.at(first, place, step)
    return first, place


def incidents(recording: Recording, strict: bool = True) -> list[tuple[Incident, int]]:
    """Return each incident of a recording, with its step counted across all fits.

    Args:
        strict: whether a damaged incident is an error; otherwise it is omitted.

    Raises:
        FileFormatError: if one is damaged, or of a newer version.
    """
    found = []
    for event in recording.events:
        if event.kind == "incident":
            try:
                found.append((Incident.from_dict(event.data), event.step))
            except NanGuardError:
                if strict:
                    raise
    return found
