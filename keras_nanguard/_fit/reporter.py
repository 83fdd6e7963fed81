"""Prints the lines of a guard, and sends its incidents to trackers: TensorBoard, Weights & Biases,
MLflow.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from keras_nanguard._backends import processes
from keras_nanguard._core.incident import Incident
from keras_nanguard._fit.run import Counts
from keras_nanguard._keras import fitting as keras_fitting
from keras_nanguard._recording.recording import BadSample
from keras_nanguard._report import console, terminal

MAX_TEXTS, MAX_ALERTS = 100, 10
"""Limits per fit: incidents written as text, and causes with an alert."""

REPORT = "nanguard/report.html"
"""Name of the artifact."""


class Reporter:
    """Prints the lines of one guard, and sends the incidents of its fits.

    Args:
        verbose: 0 prints nothing, 1 new kinds of incidents, 2 every incident.
    """

    def __init__(self, verbose: int):
        self.verbose = verbose
        self._lines = console.Lines()
        self._printed: set[str] = set()
        self._of_run: list[Incident] = []
        self._details = _details(None)
        self._callbacks: list[Any] | None = None
        self._causes: Counter[str] = Counter()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy or a pickle, which belongs to no fit."""
        return {**vars(self), "_callbacks": None}

    def begin(self, directory: str | None) -> None:
        """Begin a run, with its directory if it has one."""
        self._of_run, self._details = [], _details(directory)

    def incident(
        self, incident: Incident, samples: Sequence[BadSample], lowered: Sequence[console.Lowered]
    ) -> None:
        """Print the line of an incident, if it has one.

        Args:
            incident: the incident.
            samples: the bad rows of its step.
            lowered: the learning rates that it has lowered.
        """
        self._of_run.append(incident)
        context = console.Context(samples, lowered, self._details)
        what = (incident, context, self.verbose == 2)
        self.attempt("print a line", lambda: self.line(self._lines.line(*what)))

    def epoch(
        self, counts: Counts, epoch: int, unmeasured: Iterable[str], committed_before: bool
    ) -> None:
        """Print the line at the end of an epoch, if there is one.

        Ordinary overflows under dynamic loss scaling are part of a healthy run: without any other
        refused step there is no line, unless all steps were refused or `verbose` is 2.
        """
        refused, committed, every = counts.epoch_refused, counts.epoch_committed, self.verbose == 2
        if counts.epoch_overflows >= refused and committed > 0 and not every:
            return
        seen = (refused, committed, sorted(unmeasured), committed_before, every)
        self.attempt("print a line", lambda: self.line(self._lines.epoch(epoch, *seen)))

    def end(self, counts: Counts) -> None:
        """Print the table at the end of a run, if there were incidents."""
        incidents, self._of_run = self._of_run, []
        if incidents and self.verbose:
            head = console.closing_line(counts.totals, len(incidents), self._details)
            self.attempt("print a table", lambda: self.line(terminal.table_text(incidents, head)))

    def line(self, text: str) -> None:
        """Print a line that is not about an incident, if there is one."""
        if text and self.verbose:
            processes.print_line(text)

    def once(self, line: str) -> None:
        """Print a line unless it was printed before."""
        if line not in self._printed:
            self._printed.add(line)
            processes.print_line(line)

    # Trackers

    def begin_tracking(self, callbacks: Iterable[Any]) -> None:
        """Begin a fit with these callbacks, whose incidents are sent."""
        self._callbacks, self._causes = list(callbacks), Counter()

    def track(self, incident: Incident) -> None:
        """Send an incident of a fit: as text to TensorBoard, and the first of each cause as an
        alert to Weights & Biases.
        """
        if self._callbacks is None or processes.index() != 0:
            return
        cause = incident.diagnosis.cause if incident.diagnosis is not None else "unknown"
        self._causes[cause] += 1
        if self._causes.total() <= MAX_TEXTS:
            what = (self._callbacks, "nanguard/incident", str(incident), incident.step)
            self.attempt("send incidents to TensorBoard", lambda: keras_fitting.write_text(*what))
        if self._causes[cause] == 1 and len(self._causes) <= MAX_ALERTS:
            self.attempt("send incidents to Weights & Biases", lambda: _alert(cause, str(incident)))

    def end_tracking(self, report: Callable[[], str]) -> None:
        """Set the tags of an MLflow run at the end of a fit, and store the report as its artifact;
        `report` creates it. Without incidents only the tags.
        """
        if self._callbacks is not None and processes.index() == 0:
            self.attempt("send incidents to MLflow", lambda: _tagged(self._causes, report))
        self._callbacks = None

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


def _alert(cause: str, text: str) -> None:
    wandb = sys.modules.get("wandb")
    if wandb is not None and getattr(wandb, "run", None) is not None:
        wandb.run.alert(title=f"NanGuard: {cause}", text=text)


def _tagged(causes: Counter[str], report: Callable[[], str]) -> None:
    mlflow = sys.modules.get("mlflow")
    if mlflow is None or not hasattr(mlflow, "active_run") or mlflow.active_run() is None:
        return
    tags = {"nanguard.incidents": causes.total(), "nanguard.causes": ", ".join(causes)}
    mlflow.set_tags(tags)
    if causes:
        mlflow.log_text(report(), REPORT)
