"""Counterfactuals: the steps up to a bad one, rerun unchanged and with one change at a time.

The change that cures a failure identifies its cause: a divergence that a tenth of the learning rate
cures is due to the rate, one that only float32 cures to the dtype, one that disappears without
three rows to these rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.replay import ReplayableStep
from keras_nanguard._diagnose.precision import in_float32, lowest
from keras_nanguard._diagnose.trials import Start, standardized, train_from
from keras_nanguard._diagnose.words import at_rows
from keras_nanguard._keras import optimizers as keras_optimizers
from keras_nanguard._keras.overrides import Overrides

__all__ = ["STEPS_ALONE", "counterfactuals"]

STEPS_ALONE = 10
"""Number of steps on the bad batch alone, if no earlier batches are known."""

MIN_GROWTH = 10.0
"""Factor of the last loss over the first above which it is reported as growing."""


def counterfactuals(
    step: ReplayableStep, start: Start, sequence: Sequence[Any], rows: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Yield `(change, result)` of each rerun, and at the end which changes cure the failure.

    Args:
        step: the step.
        start: the state before the first of the steps.
        sequence: the arguments of each step, the bad one last.
        rows: rows of its batch that are to blame.
    """
    cures: list[str] = []
    for change, (healthy, result) in _reruns(step, start, sequence, rows):
        yield change, result
        cures += [change] * (healthy and change != "unchanged")
    yield "cured by", "; ".join(cures) or "none of these changes"


def _reruns(
    step: ReplayableStep, start: Start, sequence: Sequence[Any], rows: Sequence[int]
) -> Iterator[tuple[str, tuple[bool, str]]]:
    """Yield each change, whether the rerun is healthy, and its result in words."""
    yield "unchanged", _outcome(step, start, sequence)
    with Overrides() as overrides:
        for optimizer in map(keras_optimizers.inner, step.optimizers):
            keras_optimizers.set_rate(optimizer, lambda rate: rate() * 0.1, overrides)
        yield "with a tenth of the learning rate", _outcome(step, start, sequence)
    with Overrides() as overrides:
        for optimizer in map(keras_optimizers.inner, step.optimizers):
            for name, value in (("clipnorm", None), ("clipvalue", None), ("global_clipnorm", 1.0)):
                overrides.set(optimizer, name, value)
        yield "with gradients clipped to a global norm of 1", _outcome(step, start, sequence)
    if lowest(step.model):
        with in_float32(step.model, step.variables(), step.optimizers):
            yield "in float32", _outcome(step, start, sequence)
    bad = sequence[-1]
    if rows and len(rows) < batches.row_count(bad):
        rest = batches.without(bad, rows)
        cleaned = [rest if batch is bad else batch for batch in sequence]
        yield f"without {at_rows(rows)}", _outcome(step, start, cleaned)
    scaled = [batches.mapped(batch, standardized) for batch in sequence]
    change = "with inputs and targets scaled to unit standard deviation"
    yield change, _outcome(step, start, scaled)


def _outcome(step: ReplayableStep, start: Start, sequence: Sequence[Any]) -> tuple[bool, str]:
    losses, bad_weight = train_from(step, start, sequence)
    if not math.isfinite(losses[-1]):
        return False, f"the loss is not finite at step {len(losses)} of {len(sequence)}"
    if bad_weight:
        return False, f"the loss stays finite, but {bad_weight} does not"
    grown = abs(losses[-1]) > MIN_GROWTH * abs(losses[0]) + 1e-12
    course = "grows" if grown else "stays finite,"
    return not grown, f"the loss {course} from {losses[0]:.3g} to {losses[-1]:.3g}"
