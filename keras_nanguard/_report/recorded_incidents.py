"""The incidents in a recording, for runs that have no log of incidents, or a damaged one."""

from __future__ import annotations

from keras_nanguard._core.errors import NanGuardError
from keras_nanguard._core.incident import Incident
from keras_nanguard._recording.recording import Recording

__all__ = ["incidents"]


def incidents(recording: Recording, strict: bool = True) -> list[tuple[Incident, int]]:
    """Return each incident with its step in the recording.

    Args:
        recording: the recording of a run.
        strict: whether an unreadable incident is an error; else it is skipped.

    Raises:
        FileFormatError: if one is damaged, or of a newer version.
    """
    found = []
    for event in recording.events:
        if event.kind == "incident":
            try:
                found.append((Incident.from_dict(event.data), event.step))
            except NanGuardError:
                if strict:
                    raise
    return found
