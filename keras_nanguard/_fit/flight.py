"""The part of `NanGuard` for the recording: access, epoch logs, and trackers."""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keras_nanguard._core.incident import Incident
from keras_nanguard._core.nonfinite_error import NonFiniteError
from keras_nanguard._core.notebook import block
from keras_nanguard._fit.bad_rows import BadRows
from keras_nanguard._fit.epoch_logs import OWN, REFUSED, numbers
from keras_nanguard._fit.recorded import say_problem
from keras_nanguard._fit.reporter import Reporter
from keras_nanguard._fit.running_fit import surrounding
from keras_nanguard._fit.session import Session
from keras_nanguard._fit.trackers import Trackers
from keras_nanguard._recording import samples_file
from keras_nanguard._recording.recorder import Recorder
from keras_nanguard._recording.recording import Recording
from keras_nanguard._recording.records import BadSample
from keras_nanguard._report import console, html, plots

__all__ = ["FlightMixin"]


class FlightMixin:
    """The part of `NanGuard` for the recording."""

    session: Session | None
    incidents: list[Incident]
    directory: Path | None
    _recorder: Recorder
    _reporter: Reporter
    _bad_rows: BadRows
    _last_norm = 0.0

    def _begin_recording(self, logs: bool, sample_ids: Any) -> None:
        self.logs, self.sample_ids, self._recorder = logs, sample_ids, Recorder()
        self._bad_rows = BadRows(self._recorder, sample_ids)
        self._trackers: Trackers | None = None

    @property
    def recording(self) -> Recording:
        """The `Recording` of all steps and events so far. It is a copy from memory."""
        return self._recorder.recording

    def _copied(self) -> dict[str, Any]:
        """Return the attributes of this part for a copy of the guard."""
        recorder = copy.copy(self._recorder)
        return {"_recorder": recorder, "_bad_rows": BadRows(recorder, self.sample_ids)}

    def bad_samples(self, path: str | os.PathLike[str] | None = None) -> tuple[BadSample, ...]:
        """Return the rows of the data that caused bad steps, each once, in the order in which they
        were found.

        A row is identified by its values, so shuffling does not matter. If `fit` trains on arrays,
        `index` is its index in `x`. Otherwise `index` is `None`, and the label is the beginning of
        its fingerprint, or its name from `sample_ids`. An augmented row is a new row in each epoch.

        Args:
            path: a `.csv` file to write the rows to, or `None`.

        Raises:
            GuardError: if the suffix of the path is another one.
        """
        found = tuple(self._recorder.samples.values())
        if path is not None:
            samples_file.write(found, path)
        return found

    def _note_fit(self, params: Mapping[str, Any] | None) -> None:
        """Record the length of the fit, if known, and find its trackers."""
        self._trackers = Trackers(getattr(surrounding(), "callbacks", ()), self._reporter.once)
        known = {
            key: int(value)
            for key, value in (params or {}).items()
            if key in ("epochs", "steps") and value is not None
        }
        self._recorder.note(epochs=known.get("epochs"), steps_per_epoch=known.get("steps"))

    def _add_logs(self, logs: Any) -> None:
        """Add the guard's own numbers to the logs of an epoch."""
        if self.session is None or not isinstance(logs, dict):
            return
        counts = self.session.counts
        if self.logs:
            norm, scale = self._recorder.epoch_means(counts.epoch)
            self._last_norm = norm if math.isfinite(norm) else self._last_norm
            logs |= {
                f"{OWN}refused": counts.epoch_refused,
                f"{OWN}grad_norm": self._last_norm,
                f"{OWN}rate_factor": self.session.recovery.rate_factor,
                f"{OWN}loss_scale": scale,
                f"{OWN}rollbacks": counts.rollbacks - counts.epoch_rollbacks,
            }
        logs[REFUSED] = counts.epoch_refused

    def _samples_of(self, incident: Incident) -> list[BadSample]:
        """Return the bad rows that were found in the step of an incident."""
        step = incident.step + self._recorder.base
        return [sample for sample in self._recorder.samples.values() if step in sample.steps]

    def _record_incident(self, incident: Incident) -> None:
        """Record an incident, and send it to the trackers of the run."""
        text, data = str(incident), incident.to_dict()
        self._recorder.event("incident", incident.step, incident.epoch, text, data)
        if self._trackers is not None:
            self._trackers.incident(incident)

    def _end_trackers(self) -> None:
        """Send the report to the trackers at the end of a fit."""
        trackers, self._trackers = self._trackers, None
        if trackers is not None:
            trackers.end(self._page)

    def _page(self) -> str:
        """Return the report as HTML."""
        return html.page(self.recording, self.incidents, self.summary(), self.directory)

    def _add_counts(self, logs: Any) -> None:
        """Convert the counts in the logs from floats to integers. Add them if they are missing."""
        if isinstance(logs, dict) and REFUSED in logs:
            logs |= {
                key: int(logs[key])
                for key in (REFUSED, f"{OWN}refused", f"{OWN}rollbacks")
                if key in logs
            }
        else:
            self._add_logs(logs)

    def _record_epoch(self, epoch: int, logs: Any) -> None:
        """Record the logs of an epoch."""
        if self.session is None:
            return
        self._reporter.bad_rows(self._bad_rows.line())
        known = {
            key: value if math.isfinite(value) else str(value)
            for key, value in numbers(logs).items()
        }
        counts = self.session.counts
        self._recorder.event(
            "epoch",
            max(counts.step - 1, 0),
            epoch,
            data={"logs": known, "refused": counts.epoch_refused},
        )
        say_problem(self.session)

    def end_fit(self, finished: bool) -> None:
        """End a fit that no callback detaches from: print the table, close the recording and the
        trackers.

        `finished` is whether the fit has ended normally.
        """
        session = self.session
        if session is None:
            return
        with contextlib.nullcontext() if finished else contextlib.suppress(NonFiniteError):
            session.resolve_pending()
        self._reporter.end(session.counts, session.directory)
        self._recorder.end("finished" if finished else "failed", session.step, session.counts.epoch)
        say_problem(session)
        self._end_trackers()
        session.release()

    # In a notebook

    def summary(self) -> str:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        title, *lines = self.summary().splitlines()
        rows = [
            (len(g), console.why(g[0]), g[0].moment, ", ".join(g[0].changes) or "skip")
            for g in console.kinds(self.incidents)
        ]
        rows += [
            (sample.times, f"bad row {sample.label}", "", sample.why)
            for sample in self.bad_samples()
        ]
        return block(
            title,
            lines if not rows else (),
            ("times", "incident", "first at", "action or reason"),
            rows,
            not self.incidents,
        )

    def plot(self) -> Any:
        """Return a matplotlib figure of loss, gradient norm, learning rate and loss scale, with
        marks for all actions.

        Needs the extra `plot`. The figure is not shown: `guard.plot().savefig("run.png")`.

        Raises:
            GuardError: if matplotlib is not installed.
        """
        return plots.curves(self.recording)
