"""From an incident to its diagnosis: replays the refused step, gathers evidence, and decides.

Every replay restores the state from before it. Nothing here can break training: an error inside
becomes evidence of the cause `unknown`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import numpy as np

from keras_nanguard._backends import current, processes
from keras_nanguard._backends.shared.attach import LoopStep
from keras_nanguard._backends.shared.faults import without_faults
from keras_nanguard._backends.shared.replay import ReplayableStep
from keras_nanguard._core.incident import Diagnosis, Finding, Incident
from keras_nanguard._core.literals import NAMES_DATA, causes_with
from keras_nanguard._core.verdict import Report
from keras_nanguard._diagnose.advice import advice
from keras_nanguard._diagnose.causes import decide
from keras_nanguard._diagnose.changes import Start
from keras_nanguard._diagnose.configuration import negative_loss
from keras_nanguard._diagnose.evidence import BatchFacts, Evidence, distinct
from keras_nanguard._diagnose.facts import (
    RunView,
    committed_site,
    growth,
    known,
)
from keras_nanguard._diagnose.iterators import reads_iterator
from keras_nanguard._diagnose.raised import explained
from keras_nanguard._diagnose.sentences import data_sentences, sentences
from keras_nanguard._diagnose.trials import Case, investigated, is_bad_at_start
from keras_nanguard._diagnose.written import negative_slot, wrote_otherwise
from keras_nanguard._keras import optimizers as keras_optimizers

FULL = 3
"""Incidents of one streak that are diagnosed in full; later ones with the same findings reuse the
result.
"""

ITERATOR = (
    "The step reads from an iterator, so a replay would take another batch from it. Pass the batch"
    " to the step as an argument."
)
"""Why the step of a loop is not replayed."""

MAX_FULL = 20
"""Incidents with the same findings that are diagnosed in full in one fit, streaks or not."""

REUSED = "Reused from an earlier step with the same findings."
"""First evidence of a diagnosis that was not made for the step itself."""


class Explainer:
    """Diagnoses the incidents of one run.

    Args:
        says: whether to print a line if a bundle cannot be written.
    """

    def __init__(self, run: RunView, says: bool) -> None:
        self.run, self.says = run, says
        self._signature: Any = None
        self._repeats = self._last_step = 0
        self._known: dict[Any, Diagnosis] = {}
        self._full: Counter[Any] = Counter()

    @np.errstate(all="ignore")  # the values are not finite
    def __call__(
        self, incident: Incident, report: Report | None
    ) -> tuple[Diagnosis, Evidence | None]:
        """Return the diagnosis of an incident, and the evidence for its bundle: no measurements if
        the diagnosis failed, `None` if that of an earlier incident is reused. Never raises.
        """
        run, earlier = self.run, self._earlier(incident)
        try:
            with without_faults(run.model):
                if earlier is not None:
                    return self._taken_over(earlier, report), None
                evidence = gather(run, incident, report)
                found = diagnosed(run.model, evidence, report and report.batch)
                self._known[self._signature] = found
                return found, evidence
        except Exception as error:  # noqa: BLE001  a diagnosis that fails must not end training
            why = f"The diagnosis failed: {type(error).__name__}: {error}"
            measured = Evidence(mode=_mode(run)) if earlier is None else None
            return Diagnosis("unknown", evidence=(why,)), measured

    @np.errstate(all="ignore")  # the values are not finite
    def bundle(
        self, incident: Incident, report: Report | None, evidence: Evidence | None
    ) -> str | None:
        """Write a bundle if the incident was diagnosed in full; returns its path, `None` if none
        was written.
        """
        batch = None if report is None else report.batch
        wanted = self.run.directory is not None and incident.refused
        if evidence is None or batch is None or not wanted:
            return None
        from keras_nanguard._diagnose import bundle

        try:
            return bundle.write(self.run, incident, batch, evidence)
        except Exception as error:  # noqa: BLE001  a full disk must not end training
            if self.says:
                reason = f"{type(error).__name__}: {error}"
                processes.print_line(f"NanGuard: no bundle was written: {reason}")
            return None

    @np.errstate(all="ignore")  # the values are not finite
    def is_bad_at_start(self, report: Report | None, update: bool) -> bool:
        """Return whether a refused step is bad from the state before the first step, too, so that
        no rollback can cure it. Never raises.

        Args:
            update: whether a bad update counts, and not only bad gradients.
        """
        run = self.run
        try:
            if report is None or report.batch is None or _reads_iterator(run):
                return False
            case = Case(step_of(run), report.batch, Evidence(), _start(run))
            with without_faults(run.model):
                return is_bad_at_start(case, update)
        except Exception:  # noqa: BLE001  then a rollback may cure it
            return False

    def of_error(self, error: BaseException) -> tuple[Finding, Diagnosis] | None:
        """Return finding and diagnosis for an exception raised inside of a step, or `None`."""
        try:
            transaction = self.run.access.transaction
            batch = None if transaction.given is None else transaction.batch(transaction.given)
            return explained(self.run.model, str(error), batch)
        except Exception:  # noqa: BLE001  the user's exception is raised unchanged
            return None

    def _earlier(self, incident: Incident) -> Diagnosis | None:
        """Count an incident; return the diagnosis that it reuses, `None` if it is diagnosed in
        full.
        """
        signature = (incident.refused, tuple((f.site, f.kind, f.path) for f in incident.findings))
        again = signature == self._signature and incident.step - self._last_step <= 1
        self._repeats = self._repeats + 1 if again else 1
        self._signature, self._last_step = signature, incident.step
        if signature in self._known and (self._repeats > FULL or self._full[signature] >= MAX_FULL):
            return self._known[signature]
        self._full[signature] += 1
        return None

    def _taken_over(self, known: Diagnosis, report: Report | None) -> Diagnosis:
        """Return an earlier diagnosis for an incident with the same findings, with its own bad
        rows, and with the evidence that names them in place of that of the earlier step.
        """
        rows: tuple[int, ...] = ()
        seen = known.evidence
        if report is not None and known.cause in NAMES_DATA & causes_with("batch"):
            e = Case(step_of(self.run), report.batch, Evidence()).with_batch().evidence
            found = (*e.batch.inputs_bad, *e.batch.targets_bad)
            rows = distinct(part.rows for part in found)
            seen = tuple(data_sentences(e))
        return dataclasses.replace(known, samples=rows, evidence=(REUSED, *seen))


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


def diagnosed(model: Any, evidence: Evidence, batch: Any) -> Diagnosis:
    """Return the diagnosis that the evidence of a step supports: if its replay raises an exception,
    the one of this exception, if it has one.
    """
    failed = evidence.replay.result == "failed"
    found = explained(model, evidence.replay.error, batch) if failed else None
    return conclude(evidence) if found is None else found[1]


def gather(run: RunView, incident: Incident, report: Report | None) -> Evidence:
    """Return everything that can be measured about an incident."""
    train_state, values = run.train_state(), incident.values
    run.history.start(run.ring.snapshots, train_state.trainable)
    own = (values.get("loss", math.nan), values.get("gradient_norm", math.nan))
    found, refused = known(run.model, train_state, incident), incident.refused
    # The whole state was finite after the step before.
    finite_before = [good for good, _ in run.history.last(1)] == [incident.step - 1]
    written = bool(found.state) and refused and finite_before
    if found.first:
        written = wrote_otherwise(run, incident, train_state, found.run.optimizers)
        if negative := negative_slot(train_state):
            note = f"{negative} has negative values, whose roots in the update are NaN."
            found = dataclasses.replace(found, notes=(note,))
    weights = () if committed_site(incident) else train_state.trainable
    evidence = dataclasses.replace(
        found,
        state_fresh=run.step == 0 and not refused,
        mode=_mode(run),
        run=dataclasses.replace(
            found.run, growth=growth(run.history, incident.step, own, weights), written=written
        ),
    )
    if report is None or report.verdict.finite:
        losses = [value for value in (*evidence.run.growth.losses, own[0]) if value == value]
        batch = BatchFacts(target_fault=negative_loss(run.model, losses))
        evidence = dataclasses.replace(evidence, batch=batch)
    if report is None or report.batch is None:
        return evidence
    obstacle = ITERATOR if _reads_iterator(run) else ""
    return investigated(Case(step_of(run), report.batch, evidence, _start(run)), obstacle).evidence


def _start(run: RunView) -> Start | None:
    """Return the state before the first step, `None` if it was not kept."""
    return None if run.ring.start is None else run.ring.start.value


def _reads_iterator(run: RunView) -> bool:
    return isinstance(run.access, LoopStep) and reads_iterator(run.access.transaction.replayed)


def step_of(run: RunView) -> ReplayableStep:
    """Return the step of a run, to be run again."""
    transaction, traced = run.access.transaction, run.train_state().optimizers
    return ReplayableStep(
        transaction.replayed,
        run.model,
        # A compiled step keeps an optimizer that the model has no more, an eager replay does not.
        list(dict.fromkeys((*traced, *keras_optimizers.find_optimizers(run.model)))),
        keeps_undo=transaction.learned.keeps_undo,
        losses=transaction.losses,
        untracked=list(transaction.learned.untracked.values()),
        tolerated=run.tolerated,
        judged=transaction.judged,
    )


def _mode(run: RunView) -> str:
    """Return the mode in which a guarded step runs, `"eager"` if it cannot be replayed in that
    mode.
    """
    uncompiled = "eager" if getattr(run.model, "run_eagerly", False) else "graph"
    mode = "xla" if run.access.transaction.jit else uncompiled
    return mode if mode in current.replay().MODES else "eager"
