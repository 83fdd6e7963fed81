"""From an incident to its diagnosis: gathers evidence, which replays the refused step, and decides.

Every replay restores the state from before it. Nothing else here can break training: an error
inside becomes evidence of the cause `unknown`. If the state cannot be restored, training ends.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_nanguard._backends.shared.faults import without_faults
from keras_nanguard._core.errors import StateLostError
from keras_nanguard._core.incident import Diagnosis, Finding, Incident
from keras_nanguard._core.literals import NAMES_DATA, causes_with
from keras_nanguard._core.verdict import Report
from keras_nanguard._diagnose.advice import advice
from keras_nanguard._diagnose.causes import decide
from keras_nanguard._diagnose.evidence import Evidence, distinct
from keras_nanguard._diagnose.examination import at_state
from keras_nanguard._diagnose.exceptions import explain_exception
from keras_nanguard._diagnose.gathering import (
    RunView,
    batch_facts,
    gather,
    mode_of,
    obstacle_of,
    start_of,
    step_of,
)
from keras_nanguard._diagnose.sentences import data_sentences, sentences

FULL = 3
"""Incidents of one streak that are diagnosed in full; later ones with the same findings reuse the
result.
"""

MAX_FULL = 20
"""Incidents with the same findings that are diagnosed in full in one fit, streaks or not."""

REUSED = "Reused from an earlier step with the same findings."
"""First evidence of a diagnosis that was not made for the step itself."""

Signature = tuple[bool, tuple[tuple[str, str, str], ...]]
"""Whether a step was refused, and site, kind and path of each finding."""


class Explainer:
    """Diagnoses the incidents of one run.

    Args:
        say: prints a line, such as the reason why a bundle was not written.
    """

    def __init__(self, run: RunView, say: Callable[[str], None]) -> None:
        self.run, self._say = run, say
        self._last: tuple[Signature | None, int] = None, 0
        self._repeats = 0
        self._known: dict[Signature, Diagnosis] = {}
        self._full: Counter[Signature] = Counter()

    @np.errstate(all="ignore")  # the values are not finite
    def __call__(
        self, incident: Incident, report: Report | None
    ) -> tuple[Diagnosis, Evidence | None]:
        """Return the diagnosis of an incident, and the evidence for its bundle: no measurements if
        the diagnosis failed, `None` if that of an earlier incident is reused.

        Raises:
            StateLostError: if the state could not be restored after a replay.
        """
        run, signature = self.run, _signature(incident)
        earlier = self._earlier(signature, incident.step)
        try:
            with without_faults(run.model):
                if earlier is not None:
                    return self._with_own_rows(earlier, report), None
                evidence = gather(run, incident, report)
                found = diagnose_step(run.model, evidence, report and report.batch)
                self._known[signature] = found
                return found, evidence
        except StateLostError:
            raise
        except Exception as error:  # noqa: BLE001  a diagnosis that fails must not end training
            why = f"The diagnosis failed: {type(error).__name__}: {error}"
            measured = Evidence(incident, mode_of(run)) if earlier is None else None
            return Diagnosis("unknown", evidence=(why,)), measured

    @np.errstate(all="ignore")  # the values are not finite
    def write_bundle(
        self, incident: Incident, report: Report | None, evidence: Evidence | None
    ) -> str | None:
        """Write a bundle if the incident was diagnosed in full; returns its path, `None` if none
        was written.
        """
        batch = None if report is None else report.batch
        wanted = self.run.directory is not None and incident.refused
        if evidence is None or batch is None or not wanted:
            return None
        from keras_nanguard._diagnose.bundle import write

        try:
            return write(self.run, incident, batch, evidence)
        except Exception as error:  # noqa: BLE001  a full disk must not end training
            self._say(f"NanGuard: no bundle was written: {type(error).__name__}: {error}")
            return None

    @np.errstate(all="ignore")  # the values are not finite
    def is_bad_at_start(self, report: Report | None, update: bool) -> bool:
        """Return whether a refused step is bad from the state before the first step, too, so that
        no rollback can cure it.

        Args:
            update: whether a bad update counts, and not only bad gradients.

        Raises:
            StateLostError: if the state could not be restored after the replay.
        """
        run = self.run
        try:
            step, start = step_of(run), start_of(run)
            if report is None or report.batch is None or start is None:
                return False
            if obstacle_of(run, step, report.batch):
                return False
            with without_faults(run.model), at_state(step, start):
                return step.run(report.batch, update=update).word == "bad"
        except StateLostError:
            raise
        except Exception:  # noqa: BLE001  then a rollback may cure it
            return False

    def of_error(self, error: BaseException, args: Any) -> tuple[Finding, Diagnosis] | None:
        """Return finding and diagnosis for an exception raised inside of a step, or `None`.

        Args:
            args: the arguments of the step, if they are known.
        """
        try:
            return explain_exception(self.run.model, str(error), args)
        except Exception:  # noqa: BLE001  the user's exception is raised unchanged
            return None

    def _earlier(self, signature: Signature, step: int) -> Diagnosis | None:
        """Count an incident; return the diagnosis that it reuses, `None` if it is diagnosed in
        full.
        """
        last, last_step = self._last
        again = signature == last and step - last_step <= 1
        self._repeats = self._repeats + 1 if again else 1
        self._last = signature, step
        if signature in self._known and (self._repeats > FULL or self._full[signature] >= MAX_FULL):
            return self._known[signature]
        self._full[signature] += 1
        return None

    def _with_own_rows(self, known: Diagnosis, report: Report | None) -> Diagnosis:
        """Return an earlier diagnosis for an incident with the same findings, with its own bad
        rows, and with the evidence that names them in place of that of the earlier step.
        """
        rows: tuple[int, ...] = ()
        seen = known.evidence
        if report is not None and known.cause in NAMES_DATA & causes_with("batch"):
            batch = batch_facts(self.run.model, report.batch)
            rows = distinct(part.rows for part in (*batch.inputs_bad, *batch.targets_bad))
            seen = tuple(data_sentences(batch))
        return dataclasses.replace(known, samples=rows, evidence=(REUSED, *seen))


def _signature(incident: Incident) -> Signature:
    """Return what incidents have in common that share a diagnosis."""
    return incident.refused, tuple((f.site, f.kind, f.path) for f in incident.findings)


def conclude(evidence: Evidence) -> Diagnosis:
    """Return the diagnosis that the evidence supports."""
    conclusion = decide(evidence)
    return Diagnosis(
        conclusion.cause,
        conclusion.culprit,
        conclusion.samples,
        sentences(evidence, conclusion),
        advice(evidence, conclusion),
        conclusion.confidence,
        conclusion.diverged,
    )


def diagnose_step(model: Any, evidence: Evidence, batch: Any) -> Diagnosis:
    """Return the diagnosis that the evidence of a step supports: if its replay raises an exception,
    the one of this exception, if it has one.
    """
    failed = evidence.replay.result == "failed"
    found = explain_exception(model, evidence.replay.error, batch) if failed else None
    return conclude(evidence) if found is None else found[1]
