"""Prints the lines of a guard."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence

from keras_nanguard._backends import processes
from keras_nanguard._core.incident import Incident, Lowered
from keras_nanguard._fit.steps import Counts
from keras_nanguard._recording.recording import BadSample
from keras_nanguard._report import console, terminal


class Reporter:
    """Prints the lines of one guard.

    Args:
        verbose: 0 prints nothing, 1 new kinds of incidents, 2 every incident.
    """

    def __init__(self, verbose: int):
        self.verbose = verbose
        self._lines = console.Lines()
        self._printed: set[str] = set()
        self._of_run: list[Incident] = []
        self._details = _details(None)

    def begin(self, directory: str | None) -> None:
        """Begin a run, with its directory if it has one."""
        self._of_run, self._details = [], _details(directory)

    def incident(
        self, incident: Incident, samples: Sequence[BadSample], lowered: Sequence[Lowered]
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

    def attempt(self, what: str, do: Callable[[], None]) -> None:
        """Call a function that is not part of training. If it raises, print a warning once."""
        try:
            do()
        except Exception as error:  # noqa: BLE001  training continues
            if what not in self._printed:
                self._printed.add(what)
                kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
                self.line(f"NanGuard: cannot {what}: {kind}{error}.")


def _details(directory: str | None) -> str:
    """Return how to see all details of the run."""
    if directory is None:
        return 'guard.report("run.html")'
    return f"keras-nanguard report {shlex.quote(directory)} -o run.html"
