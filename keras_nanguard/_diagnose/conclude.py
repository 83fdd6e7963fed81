"""From evidence to the diagnosis that the user reads. Pure functions."""

from __future__ import annotations

from keras_nanguard._core.evidence import Evidence
from keras_nanguard._core.incident import Diagnosis
from keras_nanguard._diagnose.advice import advice
from keras_nanguard._diagnose.causes import decide
from keras_nanguard._diagnose.words import sentences

__all__ = ["conclude"]


def conclude(evidence: Evidence) -> Diagnosis:
    """Return the diagnosis that the evidence supports."""
    verdict = decide(evidence)
    return Diagnosis(
        verdict.cause,
        verdict.culprit,
        verdict.samples,
        sentences(evidence, verdict),
        advice(evidence, verdict),
        verdict.confidence,
        verdict.because == "rescaled",
    )
