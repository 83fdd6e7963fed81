"""Why a step was refused, and what that changes for the next one.

Overflows of float16 gradients that dynamic loss scaling handles alone, by lowering the scale, are
no incidents. A trial shows whether a step is finite at another loss scale.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from keras_nanguard._backends import current
from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.rules import MIN_LOSS_SCALE
from keras_nanguard._core import finiteness
from keras_nanguard._core.data import argument_path, named
from keras_nanguard._core.incident import Finding, Incident
from keras_nanguard._core.literals import Site
from keras_nanguard._core.verdict import Report, Verdict
from keras_nanguard._fit.run import Run
from keras_nanguard._fit.trial import Trial, tried
from keras_nanguard._keras import (
    arrays as keras_arrays,
    layers as keras_layers,
    variables as keras_variables,
)
from keras_nanguard._keras.all_or_none import write_all
from keras_nanguard._policy.decide import is_of_data

MUCH_HIGHER = 2.0**10
"""Factor by which a loss scale below the floor has to be too low to be a collapse. Dynamic scaling
takes 20,000 steps for ten doublings, and the gradients of ordinary batches differ by less.
"""


def findings_in_batch(report: Report | None, model: Any) -> list[Finding]:
    """Return findings for inputs and targets of a step by the user's names: `x`, `x/age`, `y`."""
    if report is None or report.batch is None:
        return []
    findings, names = [], keras_layers.input_names(model)
    for part in batches.parts(report.batch):
        nan, infs, size = finiteness.counts(keras_arrays.dense(part.value))
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
        self._overflows = range(0)  # the last float16 overflows in a row
        # The state (`Counts.state`) for which a step was last refused for a divergence: it is bad
        # for any batch.
        self._diverged: tuple[int, int] | None = None

    def postponed(self, verdict: Verdict) -> Verdict:
        """Return a verdict as all other processes have it: this one alone has NaN in its state.

        It acts once the others see it, too.
        """
        self._postponed = self._run.step
        return verdict._replace(statistics=0.0, weights=0.0, slots=0.0)

    def classify(self, verdict: Verdict, report: Report | None, arguments: Any) -> Refusal:
        """Count the overflows in a row; return why a step with these arguments was refused, in any
        of the processes.
        """
        run = self._run
        by_previous = report is not None and report.left_by_previous
        by_previous |= self._postponed == run.step - 1
        overflows = bool(run.train_state().scales) and verdict.only_gradients
        first = self._overflows.start if self._overflows.stop == run.step else run.step
        self._overflows = range(first, run.step + 1) if overflows else range(0)
        ordinary = overflows and not findings_in_batch(report, run.model)
        ordinary = ordinary and self._is_ordinary(verdict.scale, arguments)
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

    def prepare_next(self, incident: Incident, args: Any, state: tuple[int, int]) -> None:
        """Prepare for the next step after the incident of a refused one: without the random numbers
        or the batch that are to blame.

        Args:
            args: its arguments, `None` if they are gone.
            state: that before the incident; see `Counts.state`.
        """
        run, step, back = self._run, incident.step, "rollback" in incident.changes
        if not is_of_data(incident) or incident.bad_at_start:
            again = step - 1 == self._unexplained
            # A rollback has advanced the random generators, or restored them to replay steps.
            if not back and (again or self._is_bad_by_noise(args)):
                # Else the next step draws the same noise once more.
                write_all(keras_variables.moved_seeds(run.train_state().other))
                current.host().advance_generator()
            self._unexplained = step
        if incident.diverged:
            self._diverged = state
        elif not back and (is_of_data(incident) or self._diverged != state):
            run.recent.mark_bad(step)  # after a rollback it is gone, or good in a replay

    def _is_bad_by_noise(self, args: Any) -> bool:
        """Whether the random numbers of a refused step made it bad."""
        seeds = keras_variables.seeds(self._run.train_state().other)
        if args is None or not seeds:
            return False

        def by_noise(trying: Trial) -> bool:
            others = {id(seed): value for seed, value in keras_variables.moved_seeds(seeds)}
            return not trying.is_finite(args) and trying.is_finite(args, others)

        return tried(self._run, by_noise, False)

    def _is_ordinary(self, scale: float, arguments: Any) -> bool:
        """Return whether dynamic loss scaling handles the last step, in which nothing but the
        gradients is bad.

        After a streak of such steps, or if the scale would fall below the floor, the step must also
        be finite at the lowest loss scale. Then another streak begins.

        Args:
            arguments: those of the step, as it has returned them.
        """
        run, streak = self._run, len(self._overflows)
        scaling, last_scale = run.policy.loss_scale, run.history.scale
        if streak == 1 and run.scan(before=True):
            return False
        if scaling.is_expected_overflow(streak, scale, last_scale):
            return True
        too_high = scaling.is_too_high(scale * 0.5, last_scale)
        ordinary = not too_high and _is_finite_at(run, MIN_LOSS_SCALE, arguments)
        if ordinary:
            self._overflows = range(0)
        return ordinary


# Loss scales


def needs_low_scale(run: Run) -> bool:
    """Return whether the loss scale is below the floor, and the last step overflows at one that is
    `MUCH_HIGHER`, and at least the floor.
    """
    scaling = run.policy.loss_scale
    if not scaling.action:
        return False  # then nobody asks
    with run.access.variables_readable():
        scales = [float(keras_variables.read(scale)) for scale, _ in run.train_state().scales]
    low = [scale for scale in scales if MIN_LOSS_SCALE <= scale < scaling.floor]
    if not low:
        return False
    higher = max(scaling.floor, MUCH_HIGHER * min(low))
    return not _is_finite_at(run, higher, run.recent.newest)


def _is_finite_at(run: Run, loss_scale: float, arguments: Any) -> bool:
    """Return whether the last step is finite at another loss scale, as far as is known."""
    args = run.replayable(arguments)
    if args is None:
        return False
    scales = [scale for scale, _ in run.train_state().scales]
    others = {id(scale): np.asarray(loss_scale, str(scale.dtype)) for scale in scales}
    return tried(run, lambda trying: trying.is_finite(args, others), False)
