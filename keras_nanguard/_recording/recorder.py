"""Records a run: one append per step, and everything else about once a second.

The recording is an SQLite database in memory, of limited size. With a directory, every statement
that changes it is executed again on `recording.sqlite`, in another thread.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keras_nanguard._core.verdict import gradient_norm
from keras_nanguard._recording import database
from keras_nanguard._recording.database import (
    COMMITTED,
    FORMAT,
    MEASURED,
    REMOVED,
    SKIPPED,
    Memory,
    as_json,
    as_text,
    insert,
    rows_of,
)
from keras_nanguard._recording.recording import BadSample, EventKind, Recording, from_rows, read
from keras_nanguard._recording.writer import RecordingFile, is_nonempty

INTERVAL = 1.0
"""Seconds between two writes of new steps to the database and the file."""

MAX_PENDING = 4096
"""Maximum number of steps that wait for a write."""

MAX_PLACES = 4096

_KEPT_META = ("began", "base", "since", *REMOVED)
"""Entries of `meta` that are kept from an earlier process."""


class RateColumn:
    """Derives the learning rates of the recorded steps from occasional readings.

    Attributes:
        due: the time of the next reading, in seconds since 1970.
    """

    def __init__(self) -> None:
        self.due = 0.0
        self._last: tuple[int, float] | None = None
        self._epoch: int | None = None

    def begin_fit(self, end: int) -> None:
        """Forget the reading of the last fit. The next step will have the `id` `end`."""
        self._last = None
        if self._epoch is not None:
            self._epoch = end

    def begin_epoch(self, end: int) -> None:
        """Note that the next step, which will have the `id` `end`, begins an epoch."""
        self._epoch = end

    def read(
        self, rate: float, at: int, ahead: bool
    ) -> tuple[list[tuple[float, int, int]], float | None]:
        """Take a reading, and return the ranges that are now known, and the last reading if it
        differs.

        If two successive readings are equal, all steps in between had that rate; else it is
        unknown. Between the start of an epoch and its first reading, the rate does not change.

        Args:
            rate: the learning rate.
            at: the `id` of the step that uses it.
            ahead: whether this is the next step.

        Returns:
            `(rate, first, end)` for each range of `id`; later ranges replace earlier ones.
        """
        last, known = self._last, [(rate, at, at + 1)]
        if last is not None:
            known.insert(0, (last[1], last[0], at if last[1] == rate else last[0] + 1))
        if not ahead and self._epoch is not None:
            known.insert(0, (rate, self._epoch, at))
        self._epoch, self._last = None, (at, rate)
        return known, last[1] if last is not None and last[1] != rate else None


def first_of_fit(recorded: int, base: int, resumed: int | None) -> int:
    """Return the first step of a new fit, counted across all fits.

    Args:
        recorded: number of steps of all fits so far.
        base: the first step of the last fit.
        resumed: the step of the snapshot that the new fit resumes from, in the fit that took it.
    """
    return recorded if resumed is None else min(base + resumed, recorded)


@dataclass(frozen=True)
class Beginning:
    """What a fit continues: the recording of earlier fits.

    Attributes:
        memory: the recording.
        base: the first step of its last fit.
        since: the first step of its last run, which may consist of several resumed fits.
        samples: its bad samples, as in `Recorder`.
    """

    memory: Memory
    base: int
    since: int
    samples: dict[tuple[str, str], BadSample]

    @classmethod
    def of_file(cls, path: Path, memory: Memory) -> Beginning:
        """Return the recording of an earlier process in a file, with the facts that `memory` has
        about the current one.

        Raises:
            GuardError: if the file is not a recording, or cannot be read.
            MemoryError: if it is too large.
        """
        earlier, rows = read(path)
        kept = [row for row in rows["meta"] if row[0] in _KEPT_META]
        meta = [*rows_of(memory.connection)["meta"], *kept]
        base, since = (earlier.meta.get(name) or 0 for name in ("base", "since"))
        samples = {(sample.fingerprint, sample.label): sample for sample in earlier.samples}
        return cls(Memory({**rows, "meta": meta}), base, since, samples)


class Recorder:
    """The recording of all fits of one guard, during the run. Steps are counted across fits.

    Attributes:
        base: the first step of the current fit, counted across all fits.
        samples: the bad samples so far, by fingerprint and label: rows with the same contents
            share a fingerprint.
    """

    def __init__(self, now: Callable[[], float] = time.time):
        self._now = now
        self._pending: deque[tuple[int, float, float, float, float, int]] = deque()
        self._memory = Memory()
        self.base = self._since = 0
        self._places: deque[tuple[int, int, int]] = deque([(0, 0, 0)], maxlen=MAX_PLACES)
        self.samples: dict[tuple[str, str], BadSample] = {}
        self._scaled = False
        self._rates, self._due = RateColumn(), 0.0
        self._file, self._reported = RecordingFile(), ""
        self._lock = threading.RLock()
        self._running = False
        self.note(format=FORMAT, status="running")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle: everything recorded. Its file is not open."""
        with self._lock:
            self._fold()
            rows = rows_of(self._memory.connection)
            return {**vars(self), "_lock": None, "_now": None, "_memory": rows}

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = {"_lock": threading.RLock(), "_now": time.time, "_memory": Memory(state["_memory"])}
        self.__dict__ |= {**state, **own}

    # Steps

    def push(
        self, step: int, loss: float, squares: float, scale: float, status: int = COMMITTED
    ) -> None:
        """Record one step. This runs in every step.

        Args:
            step: the step.
            loss: its loss.
            squares: half the sum of squares of its gradients, with the loss scale.
            scale: its loss scale.
            status: its result.
        """
        now = self._now()
        self._pending.append((step, loss, squares, scale, now, status))
        if now >= self._due or len(self._pending) >= MAX_PENDING:
            self._work(now)

    def skip(self, step: int, epoch: int, batch: int) -> None:
        """Record a batch before this step that is not trained on."""
        with self._lock:
            self._fold()
            measured = [None] * len(MEASURED)
            row = (step + self.base, epoch, batch, *measured, self._now(), SKIPPED, 0)
            self._memory.add_steps([row])

    def place(self, step: int, epoch: int, start: int) -> None:
        """Note that steps from this one on belong to an epoch that began with step `start`."""
        with self._lock:
            self._fold()
            self._places.append((step, epoch, start))
            self._rates.begin_epoch(self._memory.end)

    @property
    def wants_rate(self) -> bool:
        """Whether it is time to read the learning rate again."""
        return self._now() >= self._rates.due

    def rate(self, rate: float, ahead: bool = False) -> float | None:
        """Record the learning rate of the last step, or of the next one (`ahead`).

        Returns the previous rate if it differs.
        """
        with self._lock:
            self._fold()
            at = self._memory.end - (not ahead)
            known, before = self._rates.read(float(rate), at, ahead)
            self._memory.run(database.FILL_RATE, known)
            self._rates.due = self._now() + INTERVAL
            return before

    def undo(self, step: int, again: frozenset[int] | None = None) -> None:
        """Mark the committed steps from this one on as undone.

        Args:
            step: the step.
            again: the steps that are replayed; refused ones among them are marked, too.
        """
        with self._lock:
            self._fold()
            self._memory.run(database.UNDO_STEPS, [(step + self.base,)])
            replayed = [(number + self.base,) for number in again or ()]
            self._memory.run(database.UNDO_REFUSED, replayed)

    # Everything else

    def begin(
        self,
        meta: Mapping[str, Any],
        *,
        scaled: bool,
        path: Path | None,
        resumed: int | None = None,
        epoch: int = 0,
    ) -> None:
        """Begin a fit.

        Args:
            meta: facts about it; see `Recording.meta`.
            scaled: whether it scales its loss.
            path: the file to write to; `None` for none.
            resumed: the step of the snapshot that it resumes from, in the fit that took it.
            epoch: its first epoch.
        """
        with self._lock:
            self._fold()
            found = Beginning(self._memory, self.base, self._since, self.samples)
            if path is not None:
                found = self._open(path, found)
            self._memory, self._since, self.samples = found.memory, found.since, found.samples
            self.base = first_of_fit(self._steps, found.base, resumed)
            self._rates.begin_fit(self._memory.end)
            self._scaled, self._running = scaled, True
            self._places = deque([(0, epoch, 0)], maxlen=MAX_PLACES)
            kind: EventKind = "begin"
            if resumed is None:
                self._since = self.base
            else:
                kind = "resume"
                self.undo(0)
            began = "INSERT OR IGNORE INTO meta VALUES ('began', ?)"
            self._memory.run(began, [(as_json(self._now()),)])
            self.note(**meta, base=self.base, since=self._since, format=FORMAT, status="running")
            self.event(kind, 0, epoch, data={"base": self.base})
            self._write()

    def _open(self, path: Path, found: Beginning) -> Beginning:
        """Begin to write to a file. Return what the fit continues: what an earlier process has
        recorded there, if nothing is recorded yet. An error ends the writing, not training.
        """
        try:
            if not found.memory.end and is_nonempty(path):
                found = Beginning.of_file(path, found.memory)
                self._file.take_over(path)
            self._file.open(path, found.memory, self.end_with_process)
        except Exception as error:  # noqa: BLE001  such as no memory
            self._file.give_up(error)
        return found

    def note(self, **meta: Any) -> None:
        """Record facts about the run as a whole; see `Recording.meta`."""
        with self._lock:
            rows = [(key, as_json(value)) for key, value in meta.items()]
            self._memory.run(insert("meta"), rows)

    def event(
        self, kind: EventKind, step: int, epoch: int, text: str = "", data: Any = None
    ) -> None:
        """Record an event at a step of the current fit."""
        details = as_json(data or {})
        with self._lock:
            at = (int(step) + self.base, int(epoch), self._now())
            self._memory.add_event((*at, kind, as_text(text), details))

    def layers(self, step: int, variables: Sequence[tuple[str, str]], values: Any) -> None:
        """Record the measurements of the layers after a step.

        Args:
            step: the step.
            variables: path and kind (`trainable` or `statistics`) of each variable.
            values: array of shape `(variables, 2)`.
        """
        at, numbers = int(step), np.asarray(values, np.float32).tolist()
        with self._lock:
            at += self.base
            rows = [(None, at, as_text(p), k, *v) for (p, k), v in zip(variables, numbers)]
            self._memory.add_layers(rows)

    def sample(self, sample: BadSample) -> None:
        """Record a bad sample, or that it has occurred again."""
        with self._lock:
            key = (sample.fingerprint, sample.label)
            self.samples[key] = sample
            index = None if sample.index is None else int(sample.index)
            row = (list(self.samples).index(key), sample.fingerprint, as_text(sample.label), index)
            steps, reason = as_json(list(sample.steps)), as_text(sample.reason)
            self._memory.run(insert("samples"), [(*row, int(sample.times), steps, reason)])

    def end(self, status: str, step: int, epoch: int) -> None:
        """End a fit: write the remaining data, and close the file."""
        with self._lock:
            if not self._running:
                return
            self._running = False
            self.note(status=status)
            self.event("end", step, epoch, data={"status": status})
            self._write()
        self._file.close()

    def end_with_process(self) -> None:
        """End the steps without a fit when the process exits: failed if by an exception."""
        with self._lock:
            self._fold()
            status = "failed" if hasattr(sys, "last_value") else "finished"
            self.end(status, max(self._steps - self.base, 0), self._places[-1][1])

    def problem(self) -> str:
        """Return once which file is not written, and why; `""` if all files are written."""
        found = self._file.problem
        if found == self._reported:
            return ""
        self._reported = found or self._reported
        return found

    # Results

    def epoch_means(self, epoch: int) -> tuple[float, float]:
        """Return mean gradient norm of the committed steps of an epoch, and its last loss scale.

        The mean is NaN without such steps, and the loss scale is 1 if there is none. In a very long
        epoch, only the steps that are kept count.
        """
        own, at = "FROM steps WHERE epoch = ? AND step >= ? AND", (epoch, self._since)
        good = f"status = {COMMITTED} AND NOT undone AND abs(gradient_norm) < 9e999"
        last = "loss_scale IS NOT NULL ORDER BY id DESC LIMIT 1"
        with self._lock:
            self._fold()
            mean = self._memory.one(f"SELECT avg(gradient_norm) {own} {good}", at)
            scale = self._memory.one(f"SELECT loss_scale {own} {last}", at)
        return math.nan if mean is None else mean, 1.0 if scale is None else scale

    @property
    def recording(self) -> Recording:
        """A copy of the recording so far."""
        with self._lock:
            self._fold()
            self.note(written=self._now())
            return from_rows(rows_of(self._memory.connection))

    @property
    def _steps(self) -> int:
        """The number of steps of all fits so far that have been recorded."""
        query = f"SELECT coalesce(max(step) + 1, 0) FROM steps WHERE status != {SKIPPED}"
        return int(self._memory.one(query))

    def _work(self, now: float) -> None:
        """Do what is done about once a second."""
        with self._lock:
            self._due = now + INTERVAL
            self._write(always=False)

    def _write(self, always: bool = True) -> None:
        """Put the pending steps into the database, and everything new into the file. An error ends
        the writing, not training.

        Args:
            always: whether to write also if the file still writes the last changes.
        """
        try:
            self._fold()
            if always or self._file.ready:
                self.note(written=self._now())
                self._file.write(self._memory)
        except Exception as error:  # noqa: BLE001  such as no memory
            self._file.give_up(error)

    @np.errstate(all="ignore")
    def _fold(self) -> None:
        """Put the pending steps into the database."""
        if not (count := len(self._pending)):
            return
        rows = np.array([self._pending.popleft() for _ in range(count)], np.float64)
        step, loss, squares, scale, moment, status = rows.T
        steps, places = step.astype(np.int64), np.array(self._places, np.int64)
        _, epoch, start = places[np.searchsorted(places[:, 0], steps, "right") - 1].T
        columns = (
            steps + self.base,
            epoch,
            np.maximum(steps - start, 0),
            loss,
            np.array(list(map(gradient_norm, squares.tolist(), scale.tolist()))),
            np.full(count, np.nan),  # the learning rate
            scale if self._scaled else np.full(count, np.nan),
            moment,
            status.astype(np.int64),
            np.zeros(count, np.int64),  # undone
        )
        self._memory.add_steps(list(zip(*(column.tolist() for column in columns))))
