"""The part of `NanGuard` that a user reads: incidents, recording, reports."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from keras_nanguard._backends import processes
from keras_nanguard._core.display import block
from keras_nanguard._core.incident import Incident
from keras_nanguard._fit.attached import Attached
from keras_nanguard._fit.bad_rows import BadRows
from keras_nanguard._fit.counts import Totals
from keras_nanguard._fit.reporter import Reporter
from keras_nanguard._fit.session import Session
from keras_nanguard._policy.policy import Policy
from keras_nanguard._recording.recorder import Recorder
from keras_nanguard._recording.recording import Recording
from keras_nanguard._recording.records import BadSample
from keras_nanguard._report import console, files, html, plots


class ReportMixin:
    """The part of `NanGuard` that a user reads."""

    policy: Policy
    session: Session | None
    incidents: list[Incident]
    directory: Path | None
    sample_ids: Any
    _attached: Attached | None
    _reporter: Reporter
    _recorder: Recorder
    _counts = Totals()
    """The counts of the fits before the last one."""

    @property
    def recording(self) -> Recording:
        """The `Recording` of all steps and events so far. It is a copy from memory."""
        return self._recorder.recording

    def _copied(self) -> dict[str, Any]:
        """Return the attributes of this part for a pickle of the guard."""
        recorder = copy.copy(self._recorder)
        return {
            "incidents": list(self.incidents),
            "_reporter": copy.copy(self._reporter),
            "_recorder": recorder,
            "_bad_rows": BadRows(recorder, self.sample_ids),
            "_counts": self._counted(),
        }

    def _counted(self) -> Totals:
        """Return the counts of all fits so far."""
        return self._counts if self.session is None else self._counts.plus(self.session.run.counts)

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
            files.write_samples(found, path)
        return found

    def _announce(self, incident: Incident) -> None:
        """Record and print an incident."""
        if incident.bundle is not None:  # a new one can have taken the place of the oldest
            self.incidents[:] = files.without_removed_bundles(self.incidents, incident.bundle)
        self.incidents.append(incident)
        directory = self.session.run.directory if self.session is not None else None
        self._reporter.attempt("record an incident", lambda: self._record_incident(incident))
        step = incident.step + self._recorder.base
        samples = [sample for sample in self._recorder.samples.values() if step in sample.steps]
        self._reporter.incident(incident, directory, samples)

    def _record_incident(self, incident: Incident) -> None:
        """Record an incident, and send it to the trackers of the run."""
        text, data = str(incident), incident.to_dict()
        self._recorder.event("incident", incident.step, incident.epoch, text, data)
        trackers = self._attached.trackers if self._attached is not None else None
        if trackers is not None:
            trackers.incident(incident)

    def _page(self) -> str:
        """Return the HTML page of all fits so far."""
        return html.page(self.recording, self.incidents, self.summary(), self.directory)

    # Reports

    def __repr__(self) -> str:
        incidents = "1 incident" if len(self.incidents) == 1 else f"{len(self.incidents)} incidents"
        return f"NanGuard({self.policy.preset!r}, {incidents})"

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Return a summary of all fits so far: numbers of steps, incidents by cause, and
        actions.
        """
        return console.summary(self.incidents, *self._counted())

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write a report of all fits so far to a file, and return its path.

        The suffix of the path selects the format. `.html` is a self-contained page with curves,
        incidents, layers and bad rows, `.md` is text, `.json` one object with a format number, and
        `.jsonl` one incident per line. The file is written atomically. If there are several
        processes, the first one writes it.

        Raises:
            GuardError: if the suffix is another one.
        """
        if processes.index() != 0:
            return Path(path)
        return files.write(self.incidents, self.summary(), path, self.recording, self.directory)

    def _repr_html_(self) -> str:
        title, *lines = self.summary().splitlines()
        heads = ("times", "incident", "first at", "action or reason")
        rows = [
            (len(g), console.why(g[0]), g[0].moment, ", ".join(g[0].changes) or "skip")
            for g in console.kinds(self.incidents)
        ]
        rows += [(s.times, f"bad row {s.label}", "", s.reason) for s in self.bad_samples()]
        return block(title, lines if not rows else (), heads, rows, not self.incidents)

    def plot(self) -> Any:
        """Return a matplotlib figure of loss, gradient norm, learning rate and loss scale, with
        marks for all actions.

        Needs the extra `plot`. The figure is not shown: `guard.plot().savefig("run.png")`.

        Raises:
            GuardError: if matplotlib is not installed.
        """
        return plots.curves(self.recording)
