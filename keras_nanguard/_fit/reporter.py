"""The console output of a guard, and the log of incidents in its directory."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence

from keras_nanguard._backends import processes
from keras_nanguard._core.incident import Incident
from keras_nanguard._fit.counts import Counts
from keras_nanguard._recording.records import BadSample
from keras_nanguard._report import closing, console, log

__all__ = ["Reporter"]


class Reporter:
    """Prints the lines of one guard, and writes its log.

    Args:
        verbose: 0 prints only that the log cannot be written, 1 new kinds of incidents, 2 every
            incident.
    """

    def __init__(self, verbose: int):
        self.verbose = verbose
        self._lines = console.Lines(every=verbose == 2)
        self._printed: set[str] = set()
        self._of_run: list[Incident] = []

    def begin(self, directory: str | None) -> None:
        """Begin the log of a run."""
        self._of_run = []
        self._log(directory, log.begin)

    def incident(
        self, incident: Incident, directory: str | None, samples: Sequence[BadSample] = ()
    ) -> None:
        """Log an incident, and print its line if it has one.

        Args:
            incident: the incident.
            directory: the directory of the run, or `None`.
            samples: the bad rows of its step.
        """
        self._log(directory, lambda folder: log.add(folder, incident))
        self._of_run.append(incident)
        self.attempt("print a line", lambda: self._print(self._lines.line(incident, samples, _details(directory))))

    def epoch(self, counts: Counts, epoch: int, unmeasured: Iterable[str], committed_before: bool) -> None:
        """Print the line at the end of an epoch, if there is one.

        Ordinary overflows under dynamic loss scaling are part of a healthy run: without any other
        refused step there is no line, unless all steps were refused or `verbose` is 2.
        """
        ordinary = counts.epoch_overflows >= counts.epoch_refused and counts.epoch_committed > 0
        if ordinary and self.verbose < 2:
            return
        seen = (counts.epoch_refused, counts.epoch_committed, sorted(unmeasured), committed_before)
        self.attempt("print a line", lambda: self._print(self._lines.epoch(epoch, *seen)))

    def bad_rows(self, line: str) -> None:
        """Print the line with bad rows, if there is a new one."""
        self._print(line)

    def end(self, counts: Counts, directory: str | None) -> None:
        """Print the table at the end of a run, if there were incidents."""
        incidents, self._of_run = self._of_run, []
        if incidents and self.verbose:
            seen = (counts.step, counts.refused, counts.run_again, len(incidents))
            head = console.closing_line(*seen, _details(directory))
            self.attempt("print a table", lambda: self._print(closing.table_text(incidents, head)))

    def line(self, text: str) -> None:
        """Print a line about a change that is not an incident."""
        self._print(text)

    def once(self, line: str) -> None:
        """Print a line unless it was printed before."""
        if line not in self._printed:
            self._printed.add(line)
            processes.print_line(line)

    def _print(self, text: str) -> None:
        if text and self.verbose:
            processes.print_line(text)

    def attempt(self, what: str, do: Callable[[], None]) -> None:
        """Call a function that is not part of training. If it raises, print a warning once."""
        try:
            do()
        except Exception as error:  # noqa: BLE001  training continues
            reason = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self.once(f"NanGuard: cannot {what}: {reason}.")

    def _log(self, directory: str | None, write: Callable[[str], None]) -> None:
        """Write to the log of incidents in the directory."""
        if directory is not None:
            self.attempt(f"write {log.NAME}", lambda: write(directory))


def _details(directory: str | None) -> str:
    """Return how to see all details of the run."""
    if directory is None:
        return 'guard.report("run.html")'
    return f"keras-nanguard report {shlex.quote(directory)} -o run.html"
