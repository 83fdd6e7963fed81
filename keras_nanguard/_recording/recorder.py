"""Records a run: one append per step, and everything else about once a second.

The recording is in memory, of limited size. With a directory, another thread writes what is new to
`recording.sqlite`.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_nanguard._core.errors import GuardError
from keras_nanguard._core.verdict import gradient_norm
from keras_nanguard._recording.database import (
    COMMITTED,
    FORMAT,
    OVERFLOW,
    REFUSED,
    STEP_COLUMNS,
)
from keras_nanguard._recording.memory import Memory, as_json, as_text
from keras_nanguard._recording.reading import writer_of
from keras_nanguard._recording.recording import (
    COUNTED,
    BadSample,
    EventKind,
    Recording,
    Totals,
    from_rows,
    read,
)
from keras_nanguard._recording.writer import Writer, unwritten

INTERVAL = 1.0
"""Seconds between two writes of new steps to the memory and the file."""

MAX_PENDING = 4096
"""Maximum number of steps that wait for a write."""

MAX_PLACES = 4096
"""Number of places, the newest ones, in which the epoch of a step is looked up."""

RATE_INTERVAL = 1.0
"""Seconds between two readings of the learning rate."""

_KEPT_META = ("began", "base", "since")
"""Entries of `meta` that are kept from an earlier process."""


class Rates:
    """The readings of the learning rate in a fit. Steps are known by their `id`.

    All steps between two equal readings had that rate; between two others it is unknown. From the
    start of an epoch to its first reading the rate does not change.

    Attributes:
        last: the rate of the last reading in this fit, if there is one.
        due: when it is time for the next reading.
    """

    def __init__(self) -> None:
        self.due = 0.0
        self.last: float | None = None
        self._last_step = 0
        self._epoch: int | None = None  # its first step, if it has no reading yet

    def begin_fit(self, step: int) -> None:
        """Begin a fit with this step, and with it an epoch that has no reading yet."""
        self.last = None
        self._epoch = None if self._epoch is None else step

    def begin_epoch(self, step: int) -> None:
        """Begin an epoch with this step."""
        self._epoch = step

    def read(
        self, rate: float, step: int, now: float, ahead: bool = False
    ) -> list[tuple[float, int, int]]:
        """Take the reading of a step, and return the rates that it tells, each with the first step
        that has it and the first one after those.

        Args:
            ahead: whether the step has not run yet, so that its rate says nothing of earlier ones.
        """
        found: list[tuple[float, int, int]] = []
        if self._epoch is not None and not ahead:
            found.append((rate, self._epoch, step))
        if self.last is not None:  # that step may have been ahead
            end = step if self.last == rate else self._last_step + 1
            found.append((self.last, self._last_step, end))
        self.last, self._last_step, self._epoch = rate, step, None
        self.due = now + RATE_INTERVAL
        return [*found, (rate, step, step + 1)]


class _Fit(NamedTuple):
    """The current fit."""

    base: int = 0  # its first step, counted across all fits
    since: int = 0  # the first step of its run, which may consist of several resumed fits
    scaled: bool = False  # whether its loss scale is recorded


class Recorder:
    """The recording of all fits of one guard, during the run. Steps are counted across fits.

    No method that records raises: an error ends the writing of the file, not training.

    Attributes:
        samples: the bad samples so far, by fingerprint and label: rows with the same contents
            share a fingerprint.
        earlier: the numbers of steps in the file of runs that this one does not resume.
    """

    def __init__(self, now: Callable[[], float] = time.time):
        self._now = now
        self._pending: deque[tuple[int, float, float, float, float, int]] = deque()
        self._due = 0.0  # time of the next write
        self._memory = Memory()
        self._counts = Counter(dict.fromkeys(COUNTED, 0))
        self.samples: dict[tuple[str, str], BadSample] = {}
        self.earlier = Totals()
        self._fit, self._running = _Fit(), False
        self._places: deque[tuple[int, int, int]] = deque([(0, 0, 0)], maxlen=MAX_PLACES)
        self._rates = Rates()
        self._writer: Writer | None = None  # of the open file
        self._owners = set[str]()  # it has written or continued a file of each of these runs
        self._problem = self._told = ""
        self._lock = threading.RLock()  # also for the rates and the file
        self.note(format=FORMAT, status="running")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle: everything recorded. Its file is not open."""
        with self._lock:
            self._fold()
            own = {"_lock": None, "_now": None, "_writer": None, "_memory": deepcopy(self._memory)}
            return {**vars(self), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_lock": threading.RLock(), "_now": time.time}
        self._memory.rewrite()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Return a context that changes the recording, which then has all steps so far."""
        with self._lock:
            with self._without_error():
                self._fold()
            with self._without_error():
                yield

    @contextmanager
    def _without_error(self) -> Iterator[None]:
        """Return a context in which an error, such as no memory, only ends the writing."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  training does not need the recording
            if self._writer is None:
                self._problem = unwritten(error)
            else:
                self._writer.fail(error)

    # Steps

    def push(
        self, step: int, loss: float, squares: float, scale: float, status: int = COMMITTED
    ) -> None:
        """Record one step. This runs in every step.

        Args:
            squares: half the sum of squares of its gradients, with the loss scale.
        """
        now = self._now()
        self._pending.append((step, loss, squares, scale, now, status))
        if now >= self._due or len(self._pending) >= MAX_PENDING:
            self._work(now)

    def place(self, step: int, epoch: int, start: int) -> None:
        """Note that steps from this one on belong to an epoch that began with step `start`."""
        with self._changing():
            self._places.append((step, epoch, start))
            self._rates.begin_epoch(self._memory.end)

    @property
    def wants_rate(self) -> bool:
        """Whether it is time to read the learning rate again."""
        return self._now() >= self._rates.due

    def rate(self, rate: float, ahead: bool = False) -> float | None:
        """Record the learning rate of the last step, or of the next one (`ahead`).

        Returns the last rate that was recorded in this fit, if it differs.
        """
        rate, before = float(rate), self._rates.last
        with self._changing():
            step = self._memory.end - (not ahead)
            for known in self._rates.read(rate, step, self._now(), ahead):
                self._memory.fill_rate(*known)
        same = before == rate or (before != before and rate != rate)  # both may be NaN
        return None if same else before

    def undo(self, step: int, again: Collection[int] = ()) -> None:
        """Mark the committed steps from this one on as undone.

        Args:
            again: the steps that run again; refused ones among them are marked, too.
        """
        with self._changing():
            lost = self._memory.undo(self.base, step, again)
            overflows, count = int((lost == OVERFLOW).sum()), len(lost)
            self._counts.update(run_again=count, refused=-count, overflows=-overflows)

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
            path: the file to write to; `None` for none.
            resumed: the step of the snapshot that it resumes from, in the fit that took it.
        """
        with self._changing():
            self._running, is_first = True, not self._memory.end
            if path is not None:
                self._open(path)
            base = since = recorded = self._steps
            if is_first and resumed is None:
                self.earlier = Totals(recorded, **self._counts)
            if resumed is not None:
                base, since = min(self.base + resumed, recorded), self._fit.since
            self._fit = _Fit(base, since, scaled)
            self._places = deque([(0, epoch, 0)], maxlen=MAX_PLACES)
            self._rates.begin_fit(self._memory.end)
            if resumed is not None:
                self.undo(0, again=range(recorded - base))
            if "began" not in self._memory.rows["meta"]:
                self.note(began=self._now())
            self.note(**meta, base=base, since=since, format=FORMAT, status="running")
            kind: EventKind = "begin" if resumed is None else "resume"
            self.event(kind, 0, epoch, data={"base": base})
            self._write()

    def _open(self, path: Path) -> None:
        """Begin to write to a file, after what an earlier process has recorded there, if nothing is
        recorded yet. It must not belong to another run.
        """
        with self._without_error():
            there = path.exists() and path.stat().st_size > 0
            problem, self._problem = self._problem, ""
            if there and not self._memory.end:
                self._continue(path)
                self._owners.add(writer_of(path))
            elif there and writer_of(path) not in self._owners:
                raise GuardError(f"{path} is in use by another run; use one directory per run")
            if problem or not there:
                self._memory.rewrite()
            self._writer = Writer(path, self.end_with_process)
            self._owners.add(self._writer.name)

    def _continue(self, path: Path) -> None:
        """Continue what an earlier process has recorded in a file, with the facts about this one.

        Raises:
            GuardError: if the file is not a recording, or cannot be read.
            MemoryError: if it is too large.
        """
        earlier, rows = read(path)
        memory = Memory()
        memory.add_steps(earlier.steps)
        for row in rows["events"]:
            memory.put("events", row)
        for place, (_, *sample) in enumerate(rows["samples"]):  # ids in a file can be anything
            memory.put("samples", (place, *sample))
        kept = [row for row in rows["meta"] if row[0] in _KEPT_META]
        for row in (*self._memory.rows["meta"].values(), *kept):
            memory.put("meta", row)
        self._memory = memory
        base, since = (earlier.meta.get(name) or 0 for name in ("base", "since"))
        self._fit = self._fit._replace(base=base, since=since)
        self._counts = Counter({name: earlier.meta.get(name, 0) for name in COUNTED})
        self.samples = {(sample.fingerprint, sample.label): sample for sample in earlier.samples}

    def note(self, **meta: Any) -> None:
        """Record facts about the run as a whole; see `Recording.meta`."""
        with self._changing():
            for key, value in meta.items():
                self._memory.put("meta", (key, as_json(value)))

    def event(
        self, kind: EventKind, step: int, epoch: int, text: str = "", data: Any = None
    ) -> None:
        """Record an event at a step of the current fit."""
        with self._changing():
            at = (int(step) + self.base, int(epoch), self._now())
            self._memory.add_event((*at, kind, as_text(text), as_json(data or {})))

    def sample(self, sample: BadSample) -> None:
        """Record a bad sample, or that it has occurred again."""
        with self._changing():
            key = (sample.fingerprint, sample.label)
            self.samples[key] = sample
            index = None if sample.index is None else int(sample.index)
            row = (list(self.samples).index(key), sample.fingerprint, as_text(sample.label), index)
            steps, reason = as_json(list(sample.steps)), as_text(sample.reason)
            self._memory.put("samples", (*row, int(sample.times), steps, reason))

    def end(self, status: str, step: int, epoch: int) -> None:
        """End a fit: write the remaining data, and close the file."""
        with self._changing():
            if not self._running:
                return
            self._running = False
            self.note(status=status)
            self.event("end", step, epoch, data={"status": status})
            self._write()
        if self._writer is not None:
            self._writer.close()
            self._problem, self._writer = self._writer.problem, None

    def end_with_process(self) -> None:
        """End the steps without a fit when the process exits: failed if by an exception."""
        with self._changing():
            status = "failed" if hasattr(sys, "last_value") else "finished"
            self.end(status, max(self._steps - self.base, 0), self._places[-1][1])

    def problem(self) -> str:
        """Return once which file is not written, and why; `""` if all files are written."""
        found = self._problem if self._writer is None else self._writer.problem
        if found == self._told:
            return ""
        self._told = found or self._told
        return found

    # Results

    def epoch_means(self, epoch: int) -> tuple[float, float]:
        """Return mean gradient norm of the committed steps of an epoch, and its last loss scale.

        The mean is NaN without such steps, and the loss scale is 1 if there is none. In a very long
        epoch, only the steps that are kept count.
        """
        mean, scale = math.nan, 1.0
        with self._changing():
            steps = self._memory.steps
            steps = steps[(steps["epoch"] == epoch) & (steps["step"] >= self._fit.since)]
            good = (steps["status"] == COMMITTED) & ~steps["undone"]
            norms = steps["gradient_norm"][good & np.isfinite(steps["gradient_norm"])]
            scales = steps["loss_scale"][~np.isnan(steps["loss_scale"])]
            mean = float(norms.mean()) if len(norms) else mean
            scale = float(scales[-1]) if len(scales) else scale
        return mean, scale

    @property
    def base(self) -> int:
        """The first step of the current fit, counted across all fits."""
        return self._fit.base

    @property
    def recording(self) -> Recording:
        """A copy of the recording so far."""
        with self._lock:
            self._fold()
            self.note(written=self._now(), **self._counts)
            steps = {name: self._memory.steps[name].copy() for name in STEP_COLUMNS}
            return from_rows(steps, {n: rows.values() for n, rows in self._memory.rows.items()})

    @property
    def _steps(self) -> int:
        """The number of steps of all fits so far that have been recorded."""
        return int(self._memory.steps["step"].max(initial=-1)) + 1

    def _work(self, now: float) -> None:
        """Do what is done about once a second."""
        self._due = now + INTERVAL
        with self._changing():
            self._write(always=False)

    def _write(self, always: bool = True) -> None:
        """Have everything new written to the file, if it is open.

        Args:
            always: whether to write also if the file still writes the last changes.
        """
        writer = self._writer
        if writer is not None and (always or writer.ready):
            self.note(written=self._now(), **self._counts)
            writer.put(self._memory.unwritten())

    @np.errstate(all="ignore")
    def _fold(self) -> None:
        """Put the pending steps into the memory."""
        if not (count := len(self._pending)):
            return
        pending = np.array([self._pending.popleft() for _ in range(count)], np.float64)
        step, loss, squares, scale, moment, status = pending.T
        steps, places = step.astype(np.int64), np.array(self._places, np.int64)
        _, epoch, start = places[np.searchsorted(places[:, 0], steps, "right") - 1].T
        norms = list(map(gradient_norm, squares.tolist(), scale.tolist()))
        unknown = np.full(count, np.nan)
        self._memory.add_steps(
            {
                "step": steps + self.base,
                "epoch": epoch,
                "batch": np.maximum(steps - start, 0),
                "loss": loss,
                "gradient_norm": np.array(norms),
                "learning_rate": unknown,
                "loss_scale": scale if self._fit.scaled else unknown,
                "time": moment,
                "status": status,
                "undone": np.zeros(count),
            }
        )
        results = Counter(status.astype(int).tolist())
        refused = results[REFUSED] + results[OVERFLOW]
        self._counts.update(refused=refused, overflows=results[OVERFLOW])
