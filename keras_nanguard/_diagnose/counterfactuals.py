"""Counterfactuals: the steps up to a bad one, rerun unchanged and with one change at a time.

The change that cures a failure identifies its cause: a divergence that a tenth of the learning rate
cures is due to the rate, one that only float32 cures to the dtype, one that disappears without
three rows to these rows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.replay import ReplayableStep
from keras_nanguard._core import finiteness
from keras_nanguard._diagnose.precision import in_float32, lowest
from keras_nanguard._diagnose.trials import standardized
from keras_nanguard._diagnose.words import at_rows
from keras_nanguard._keras import optimizers as keras_optimizers, variables as keras_variables
from keras_nanguard._keras.overrides import Overrides
from keras_nanguard._keras.train_state import TrainState

__all__ = ["Rerun", "counterfactual_results"]

STEPS_ALONE = 10
"""Number of steps on the bad batch alone, if no earlier batches are known."""

MIN_GROWTH = 10.0
"""Factor of the last loss over the first above which it is reported as growing."""


@dataclass(frozen=True)
class Rerun:
    """The initial state and the batches of the steps to rerun.

    Attributes:
        start: sets the model to the initial state.
        before: the arguments of the steps before the bad one; empty if they are not known.
        batch: the arguments of the bad step.
        rows: rows of its batch that are to blame.
        since: index of the first step after the initial state.
        exact: whether no step between the initial state and the bad one is missing.
    """

    start: Callable[[], None]
    before: Sequence[Any]
    batch: Any
    rows: tuple[int, ...] = ()
    since: int = 0
    exact: bool = False

    def description(self) -> str:
        """Return in words which steps are rerun."""
        if not self.before:
            return f"{STEPS_ALONE} steps on the batch"
        missing = "" if self.exact else ", without steps that are no longer known"
        start = f"before step {self.since + 1}" if self.since else "before the first step"
        return f"the {len(self.before) + 1} steps from the state {start}{missing}"


def counterfactual_results(step: ReplayableStep, rerun: Rerun) -> Iterator[tuple[str, str]]:
    """Yield `(change, result)` of each rerun, and at the end which changes cure the failure."""
    cures: list[str] = []
    yield "unchanged", f"{rerun.description()}: {_outcome(step, rerun)[1]}"
    for change, (cured, result) in _changes(step, rerun):
        cures += [change] * cured
        yield change, result
    yield "cured by", "; ".join(cures) or "none of these changes"


Outcome = tuple[bool, str]
"""Whether the rerun is healthy, and its result in words."""


def _changes(step: ReplayableStep, rerun: Rerun) -> Iterator[tuple[str, Outcome]]:
    with _rates(step, 0.1):
        yield "with a tenth of the learning rate", _outcome(step, rerun)
    with _clipped(step):
        yield "with gradients clipped to a global norm of 1", _outcome(step, rerun)
    if lowest(step.model):
        with in_float32(step.model, step.variables(), step.optimizers):
            yield "in float32", _outcome(step, rerun)
    if rerun.rows and len(rerun.rows) < batches.row_count(rerun.batch):
        yield (
            f"without {at_rows(rerun.rows)}",
            _outcome(step, rerun, last=lambda batch: batches.without(batch, rerun.rows)),
        )
    scaled = "with inputs and targets scaled to unit standard deviation"
    yield scaled, _outcome(step, rerun, each=lambda batch: batches.mapped(batch, standardized))


def _outcome(
    step: ReplayableStep,
    rerun: Rerun,
    each: Callable[[Any], Any] = lambda batch: batch,
    last: Callable[[Any], Any] = lambda batch: batch,
) -> Outcome:
    """Rerun the steps, with `each` applied to every batch and `last` to the bad one."""
    sequence = [*rerun.before, rerun.batch] if rerun.before else [rerun.batch] * STEPS_ALONE
    losses: list[float] = []
    with step.preserved():
        rerun.start()
        for number, batch in enumerate(sequence, 1):
            batch = each(batch)
            losses.append(
                step.train(last(batch) if number == len(sequence) or not rerun.before else batch)
            )
            if not math.isfinite(losses[-1]):
                return False, f"the loss is not finite at step {number} of {len(sequence)}"
        bad = _bad_weight(step)
    if bad:
        return False, f"the loss stays finite, but {bad} does not"
    grown = abs(losses[-1]) > MIN_GROWTH * abs(losses[0]) + 1e-12
    return (
        not grown,
        (
            f"the loss {'grows' if grown else 'stays finite,'} from {losses[0]:.3g} to"
            f" {losses[-1]:.3g}"
        ),
    )


def _bad_weight(step: ReplayableStep) -> str:
    """Return the path of the first weight that is not finite, `""` if all are finite."""
    weights = TrainState.of(step.model, step.optimizers).trainable
    return next(
        (str(v.path) for v in weights if not finiteness.is_finite(keras_variables.view(v))), ""
    )


@contextlib.contextmanager
def _rates(step: ReplayableStep, factor: float) -> Iterator[None]:
    with Overrides() as overrides:
        for optimizer in map(keras_optimizers.inner, step.optimizers):
            keras_optimizers.set_rate(optimizer, lambda rate: rate() * factor, overrides)
        yield


@contextlib.contextmanager
def _clipped(step: ReplayableStep) -> Iterator[None]:
    with Overrides() as overrides:
        for optimizer in map(keras_optimizers.inner, step.optimizers):
            for name, value in (("clipnorm", None), ("clipvalue", None), ("global_clipnorm", 1.0)):
                overrides.set(optimizer, name, value)
        yield
