"""The interface between a guarded run and its diagnosis."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Protocol

from keras_nanguard._core.history import History
from keras_nanguard._core.incident import Diagnosis, Finding, Incident
from keras_nanguard._core.verdict import Report
from keras_nanguard._keras.train_state import TrainState

__all__ = ["Explains", "GuardedRun", "NoExplainer"]


class GuardedRun(Protocol):
    """A guarded run, as a diagnosis reads it."""

    directory: str | None
    history: History
    ring: Any
    recent: Any
    transaction: Any

    @property
    def model(self) -> Any:
        """The guarded model."""

    @property
    def step(self) -> int:
        """How many train steps are complete."""

    @property
    def tolerated(self) -> Set[int]:
        """The `id` of each variable that may be infinite."""

    def train_state(self) -> TrainState:
        """Return the train state of this moment."""


class Explains(Protocol):
    """Diagnoses the incidents of one run. Nothing in it raises."""

    def __call__(
        self, run: GuardedRun, incident: Incident, report: Report | None
    ) -> Diagnosis | None:
        """Return why an incident happened."""

    def bundle(self, run: GuardedRun, incident: Incident, report: Report | None) -> str | None:
        """Write a bundle from which the step can be run again; returns its path, `None` if none was
        written.
        """

    def of_error(self, run: GuardedRun, error: BaseException) -> tuple[Finding, Diagnosis] | None:
        """Return finding and diagnosis for an exception raised inside of a step, `None` if it is
        not about numbers.
        """


class NoExplainer:
    """Diagnoses nothing."""

    def __call__(self, run: GuardedRun, incident: Incident, report: Report | None) -> None:
        """Return no diagnosis."""

    def bundle(self, run: GuardedRun, incident: Incident, report: Report | None) -> None:
        """Write no bundle."""

    def of_error(self, run: GuardedRun, error: BaseException) -> None:
        """Say nothing of an exception."""
