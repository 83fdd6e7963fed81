"""Why a step was refused, and what that changes for the next one."""

from __future__ import annotations

from typing import Any, Literal

from keras_nanguard._backends.shared import batches
from keras_nanguard._core import finiteness
from keras_nanguard._core.data import argument_path, named
from keras_nanguard._core.incident import Finding, Incident
from keras_nanguard._core.literals import Site
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._fit.overflow import is_ordinary
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.trial import tried
from keras_nanguard._keras import layers as keras_layers, variables as keras_variables
from keras_nanguard._policy.decide import is_of_data


def findings_in_batch(report: Report | None, model: Any) -> list[Finding]:
    """Return findings for inputs and targets of a step by the user's names: `x`, `x/age`, `y`."""
    if report is None or report.batch is None:
        return []
    findings, names = [], keras_layers.input_names(model)
    for part in batches.parts(report.batch):
        nan, infs, size = finiteness.counts(keras_variables.dense(part.value))
        if nan or infs:
            site: Site = "inputs" if part.role == "inputs" else "targets"
            place = named(argument_path(part.path), names)
            findings.append(Finding(site, "nonfinite", place, nan, infs, size))
    return findings


Refusal = Literal["left_by_previous", "overflow", "incident"]
"""Why a step was refused: for the state that the step before has left; for an ordinary overflow
under dynamic loss scaling; for anything else.
"""


class Refusals:
    """Tells why a step was refused, and what that changes for the next one."""

    def __init__(self, run: Run):
        self._run = run
        # The last step that has left NaN in the state of this process alone.
        self._postponed: int | None = None
        self._unexplained: int | None = None  # the last step refused with a finite batch
        # Numbers of committed steps and rollbacks when a step was last refused for a divergence:
        # as long as they are the same, the state is still bad, for any batch.
        self._diverged: tuple[int, int] | None = None

    def postponed(self, verdict: Verdict) -> Verdict:
        """Return a verdict as all other processes have it: this one alone has NaN in its state.

        It acts once the others see it, too.
        """
        self._postponed = self._run.step
        return verdict._replace(statistics=0.0, weights=0.0, slots=0.0)

    def classify(self, verdict: Verdict, report: Report | None) -> Refusal:
        """Count the overflows in a row; return why a step was refused, in any of the processes."""
        run = self._run
        by_previous = report is not None and report.left_by_previous
        by_previous |= self._postponed == run.step - 1
        overflows = bool(run.train_state().scales) and verdict.only_gradients
        streak = run.counts.continue_streak(overflows)
        ordinary = overflows and not findings_in_batch(report, run.model)
        ordinary = ordinary and is_ordinary(run, streak, verdict.scale)
        by_previous, incident = run.agreement.any_of(by_previous, not ordinary)
        if by_previous:
            return "left_by_previous"
        return "incident" if incident else "overflow"

    def findings(self, verdict: Verdict, report: Report | None) -> list[Finding]:
        """Return the findings of a refused step: in its batch, its state and its loss scale."""
        run, scaling = self._run, self._run.policy.loss_scale
        of_batch, of_state = findings_in_batch(report, run.model), run.scan(before=True)
        if of_batch:  # then finite numbers of the state explain nothing, however large they are
            of_state = [finding for finding in of_state if finding.kind == "nonfinite"]
        findings = [*of_batch, *of_state, *(report or Report(verdict, (), ())).findings()]
        scaled = verdict.scale != 1.0  # it is 1 without a loss scale
        if scaled and scaling.is_too_high(verdict.scale, run.history.scale):
            findings.append(Finding("loss_scale", "out_of_range", value=verdict.scale))
        return findings

    def prepare_next(
        self, incident: Incident, step: int, args: Any, state: tuple[int, int]
    ) -> None:
        """Prepare for the next step after the incident of a refused one: without the random numbers
        or the batch that are to blame.

        Args:
            args: its arguments, `None` if they are gone.
            state: the numbers of committed steps and rollbacks before the incident.
        """
        run, back = self._run, "rollback" in incident.changes
        if not is_of_data(incident) or incident.bad_at_start:
            again = step - 1 == self._unexplained
            # A rollback has advanced the random generators, or restored them to replay steps.
            if not back and (again or self._is_bad_by_noise(args)):
                run.advance_generators()  # else the next step draws the same noise once more
            self._unexplained = step
        if incident.diverged:
            self._diverged = state
        elif not back and (is_of_data(incident) or self._diverged != state):
            run.recent.mark_bad(incident.step)  # after a rollback it is gone, or good in a replay

    def _is_bad_by_noise(self, args: Any) -> bool:
        """Whether the random numbers of a refused step made it bad."""
        if args is None or not keras_variables.seeds(self._run.train_state().other):
            return False
        return tried(self._run, lambda trying: trying.is_bad_by_noise(args), False)
