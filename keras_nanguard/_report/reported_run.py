"""A run as reports show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from keras_nanguard._core.incident import Incident
from keras_nanguard._recording.recording import COUNTED, Recording, Totals
from keras_nanguard._report.console import summary, why


@dataclass(frozen=True)
class ReportedRun:
    """A run, from memory or from its files.

    Attributes:
        incidents: its incidents, of one fit or more.
        recording: its recording, which may be empty.
        directory: its directory, if it has one, for the contents of its bundles.
        name: its name among several runs.
    """

    incidents: Sequence[Incident] = ()
    recording: Recording = field(default_factory=Recording)
    directory: Path | None = None
    name: str = ""

    @property
    def totals(self) -> Totals:
        """The numbers of steps of the recording; without one the incidents are counted."""
        if not len(self.recording):
            return Totals(None, sum(incident.refused for incident in self.incidents))
        ran = int(self.recording.steps["step"].max()) + 1  # steps are numbered from 0
        return Totals(ran, **{name: self.recording.meta.get(name, 0) for name in COUNTED})

    @property
    def summary(self) -> str:
        """The summary of the run as text."""
        return summary(self.incidents, self.totals)

    @property
    def causes(self) -> Counter[str]:
        """Number of incidents by cause and place."""
        return Counter(why(incident) for incident in self.incidents)


def heights(values: Sequence[float]) -> list[float]:
    """Return where each value lies from the lowest, 0, to the highest, 1; 0 if all are equal."""
    half = [value / 2 for value in values]  # the difference of any two is finite
    low = min(half, default=0.0)
    span = max(half, default=0.0) - low
    return [(value - low) / span if span else 0.0 for value in half]
