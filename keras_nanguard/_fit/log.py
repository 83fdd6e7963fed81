"""What a guard has seen in all of its fits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from keras_nanguard._core.incident import Incident, Lowered
from keras_nanguard._core.totals import Totals
from keras_nanguard._fit.bad_data import BadRows
from keras_nanguard._fit.reporter import Reporter
from keras_nanguard._fit.steps import Counts
from keras_nanguard._recording.recorder import Recorder


class Log:
    """The incidents, the recording, the bad rows and the numbers of steps of one guard.

    Args:
        verbose: how much is printed: 0, 1 or 2.
        sample_ids: names of the rows, as for `NanGuard`.

    Attributes:
        incidents: the incidents in order of time.
        reporter: prints lines.
        recorder: records steps and events.
        bad_rows: identifies the rows of the data.
    """

    def __init__(self, verbose: int, sample_ids: Any):
        self.incidents: list[Incident] = []
        self.reporter, self.recorder = Reporter(verbose), Recorder()
        self.bad_rows = BadRows(self.recorder, sample_ids)
        self._ids, self._earlier = sample_ids, Totals()
        self._counts: Counts | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle: everything seen, but no fit."""
        rows = BadRows(self.recorder, self._ids)
        return {**vars(self), "bad_rows": rows, "_earlier": self.totals, "_counts": None}

    def begin(self, counts: Counts) -> None:
        """Begin a fit with its counts."""
        self._earlier, self._counts = self.totals, counts

    @property
    def totals(self) -> Totals:
        """The numbers of steps of all fits so far."""
        return self._earlier if self._counts is None else self._earlier.plus(self._counts.totals)

    def announce(self, incident: Incident, lowered: Sequence[Lowered]) -> None:
        """Record and print an incident, with the learning rates that it has lowered."""
        if incident.bundle is not None:  # a new one can have taken the place of the oldest
            for place, earlier in enumerate(self.incidents):
                if earlier.bundle is not None and not os.path.isdir(earlier.bundle):
                    self.incidents[place] = earlier.with_(bundle=None)
        self.incidents.append(incident)
        self.reporter.attempt("record an incident", lambda: self._record(incident))
        step = incident.step + self.recorder.base
        samples = [sample for sample in self.recorder.samples.values() if step in sample.steps]
        self.reporter.incident(incident, samples, lowered)

    def _record(self, incident: Incident) -> None:
        text, data = str(incident), incident.to_dict()
        self.recorder.event("incident", incident.step, incident.epoch, text, data)
