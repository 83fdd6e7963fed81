"""What a recording is made of: the columns of its steps and of its bins, events, and bad samples.

Imports neither Keras nor a backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

__all__ = [
    "BIN_COLUMNS",
    "COMMITTED",
    "EVENT_KINDS",
    "FORMAT",
    "MEASURED",
    "OVERFLOW",
    "REFUSED",
    "SKIPPED",
    "STATUSES",
    "STEP_COLUMNS",
    "BadSample",
    "Event",
    "empty",
]

FORMAT = 1
"""Version of the form of a recording; incremented whenever a reader of the old form would misread the new one."""

COMMITTED, REFUSED, OVERFLOW, SKIPPED = range(4)
STATUSES = ("committed", "refused", "overflow", "skipped")
"""What became of a step, by its number in the column `status`. An overflow is a refusal that the loss scale settles by itself;
a batch that no step has trained on is skipped."""

MEASURED = ("loss", "gradient_norm", "learning_rate", "loss_scale")
"""What a step measures, NaN where it is not known."""

STEP_COLUMNS: dict[str, type] = {
    "step": np.int64,
    "epoch": np.int64,
    "batch": np.int64,
    **dict.fromkeys(MEASURED, np.float64),
    "time": np.float64,
    "status": np.int8,
    "undone": np.bool_,
}
"""The columns of `Recording.steps`. Steps, epochs and batches count from 0, `time` is in seconds since 1970."""

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
"""The columns of `Recording.bins`: each row stands for `count` steps that ran one after the other, from `first` to `last`."""

EVENT_KINDS = ("begin", "epoch", "incident", "rollback", "learning_rate", "snapshot", "firewall", "resume", "end")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a run.

    Attributes:
        step: the step at which it happened, from 0.
        epoch: the epoch, from 0.
        time: when, in seconds since 1970.
        kind: one of `EVENT_KINDS`.
        text: what happened, in one sentence.
        data: more about it, as plain JSON values: of an incident its `Incident.to_dict()`.
    """

    step: int
    epoch: int
    time: float
    kind: str
    text: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BadSample:
    """A row of the data that was to blame for at least one bad step.

    Attributes:
        label: what it is called: `x[217]`, the user's own name, or the beginning of its fingerprint.
        index: its place in the `x` that `fit` was given, `None` where that is not known.
        fingerprint: SHA-256 of its values, in hexadecimal.
        times: in how many bad steps a row with these contents was found.
        steps: the first of those steps, from 0.
        why: what is wrong with it, as a clause.
    """

    label: str
    index: int | None
    fingerprint: str
    times: int
    steps: tuple[int, ...]
    why: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "steps": list(self.steps)}


def empty(columns: Mapping[str, type]) -> dict[str, np.ndarray[Any, Any]]:
    """Return columns without rows."""
    return {name: np.zeros(0, dtype) for name, dtype in columns.items()}
