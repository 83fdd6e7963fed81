"""A run as reports show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from keras_nanguard._core.incident import Incident
from keras_nanguard._core.totals import Totals
from keras_nanguard._recording.database import OVERFLOW, REFUSED, REMOVED, SKIPPED
from keras_nanguard._recording.recording import Recording
from keras_nanguard._report.console import summary, why


@dataclass(frozen=True)
class ShownRun:
    """A run, from memory or from its files.

    Attributes:
        incidents: its incidents, of one fit or more.
        recording: its recording, which may be empty.
        directory: its directory, if it has one, for the contents of its bundles.
        name: its name among several runs.
        counted: its numbers of steps as its guard has counted them; `None` if it is from files.
    """

    incidents: Sequence[Incident] = ()
    recording: Recording = field(default_factory=Recording)
    directory: Path | None = None
    name: str = ""
    counted: Totals | None = None

    @property
    def totals(self) -> Totals:
        """The numbers of steps of the recording, including those that were removed from it; without
        a recording the incidents are counted.

        A refused step that was replayed does not count as refused, as in the guard's own counts.
        """
        if not len(self.recording):
            return Totals(None, sum(incident.refused for incident in self.incidents))
        steps = self.recording.steps
        status, undone = steps["status"], steps["undone"]
        again = undone & np.isin(status, (REFUSED, OVERFLOW))
        ran = int(steps["step"][status != SKIPPED].max()) + 1  # steps are numbered from 0
        kinds = ((status == REFUSED) & ~again, (status == OVERFLOW) & ~again, again)
        removed = (self.recording.meta.get(key, 0) for key in REMOVED)
        refused, overflows, run_again = (
            int(kept.sum()) + number for kept, number in zip(kinds, removed)
        )
        return Totals(ran, refused + overflows, overflows, run_again)

    @property
    def summary(self) -> str:
        """The summary of the run as text."""
        return summary(self.incidents, self.counted or self.totals)

    @property
    def causes(self) -> Counter[str]:
        """Number of incidents by cause and place."""
        return Counter(why(incident) for incident in self.incidents)
