"""Collects the recording of a run: one append per step, everything else at intervals.

The last steps are exact, older ones are in bins, events are limited. A thread writes the file.
"""

from __future__ import annotations

import copy
import json
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from keras_nanguard._core.errors import GuardError
from keras_nanguard._core.incident import Incident
from keras_nanguard._recording import database
from keras_nanguard._recording.layer_table import LayerTable, by_path
from keras_nanguard._recording.recording import Recording
from keras_nanguard._recording.records import COMMITTED, FORMAT, SKIPPED, BadSample, Event
from keras_nanguard._recording.rows import Rows
from keras_nanguard._recording.writer import Writer

__all__ = ["Recorder"]

INTERVAL = 1.0
"""Seconds between two times at which new data are stored in arrays and in the file."""

MAX_PENDING = 4096
"""Maximum number of steps that wait for this."""

MAX_EVENTS, MAX_MINOR = 20_000, 2_000
"""Maximum number of events, and of epochs and snapshots among them."""

MAX_EARLIER, EVENT = 4 << 20, 450
"""Maximum bytes of all events of an earlier process, and bytes of one without its texts."""

MAX_PLACES = 4096

_MINOR = ("epoch", "snapshot")

Now = Callable[[], float]

Entry = tuple[int, Event, Incident | str | None]
"""Number of an event, the event, and the source of its data: the incident, or JSON."""


class Recorder:
    """The growing recording of all fits of one guard. Steps are counted through all fits.

    Attributes:
        base: the first step of the present fit, counted through all fits.
        factor: the last recorded factor of the guard on learning rates.
    """

    def __init__(self, now: Now = time.time):
        self._now, self.factor = now, 1.0
        self._pending: deque[tuple[int, float, float, float, float, int]] = deque()
        self._rows = Rows()
        self._places: deque[tuple[int, int, int]] = deque([(0, 0, 0)], maxlen=MAX_PLACES)
        self._major: deque[Entry] = deque(maxlen=MAX_EVENTS)
        self._minor: deque[Entry] = deque(maxlen=MAX_MINOR)
        self._events = self._written_events = self.base = 0
        self._layers = LayerTable()
        self._samples: dict[tuple[str, str], BadSample] = {}
        self._changed_samples: dict[tuple[str, str], BadSample] = {}
        self._meta: dict[str, Any] = {"format": FORMAT, "status": "running"}
        self._scaled = False
        self._known: tuple[int, float] | None = None
        self._boundary: int | None = None
        self._due = self._flush_due = self._rate_due = 0.0
        self._writer: Writer | None = None
        self._owners: set[str] = set()
        self._lock = threading.RLock()
        self._reported = ""
        self._loaded = self._running = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or pickle: the recording, without a file."""
        with self._lock:
            self._fold()
            return {**vars(self), "_writer": None, "_lock": None, "_now": None}

    def __copy__(self) -> Recorder:
        return copy.deepcopy(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_lock": threading.RLock(), "_now": time.time}

    # Steps

    def push(self, step: int, loss: float, squares: float, scale: float, status: int = COMMITTED) -> None:
        """Record a step: loss, half the sum of squares of its gradients, loss scale, status.

        This runs in every step.
        """
        now = self._now()
        self._pending.append((step, loss, squares, scale, now, status))
        if now >= self._due or len(self._pending) >= MAX_PENDING:
            self._work(now)

    def skip(self, step: int, epoch: int, batch: int) -> None:
        """Record a skipped batch before this step."""
        with self._lock:
            self._fold()
            row = {"step": step + self.base, "epoch": epoch, "batch": batch, "time": self._now(), "status": SKIPPED}
            self._rows.extend({name: np.array([value]) for name, value in row.items()})

    def place(self, step: int, epoch: int, start: int) -> None:
        """Store that steps from this one on belong to an epoch that began at the step `start`."""
        with self._lock:
            self._fold()
            self._places.append((step, epoch, start))
            self._boundary = self._rows.end

    @property
    def wants_rate(self) -> bool:
        """Whether the learning rate is due to be read."""
        return self._now() >= self._rate_due

    def rate(self, rate: float, ahead: bool = False) -> float | None:
        """Record the rate of the last step, or of the next (`ahead`); return a previous other
        one.

        If two readings are equal, all steps between them had this rate; otherwise it is unknown. A
        plain rate does not change before the first reading of an epoch.
        """
        with self._lock:
            self._fold()
            at, before = self._rows.end - (not ahead), self._known
            if not ahead and self._boundary is not None:
                self._rows.fill("learning_rate", rate, self._boundary, at)
            self._boundary = None
            if before is not None:
                self._rows.fill("learning_rate", before[1], before[0], at if before[1] == rate else before[0] + 1)
            self._rows.fill("learning_rate", rate, at, at + 1)
            self._known, self._rate_due = (at, rate), self._now() + INTERVAL
            return before[1] if before is not None and before[1] != rate else None

    def undo(self, step: int, again: frozenset[int] | None = None) -> None:
        """Mark the committed steps from this one on as undone, and replayed refused ones."""
        with self._lock:
            self._fold()
            self._rows.undo(step + self.base, None if again is None else frozenset(number + self.base for number in again))

    # What happens

    def begin(self, meta: Mapping[str, Any], *, scaled: bool, path: Path | None, resumed: int | None = None, epoch: int = 0) -> None:
        """Begin a fit.

        Args:
            meta: facts about the run; see `Recording.meta`.
            scaled: whether it scales its loss.
            path: the file, or `None`.
            resumed: the step of the snapshot to resume from.
            epoch: the first epoch.
        """
        with self._lock:
            self._fold()
            self._open(path)
            last = max(int(self._rows.steps()["step"].max(initial=-1)), int(self._rows.bins["last"].max(initial=-1))) + 1
            before, self.base, self._known = self.base, last, None
            if resumed is not None and self._rows.end:
                self.base = min(before + resumed, last)
                self._rows.undo(self.base)
            self._scaled, self._running = scaled, True
            self._places = deque([(0, epoch, 0)], maxlen=MAX_PLACES)
            began = self._meta.get("began", self._now())
            since = self.base if resumed is None else self._meta.get("since", 0)
            self._meta |= {**meta, "began": began, "status": "running", "base": self.base, "since": since}
            self.event("begin" if resumed is None else "resume", 0, epoch, data={"base": self.base, "epochs": self._meta.get("epochs")})
            if self._writer is not None:
                self._hand_over(self._writer)

    def note(self, **meta: Any) -> None:
        """Add facts about the run; see `Recording.meta`."""
        self._meta |= meta

    def event(self, kind: str, step: int, epoch: int, text: str = "", data: Any = None, incident: Incident | None = None) -> None:
        """Record an event at a step of the fit. Data of an incident are computed when read."""
        with self._lock:
            entry = Event(step + self.base, epoch, self._now(), kind, text, data or {})
            frequent = kind in _MINOR or entry.data.get("by") == "callback"
            (self._minor if frequent else self._major).append((self._events, entry, incident))
            self._events += 1

    @property
    def samples(self) -> Mapping[tuple[str, str], BadSample]:
        """The bad samples so far, by fingerprint and label. Equal rows share a fingerprint."""
        return self._samples

    def layers(self, step: int, variables: tuple[tuple[str, str], ...], values: Any) -> None:
        """Record a measurement of the layers after a step; see `LayerTable.add`."""
        with self._lock:
            self._layers.add(step + self.base, variables, values)

    def sample(self, sample: BadSample) -> None:
        """Add or update a bad sample."""
        with self._lock:
            key = (sample.fingerprint, sample.label)
            self._samples[key] = self._changed_samples[key] = sample

    def end(self, status: str, step: int, epoch: int) -> None:
        """End a fit: write the remaining data, and close the file."""
        with self._lock:
            if not self._running:
                return
            self._running = False
            self._meta["status"] = status
            self.event("end", step, epoch, data={"status": status})
            self._fold()
            writer, self._writer = self._writer, None
        if writer is not None:
            writer.ending = True
            writer.wait()
            if not writer.problem:
                self._hand_over(writer)
            writer.close()
            self._problem = writer.problem

    def end_with_process(self) -> None:
        """End a fit when its process exits, if it ended unnoticed between two steps."""
        with self._lock:
            self._fold()
            last = self._rows.steps()["step"].max(initial=self.base - 1)
            self.end("failed", max(int(last) + 1 - self.base, 0), self._places[-1][1])

    _problem = ""

    def problem(self) -> str:
        """Return once why the file is not written, or `""`."""
        found = self._problem or (self._writer.problem if self._writer is not None else "")
        if found == self._reported:
            return ""
        self._reported = found or self._reported
        return found

    # What is read

    def epoch_means(self, epoch: int) -> tuple[float, float]:
        """Return the mean gradient norm of an epoch, or NaN, and its last loss scale, or 1.

        Only exactly stored steps count.
        """
        with self._lock:
            self._fold()
            steps = self._rows.steps()
        own = (steps["epoch"] == epoch) & (steps["step"] >= self._meta.get("since", 0))
        norms = steps["gradient_norm"][own & (steps["status"] == COMMITTED) & ~steps["undone"]]
        norms, scales = norms[np.isfinite(norms)], steps["loss_scale"][own & np.isfinite(steps["loss_scale"])]
        return float(norms.mean()) if len(norms) else math.nan, float(scales[-1]) if len(scales) else 1.0

    @property
    def recording(self) -> Recording:
        """A copy of the recording so far."""
        with self._lock:
            self._fold()
            entries, layers = [*self._major, *self._minor], self._layers.rows()
            bins = {name: column.copy() for name, column in self._rows.bins.items()}
            meta = {**self._meta, "written": self._now()}
            steps, samples = self._rows.steps(), tuple(self._samples.values())
        events = tuple(_complete(event, source) for _, event, source in sorted(entries, key=lambda entry: entry[0]))
        return Recording(meta, steps, bins, events, by_path(layers), samples)

    def flush(self) -> bool:
        """Write all new data to the file and wait; return whether this succeeded."""
        if self._writer is None or not self._writer.wait():
            return False
        with self._lock:
            self._fold()
            self._writer.put(self._changes())
        return self._writer.wait()

    # Now and then

    def _work(self, now: float) -> None:
        """Store new data in arrays, and pass them to the writing thread."""
        with self._lock:
            self._due = now + INTERVAL
            self._fold()
            if self._writer is not None and now >= self._flush_due and self._writer.ready:
                self._flush_due = now + INTERVAL
                self._hand_over(self._writer)

    def _hand_over(self, writer: Writer) -> None:
        """Pass new data to the writing thread. An error ends the writing, not training."""
        try:
            writer.put(self._changes())
        except Exception as error:  # noqa: BLE001
            writer.problem = writer.problem or f"{type(error).__name__}: {error}"

    @np.errstate(all="ignore")
    def _fold(self) -> None:
        """Store pending steps in arrays."""
        if not (count := len(self._pending)):
            return
        rows = np.array([self._pending.popleft() for _ in range(count)], np.float64)
        step, loss, squares, scale, moment, status = rows.T
        steps, places = step.astype(np.int64), np.array(self._places, np.int64)
        _, epoch, start = places[np.searchsorted(places[:, 0], steps, "right") - 1].T
        self._rows.extend(
            {
                "step": steps + self.base,
                "epoch": epoch,
                "batch": np.maximum(steps - start, 0),
                "loss": loss,
                "gradient_norm": np.sqrt(2.0 * squares) / scale,
                "loss_scale": scale if self._scaled else np.full(count, np.nan),
                "time": moment,
                "status": status.astype(np.int8),
            }
        )

    def _changes(self) -> database.Changes:
        """Return the data that are not in the file yet, and mark them as written."""
        with self._lock:
            rows, written = self._rows, self._written_events
            start, bins, first_bin = max(min(rows.changed, rows.end), rows.first), rows.bins, rows.changed_bin
            fresh = [entry for kept in (self._major, self._minor) for entry in _since(kept, written)]
            changes = database.Changes(
                {**self._meta, "written": self._now()},
                rows.steps(start),
                start,
                rows.first,
                {name: column[first_bin:].copy() for name, column in bins.items()},
                first_bin,
                tuple((number, _complete(event, source)) for number, event, source in fresh),
                self._layers.unwritten(),
                self._layers.thinned,
                tuple(self._changed_samples.values()),
            )
            rows.changed, rows.changed_bin, self._written_events = rows.end, len(bins["first"]), self._events
            self._layers.thinned, self._changed_samples = False, {}
            return changes

    def _open(self, path: Path | None) -> None:
        """Begin to write to a file, continuing the recording of an earlier process."""
        if path is None:
            return
        loaded, self._loaded = self._loaded, True
        before, self._problem = self._problem, ""
        try:
            there = path.exists() and path.stat().st_size > 0
            if there and not loaded:
                self._load(database.read(path))
            elif there and database.writer_of(path) not in self._owners:
                raise GuardError(f"another run writes to {path}; use one directory per run")
            writer = uuid.uuid4().hex
            self._writer = Writer(path, writer, self.end_with_process)
        except Exception as error:  # noqa: BLE001  such as no thread or no memory: training continues
            self._problem = str(error) or type(error).__name__
            return
        self._owners.add(writer)
        if before or not there:
            self._write_anew()

    def _write_anew(self) -> None:
        """Mark everything as not written, including data that an earlier fit could not write."""
        self._rows.changed = self._rows.changed_bin = self._written_events = 0
        self._layers.write_anew()
        self._changed_samples = dict(self._samples)

    def _load(self, found: Mapping[str, Any]) -> None:
        self._owners.add(str(found["meta"].get("writer", "")))
        self._meta |= {key: value for key, value in found["meta"].items() if key in ("began", "base", "since")}
        self.base = int(self._meta.get("base", 0))
        self._rows.restore(found["steps"], found["bins"], found["first"])
        self._events = self._written_events = found["event_end"]
        size = 0
        for number, event in zip(range(self._events - 1, -1, -1), reversed(found["events"])):
            kept = self._minor if event.kind in _MINOR or event.data.get("by") == "callback" else self._major
            text = json.dumps(dict(event.data)) if event.data else None  # a parsed incident takes many times the memory
            size += EVENT + len(event.text) + len(text or "")
            if size > MAX_EARLIER:
                break  # what is older is in the file alone
            if len(kept) != kept.maxlen:
                kept.appendleft((number, replace(event, data={}), text))
        self._samples = {(sample.fingerprint, sample.label): sample for sample in found["samples"]}
        self._layers.restore(found["layers"])


def _since(kept: deque[Entry], number: int) -> list[Entry]:
    return list(takewhile(lambda entry: entry[0] >= number, reversed(kept)))[::-1]


def _complete(event: Event, source: Incident | str | None) -> Event:
    """Return an event with the text and data of its incident, or with the data of its JSON."""
    if source is None:
        return event
    if isinstance(source, str):
        return replace(event, data=json.loads(source))
    return replace(event, text=str(source), data=source.to_dict())
