"""The part of `NanGuard` that a user reads: incidents, recording, epoch logs, reports, trackers."""

from __future__ import annotations

import copy
import math
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from keras_nanguard._backends import processes
from keras_nanguard._core.display import block
from keras_nanguard._core.incident import Incident
from keras_nanguard._core.plain_json import plain
from keras_nanguard._fit.bad_rows import BadRows
from keras_nanguard._fit.callbacks import OWN, REFUSED, numbers
from keras_nanguard._fit.counts import Counts, Totals
from keras_nanguard._fit.session import Session
from keras_nanguard._keras import fitting as keras_fitting
from keras_nanguard._policy.policy import Policy
from keras_nanguard._recording.recorder import Recorder
from keras_nanguard._recording.recording import Recording
from keras_nanguard._recording.records import BadSample
from keras_nanguard._report import closing, console, files, html, plots

# Trackers


MAX_TEXTS, MAX_ALERTS = 100, 10
"""Limits per fit: incidents written as text, and causes with an alert."""

REPORT = "nanguard/report.html"
"""Name of the artifact."""


class Trackers:
    """Sends the incidents of one fit.

    Args:
        callbacks: the callbacks of the fit.
        attempt: see `Reporter.attempt`.
    """

    def __init__(
        self, callbacks: Iterable[Any], attempt: Callable[[str, Callable[[], None]], None]
    ):
        self._callbacks, self._attempt = list(callbacks), attempt
        self._causes: Counter[str] = Counter()
        self._texts = 0

    def incident(self, incident: Incident) -> None:
        """Send one incident: as text to TensorBoard, and the first of each cause as an alert to
        Weights & Biases.
        """
        if processes.index() != 0:
            return
        cause = incident.diagnosis.cause if incident.diagnosis is not None else "unknown"
        self._causes[cause] += 1
        if self._texts < MAX_TEXTS:
            self._texts += 1
            what = (self._callbacks, "nanguard/incident", str(incident), incident.step)
            self._attempt("send incidents to TensorBoard", lambda: keras_fitting.write_text(*what))
        if self._causes[cause] == 1 and len(self._causes) <= MAX_ALERTS:
            self._attempt(
                "send incidents to Weights & Biases", lambda: _alert(cause, str(incident))
            )

    def end(self, report: Callable[[], str]) -> None:
        """Set the tags of an MLflow run, and store the report as its artifact; `report` creates it.
        Without incidents only the tags.
        """
        if processes.index() == 0:
            self._attempt("send incidents to MLflow", lambda: _tagged(self._causes, report))


def _alert(cause: str, text: str) -> None:
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.run.alert(title=f"NanGuard: {cause}", text=text)


def _tagged(causes: Counter[str], report: Callable[[], str]) -> None:
    mlflow = sys.modules.get("mlflow")
    if mlflow is None or not hasattr(mlflow, "active_run") or mlflow.active_run() is None:
        return
    tags = {"nanguard.incidents": sum(causes.values()), "nanguard.causes": ", ".join(causes)}
    mlflow.set_tags(tags)
    if causes:
        mlflow.log_text(report(), REPORT)


# Console


class Reporter:
    """Prints the lines of one guard.

    Args:
        verbose: 0 prints nothing, 1 new kinds of incidents, 2 every incident.
    """

    def __init__(self, verbose: int):
        self.verbose = verbose
        self._lines = console.Lines(every=verbose == 2)
        self._printed: set[str] = set()
        self._of_run: list[Incident] = []

    def begin(self) -> None:
        """Begin a run."""
        self._of_run = []

    def incident(
        self, incident: Incident, directory: str | None, samples: Sequence[BadSample] = ()
    ) -> None:
        """Print the line of an incident, if it has one.

        Args:
            incident: the incident.
            directory: the directory of the run, or `None`.
            samples: the bad rows of its step.
        """
        self._of_run.append(incident)
        details = _details(directory)
        self._print_made("a line", lambda: self._lines.line(incident, samples, details))

    def epoch(
        self, counts: Counts, epoch: int, unmeasured: Iterable[str], committed_before: bool
    ) -> None:
        """Print the line at the end of an epoch, if there is one.

        Ordinary overflows under dynamic loss scaling are part of a healthy run: without any other
        refused step there is no line, unless all steps were refused or `verbose` is 2.
        """
        ordinary = counts.epoch_overflows >= counts.epoch_refused and counts.epoch_committed > 0
        if ordinary and self.verbose < 2:
            return
        seen = (counts.epoch_refused, counts.epoch_committed, sorted(unmeasured), committed_before)
        self._print_made("a line", lambda: self._lines.epoch(epoch, *seen))

    def end(self, counts: Counts, directory: str | None) -> None:
        """Print the table at the end of a run, if there were incidents."""
        incidents, self._of_run = self._of_run, []
        if incidents and self.verbose:
            seen = (counts.step, counts.refused, counts.run_again, len(incidents))
            head = console.closing_line(*seen, _details(directory))
            self._print_made("a table", lambda: closing.table_text(incidents, head))

    def line(self, text: str) -> None:
        """Print a line that is not about an incident, if there is one."""
        if text and self.verbose:
            processes.print_line(text)

    def once(self, line: str) -> None:
        """Print a line unless it was printed before."""
        if line not in self._printed:
            self._printed.add(line)
            processes.print_line(line)

    def _print_made(self, what: str, make: Callable[[], str]) -> None:
        self.attempt(f"print {what}", lambda: self.line(make()))

    def attempt(self, what: str, do: Callable[[], None]) -> None:
        """Call a function that is not part of training. If it raises, print a warning once."""
        try:
            do()
        except Exception as error:  # noqa: BLE001  training continues
            if what not in self._printed:
                self._printed.add(what)
                kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
                processes.print_line(f"NanGuard: cannot {what}: {kind}{error}.")


def _details(directory: str | None) -> str:
    """Return how to see all details of the run."""
    if directory is None:
        return 'guard.report("run.html")'
    return f"keras-nanguard report {shlex.quote(directory)} -o run.html"


# The guard


class ReportMixin:
    """The part of `NanGuard` that a user reads."""

    policy: Policy
    session: Session | None
    incidents: list[Incident]
    directory: Path | None
    _reporter: Reporter
    _counts = Totals()
    """The counts of the fits before the last one."""

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

    def _note_fit(self, params: Mapping[str, Any] | None, callbacks: Iterable[Any]) -> None:
        """Record the length of the fit, if known, and find its trackers among the callbacks."""
        self._trackers = Trackers(callbacks, self._reporter.attempt)
        epochs, steps = ((params or {}).get(name) for name in ("epochs", "steps"))
        self._recorder.note(
            epochs=None if epochs is None else int(epochs),
            steps_per_epoch=None if steps is None else int(steps),
        )

    def _add_logs(self, logs: Any) -> None:
        """Add the guard's own numbers to the logs of an epoch."""
        if self.session is None or not isinstance(logs, dict):
            return
        counts = self.session.run.counts
        if self.logs:
            norm, scale = self._recorder.epoch_means(counts.epoch)
            self._last_norm = norm if math.isfinite(norm) else self._last_norm
            logs |= {
                f"{OWN}grad_norm": self._last_norm,
                f"{OWN}rate_factor": self.session.run.recovery.rate_factor,
                f"{OWN}loss_scale": scale,
                f"{OWN}rollbacks": counts.rollbacks - counts.epoch_rollbacks,
            }
        logs[REFUSED] = counts.epoch_refused

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
        if self._trackers is not None:
            self._trackers.incident(incident)

    def _end_trackers(self) -> None:
        """Send the report to the trackers at the end of a fit."""
        trackers, self._trackers = self._trackers, None
        if trackers is not None:
            about = (self.incidents, self.summary(), self.directory)
            trackers.end(lambda: html.page(self.recording, *about))

    def _add_counts(self, logs: Any) -> None:
        """Convert the counts in the logs from floats to integers. Add them if they are missing."""
        if isinstance(logs, dict) and REFUSED in logs:
            counts = (REFUSED, f"{OWN}refused", f"{OWN}rollbacks")
            logs |= {key: int(logs[key]) for key in counts if key in logs}
        else:
            self._add_logs(logs)

    def _record_epoch(self, epoch: int, logs: Any) -> None:
        """Record the logs of an epoch."""
        if self.session is None:
            return
        self._reporter.line(self._bad_rows.line())
        counts = self.session.run.counts
        data = {"logs": plain(numbers(logs)), "refused": counts.epoch_refused}
        self._recorder.event("epoch", max(counts.step - 1, 0), epoch, data=data)
        self.session.say_problem()

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
