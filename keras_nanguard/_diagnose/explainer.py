"""From an incident to its diagnosis: replays the refused step, gathers evidence, and decides.

Every replay restores the state from before it. Nothing else here can break training: an error
inside becomes evidence of the cause `unknown`. If the state cannot be restored, training ends.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._backends.shared.batches import takes_iterator
from keras_nanguard._backends.shared.faults import without_faults
from keras_nanguard._backends.shared.replay import ReplayableStep
from keras_nanguard._core.errors import StateLostError
from keras_nanguard._core.incident import Diagnosis, Finding, Incident
from keras_nanguard._core.literals import NAMES_DATA, causes_with
from keras_nanguard._core.verdict import Report
from keras_nanguard._diagnose.advice import advice
from keras_nanguard._diagnose.case import Case, Start, at_state, obstacle_to
from keras_nanguard._diagnose.causes import decide
from keras_nanguard._diagnose.evidence import Evidence, TrialFacts, distinct, left_by_step
from keras_nanguard._diagnose.exceptions import explain_exception
from keras_nanguard._diagnose.growth import growth_before
from keras_nanguard._diagnose.incident_evidence import RunView, batch_facts, known_evidence
from keras_nanguard._diagnose.optimizers import is_by_other_code, negative_slot
from keras_nanguard._diagnose.sentences import data_sentences, sentences
from keras_nanguard._diagnose.targets import negative_loss
from keras_nanguard._diagnose.trials import examine
from keras_nanguard._keras import optimizers as keras_optimizers

FULL = 3
"""Incidents of one streak that are diagnosed in full; later ones with the same findings reuse the
result.
"""

ITERATOR = (
    "The step reads from an iterator, so a replay would take another batch from it. Pass the batch"
    " to the step as an argument."
)
"""Why a step is not replayed."""

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
            measured = Evidence(incident, _mode(run)) if earlier is None else None
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
            step, start = step_of(run), _start(run)
            if report is None or report.batch is None or start is None:
                return False
            if _obstacle(run, step, report.batch):
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


def gather(run: RunView, incident: Incident, report: Report | None) -> Evidence:
    """Return everything that can be measured about an incident."""
    train_state, values, refused = run.train_state(), incident.values, incident.refused
    batch, start = report and report.batch, _start(run)
    e = known_evidence(run.model, train_state, incident, batch)
    # The whole state was finite after the step before.
    finite_before = [good for good, _ in run.history.last(1)] == [incident.step - 1]
    written, notes = bool(e.state) and refused and finite_before, tuple[str, ...]()
    if e.bad_site:
        written = is_by_other_code(e, run.history, train_state)
        if negative := negative_slot(train_state):
            notes = (f"{negative} has negative values, whose roots in the update are NaN.",)
    own = (values.get("loss", math.nan), values.get("gradient_norm", math.nan))
    weights = () if left_by_step(incident) else train_state.trainable
    growth = growth_before(incident.step, run.history, own, weights, start)
    fault = None
    if report is None or report.verdict.finite:
        losses = [value for value in (*growth.losses, own[0]) if value == value]
        fault = negative_loss(run.model, losses)
    step = step_of(run) if refused and not e.state and batch is not None else None
    if step is not None and (obstacle := _obstacle(run, step, batch)):
        step, notes = None, (obstacle,)
    e = dataclasses.replace(
        e,
        mode=_mode(run),
        growth=growth,
        written=written,
        trials=TrialFacts(target_fault=fault),
        notes=notes,
    )
    return e if step is None else examine(Case(step, batch, e, start))


def _start(run: RunView) -> Start | None:
    """Return the state before the first step, `None` if it was not kept."""
    return None if run.ring.start is None else run.ring.start.value


def _obstacle(run: RunView, step: ReplayableStep, batch: Any) -> str:
    """Return why the step of a run cannot be replayed, as a sentence; `""` if it can."""
    reads = run.access.reads_iterator or takes_iterator(batch)
    return ITERATOR if reads else obstacle_to(step)


def step_of(run: RunView) -> ReplayableStep:
    """Return the step of a run, to be run again."""
    transaction, traced = run.access.transaction, run.train_state().optimizers
    return ReplayableStep(
        transaction.replayed,
        run.model,
        # A compiled step keeps an optimizer that the model has no more, an eager replay does not.
        list(dict.fromkeys((*traced, *keras_optimizers.find_optimizers(run.model)))),
        updates_first=transaction.learned.updates_first,
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
