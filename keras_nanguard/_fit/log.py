"""What a guard prints, and the incidents of all of its fits."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keras_nanguard._backends import processes
from keras_nanguard._core.incident import Incident
from keras_nanguard._files.bundles import bundle_folder
from keras_nanguard._fit.bad_data import BadRows
from keras_nanguard._fit.steps import Counts
from keras_nanguard._recording.recorder import Recorder
from keras_nanguard._recording.recording import BadSample
from keras_nanguard._report import closing_table, console


class GuardLog:
    """The incidents, the recording, the bad rows and the printed lines of one guard.

    Args:
        verbose: 0 prints nothing; 1 the first incident of each kind in a fit, then the 10th, the
            100th, ..., and each that changes the model, the optimizer or the training; 2 every
            incident.
        sample_ids: names of the rows, as for `NanGuard`.

    Attributes:
        incidents: the incidents in order of time.
    """

    def __init__(self, verbose: int, sample_ids: Any):
        self.verbose = verbose
        self.incidents: list[Incident] = []
        self.recorder = Recorder()
        self.bad_rows = BadRows(self.recorder, sample_ids)
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._most_refused = 0
        self._printed: set[str] = set()
        self._of_run: list[Incident] = []
        self._directory, self._details = Path(), _details(None)

    def begin(self, directory: str | None, shown: str | None) -> None:
        """Begin a run, with its directory if it has one, and with that as the user wrote it."""
        self._of_run, self._details = [], _details(shown)
        self._directory = Path(directory or "")

    def count_anew(self) -> None:
        """Print again, in a fit whose first step begins, what an earlier fit has printed."""
        self._seen.clear()
        self._most_refused = 0

    def announce(self, incident: Incident) -> None:
        """Record an incident, and print its line, if it has one."""
        if incident.bundle is not None:  # a new one can have taken the place of the oldest
            for place, earlier in enumerate(self.incidents):
                if earlier.bundle and not bundle_folder(earlier.bundle, self._directory):
                    self.incidents[place] = earlier.with_(bundle=None)
        self.incidents.append(incident)
        self._of_run.append(incident)
        with self.attempt("record an incident"):
            text, data = str(incident), incident.to_dict()
            self.recorder.event("incident", incident.step, incident.epoch, text, data)
        step = incident.step + self.recorder.base
        samples = [sample for sample in self.recorder.samples.values() if step in sample.steps]
        with self.attempt("print a line"):
            self.line(self._line_of(incident, samples))

    def _line_of(self, incident: Incident, samples: Sequence[BadSample]) -> str:
        """Count an incident; return its line, `""` if it is only counted."""
        kind = (*console.kind_of(incident), incident.changes)
        self._seen[kind] += 1
        count = self._seen[kind]
        if self.verbose == 2:
            return console.incident_line(incident)
        changes = not console.CHANGING.isdisjoint(incident.changes)
        new = count == 1 or incident.decision is None or changes
        is_round = count >= 10 and str(count).strip("0") == "1"
        if not (new or is_round):
            return ""
        repeats = 0 if new else count
        return console.printable(console.brief_line(incident, samples, self._details, repeats))

    def epoch(
        self, counts: Counts, epoch: int, unmeasured: Collection[str], committed_before: bool
    ) -> None:
        """Print the line at the end of an epoch with refused steps: of the first one, of one with
        at least twice as many as the last printed one, or without committed steps; if `verbose` is
        2, of each.

        Ordinary overflows under dynamic loss scaling are part of a healthy run: an epoch with no
        other refused steps has no line, unless all of its steps were refused or `verbose` is 2.

        Args:
            unmeasured: names of logs that no committed step of this fit has measured.
            committed_before: whether any step of this fit has committed.
        """
        refused, committed = counts.epoch_refused, counts.epoch_committed
        ordinary = counts.epoch_overflows >= refused and committed > 0
        more = refused >= 2 * self._most_refused or not committed
        if refused and (self.verbose == 2 or (more and not ordinary)):
            self._most_refused = max(refused, self._most_refused)
            seen = (epoch, refused, committed, bool(unmeasured), committed_before)
            with self.attempt("print a line"):
                self.line(console.epoch_line(*seen))

    def end(self, counts: Counts, rate_factor: float) -> None:
        """Print the table at the end of a run, if there were incidents.

        Args:
            rate_factor: the learning rate as a multiple of the configured one.
        """
        incidents, self._of_run = self._of_run, []
        if incidents and self.verbose:
            head = console.closing_line(counts.totals, len(incidents), self._details, rate_factor)
            with self.attempt("print a table"):
                self.line(closing_table.table_text(incidents, head))

    def line(self, text: str) -> None:
        """Print a line that is not about an incident, if there is one."""
        if text and self.verbose:
            processes.print_line(text)

    def once(self, line: str) -> None:
        """Print a line unless it was printed before."""
        if line not in self._printed:
            self._printed.add(line)
            processes.print_line(line)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Return a context for what is not part of training. If it raises, print a warning once."""
        try:
            yield
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
