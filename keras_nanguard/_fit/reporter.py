"""Prints the lines of a guard."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence

from keras_nanguard._backends import processes
from keras_nanguard._core.incident import Incident
from keras_nanguard._fit.counts import Counts
from keras_nanguard._recording.records import BadSample
from keras_nanguard._report import closing, console


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
