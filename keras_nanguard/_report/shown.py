"""What reports show of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from keras_nanguard._core.incident import Incident
from keras_nanguard._recording.database import OVERFLOW, REFUSED
from keras_nanguard._recording.recording import Recording
from keras_nanguard._report.console import why


@dataclass(frozen=True)
class ShownRun:
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
    def skipped(self) -> tuple[int, int]:
        """Numbers of skipped steps and of ordinary float16 overflows among them.

        Without a recording the incidents are counted.
        """
        if not len(self.recording):
            return sum(incident.refused for incident in self.incidents), 0
        steps, bins = self.recording.steps, self.recording.bins
        refused = int((steps["status"] == REFUSED).sum() + bins["refused"].sum())
        overflows = int((steps["status"] == OVERFLOW).sum() + bins["overflows"].sum())
        return refused + overflows, overflows

    @property
    def causes(self) -> Counter[str]:
        """Number of incidents by cause and place."""
        return Counter(why(incident) for incident in self.incidents)
