"""The parts of a recording: the columns of its steps and of its bins, events, and bad samples.

Imports neither Keras nor a backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

FORMAT = 1
"""Version of the format of a recording. It increases if a reader of the old format would misread
the new one."""

COMMITTED, REFUSED, OVERFLOW, SKIPPED = range(4)
STATUSES = ("committed", "refused", "overflow", "skipped")
"""The result of a step, by its number in the column `status`. An `overflow` is a refused step that
dynamic loss scaling handles. A `skipped` batch was not trained on."""

MEASURED = ("loss", "gradient_norm", "learning_rate", "loss_scale")
"""Measurements of a step; NaN if unknown."""

STEP_COLUMNS: dict[str, type] = {
    "step": np.int64,
    "epoch": np.int64,
    "batch": np.int64,
    **dict.fromkeys(MEASURED, np.float64),
    "time": np.float64,
    "status": np.int8,
    "undone": np.bool_,
}
"""The columns of `Recording.steps`. Steps, epochs and batches count from 0; `time` is in seconds
since 1970."""

BIN_COLUMNS: dict[str, type] = {
    "first": np.int64,
    "last": np.int64,
    "count": np.int64,
    "refused": np.int64,
    "overflows": np.int64,
    "undone": np.int64,
    **{f"{name}_{end}": np.float64 for name in MEASURED for end in ("min", "max")},
    "loss_mean": np.float64,
    "time": np.float64,
}
"""The columns of `Recording.bins`. A row summarizes `count` consecutive steps, from `first` to
`last`."""

EVENT_KINDS = (
    *("begin", "epoch", "incident", "rollback", "learning_rate", "snapshot", "firewall"),
    *("resume", "end"),
)


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a run.

    Attributes:
        step: its step, from 0.
        epoch: its epoch, from 0.
        time: its time in seconds since 1970.
        kind: one of `EVENT_KINDS`.
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
        steps: the first of those steps, from 0.
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


def empty(columns: Mapping[str, type]) -> dict[str, np.ndarray[Any, Any]]:
    """Return columns without rows."""
    return {name: np.zeros(0, dtype) for name, dtype in columns.items()}
