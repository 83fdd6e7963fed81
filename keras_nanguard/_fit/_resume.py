"""Going on in a new process from the snapshots that another one has left on disk."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_nanguard import _internals, _sealed, _state
from keras_nanguard._errors import FileFormatError, GuardError, expected
from keras_nanguard._fit._course import Course
from keras_nanguard._fit._snapshot_disk import COURSE, Record, build_optimizers, folder_of, load, read, variables_of, written

__all__ = ["Resumed", "find"]


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a run goes on.

    Attributes:
        path: the snapshot.
        record: what is written there.
        course: what the policy had changed.
        epoch: the epoch.
        batch: how many batches of it are through.
    """

    path: Path
    record: Record
    course: Course
    epoch: int
    batch: int

    def restore(self, session: Any) -> None:
        """Write the state into the model of a session that has not begun, and what the policy remembers.

        The metrics of an epoch that is half through go on; those of a new epoch begin anew.

        Raises:
            GuardError: if the model is another one, or is not built.
        """
        build_optimizers(session.anatomy(), self.record.optimizers)
        anatomy = session.anatomy()
        fresh = [(metric, _state.read(metric)) for metric in anatomy.metrics]
        try:
            drawn = load(session.model, variables_of(anatomy), anatomy.metrics, self.path, self.record)
        except FileFormatError as error:
            remedy = "Build the model as in the run before (call it on data once), or leave resume=True out."
            raise GuardError(expected("the model that the snapshot is of", error, remedy)) from error
        for metric, value in fresh if not self.batch else ():
            _state.write(metric, value)
        if drawn is not None:
            _internals.set_generator_state(drawn)
        self.course.apply(session, write=True)

    def sentence(self) -> str:
        """Return the line that is printed."""
        return f"NanGuard: goes on from {self.path}: epoch {self.epoch + 1}, after {self.batch} of its batches."


def find(directory: str | Path, steps: int | None = None) -> Resumed | None:
    """Return the newest verified snapshot that is whole; each broken one is passed over with a warning.

    Args:
        directory: the guard's directory.
        steps: batches of an epoch, where that is known.

    Returns:
        Where the run goes on; `None` where there is no snapshot at all.

    Raises:
        GuardError: if there are snapshots and none of them can be used.
    """
    folder = folder_of(directory)
    faults: list[str] = []
    for path in reversed(written(folder)):
        try:
            record = read(path)
            if not record.verified:
                continue
            course = _course(folder, record)
        except FileFormatError as error:
            faults.append(str(error))
            warnings.warn(f"NanGuard resumes from an older snapshot: {error}.", stacklevel=2)
            continue
        epoch, batch = record.epoch, record.batch
        while steps and batch >= steps:
            epoch, batch = epoch + 1, batch - steps
        return Resumed(path, record, course, epoch, batch)
    if faults:
        remedy = f"Start anew without resume=True, or after removing {folder}."
        raise GuardError(expected("a snapshot that can be used", "; ".join(faults), remedy))
    return None


def _course(folder: Path, record: Record) -> Course:
    """Return what the policy had changed last, or when the snapshot was taken where the newer file is broken."""
    try:
        return Course.from_dict(_sealed.read_json(folder / COURSE))
    except FileFormatError as error:
        warnings.warn(f"NanGuard resumes with what the policy knew at the snapshot: {error}.", stacklevel=3)
        return Course.from_dict(record.course)
