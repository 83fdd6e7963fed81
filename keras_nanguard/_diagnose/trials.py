"""The examination of a refused step: its replay, then the trials, each of which replays it with one
change and answers one question. A trial runs only if its result can decide the cause.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_nanguard._backends.shared import batches
from keras_nanguard._backends.shared.replay import preserved
from keras_nanguard._core import finiteness
from keras_nanguard._diagnose.case import (
    Case,
    at_state,
    computing_in_float32,
    standardized,
    suspects,
)
from keras_nanguard._diagnose.causes import SCALE_TOO_HIGH
from keras_nanguard._diagnose.evidence import HUGE_DATA, LARGE_DATA, Evidence, TargetFault
from keras_nanguard._diagnose.growth import JUMP
from keras_nanguard._diagnose.targets import (
    classes_of,
    negative_loss,
    rejected,
    targets_by_loss,
)
from keras_nanguard._keras import (
    arrays as keras_arrays,
    layers as keras_layers,
    variables as keras_variables,
)
from keras_nanguard._keras.train_state import TrainState

TRIAL_STEPS = 6
"""Number of steps of the trial that restarts with scaled data."""

EARLY = 50
"""Step up to which a failure counts as one of the first steps."""


def examine(case: Case) -> Evidence:
    """Return the evidence of a case with the results of a replay and, unless its step has committed
    or its state was bad before, which decides, of all trials.
    """
    case, e = _replayed(case), case.evidence
    decides = not e.incident.refused or bool(e.state)
    return (case if decides else run_trials(case)).evidence


def _replayed(case: Case) -> Case:
    """Replay the step eagerly and, if that is finite, in the mode in which it was compiled."""
    run, mode = case.step.run(case.batch, observe=True, update=True), case.evidence.mode
    if not run.finite:
        return case.with_run(run, run.word)
    again = run if mode == "eager" else case.step.run_compiled(case.batch, jit=mode == "xla")
    return case.with_run(again if again.first else run, run.word, again.word)


def run_trials(case: Case) -> Case:
    """Return a replayed case with the problem of its targets and, if the replay is bad, the results
    of all trials.
    """
    case = case.with_trials(target_fault=_targets(case))
    if case.evidence.bad_site and not case.evidence.replay.error:
        for trial in TRIALS:
            case = case.with_trials(**trial(case))
    return case


# The trials


def _targets(case: Case) -> TargetFault | None:
    """Return the first problem of the targets, with the proof that it is the reason for the
    failure; the outputs have the shapes of a replay if it has any.
    """
    model = case.step.model
    outputs = case.evidence.replay.output_shapes or keras_layers.output_shapes(model)
    found = targets_by_loss(model, case.batch, outputs)
    for output, loss, part, shape in found:
        wrong = None if part is None else rejected(loss, part.array, classes_of(loss, shape))
        if part is not None and wrong is not None:
            output, proof = output if len(found) > 1 else "", _proof(case, part, wrong.valid)
            return TargetFault(str(loss.name), output, wrong.rows, wrong.clause, proof)
    return None


def _proof(case: Case, part: batches.Part, valid: finiteness.Array) -> str:
    """Return why the targets in a part of the batch are the reason for the failure, as a sentence:
    with `valid` ones the step is finite, or the loss has only fallen, to below where it has a
    minimum with probabilities as targets. `""` if neither is known.
    """
    e, growth = case.evidence, case.evidence.growth
    if e.bad_site == "outputs" or not (e.bad_site or e.replay.error):
        return ""
    if valid.shape == tuple(part.value.shape):
        given = keras.ops.cast(valid, keras.backend.standardize_dtype(part.value.dtype))

        def corrected(role: str, value: Any) -> Any:
            return given if role == part.role and value is part.value else value

        if case.again(batches.mapped(case.batch, corrected)).finite:
            return "With targets in the range of the loss the same step is finite."
    farthest = max(growth.losses, key=abs, default=0.0)
    # A rate that is too high makes it rise first. Later, the sign of a huge loss is chance.
    large = (v for v in growth.losses if abs(v) * growth.loss > JUMP * abs(farthest))
    first = next(large, farthest)
    negative = negative_loss(case.step.model, [first]) if e.grown() else None
    return "" if negative is None else negative.proof


def _in_float32(case: Case) -> dict[str, Any]:
    """Is the step finite in float32?"""
    if not case.evidence.low_precision:
        return {}
    with computing_in_float32(case.step):
        return {"float32": case.step.run(case.batch, update=True).word}


def _unscaled(case: Case) -> dict[str, Any]:
    """Is the step finite with a loss scale of 1? Only a step of the user scales the loss itself."""
    state, e = TrainState.of(case.step.model, case.step.optimizers), case.evidence
    scales = [scale for scale, _ in state.scales]
    in_loss = e.bad_site == "loss" and (e.loss_scale or 0.0) > SCALE_TOO_HIGH
    if not scales or not (in_loss or e.bad_site == "gradients"):
        return {}
    with preserved(scales):
        for scale in scales:
            keras_variables.write(scale, np.ones((), "float32"))
        return {"unscaled": case.step.run(case.batch).word}


def _without_rows(case: Case) -> dict[str, Any]:
    """Is the step finite without some rows?"""
    for rows in suspects(case):
        some = 0 < len(rows) < case.evidence.batch.count
        if some and case.again(batches.without(case.batch, rows)).finite:
            return {"rows": rows, "without_rows": "finite"}
    return {}


def _at_start(case: Case) -> dict[str, Any]:
    """Does the batch overflow on the initial state, too, or only after the first steps?"""
    e = case.evidence
    if case.start is None or e.batch.inputs_bad or e.batch.targets_bad or e.grown():
        return {}
    if not 0 < e.incident.step <= EARLY or e.mechanism not in ("exp", "overflow"):
        return {}
    with at_state(case.step, case.start):
        return {"at_start": case.again(case.batch).word}


def _in_inference(case: Case) -> dict[str, Any]:
    """Is the forward pass finite in inference mode?"""
    origin, data = case.evidence.replay.origin, case.batch[0] if len(case.batch) == 1 else None
    forward = origin.phase == "forward" and origin.source == "operation"
    if case.evidence.trials.inference or not forward or not isinstance(data, tuple):
        return {}
    with case.step.preserved():
        try:
            outputs = case.step.model(data[0], training=False)
        except Exception:  # noqa: BLE001  a custom model need not accept this call
            return {}
    arrays = (array for _, array in keras_arrays.named_arrays(outputs))
    return {"inference": "finite" if all(map(finiteness.is_finite, arrays)) else "bad"}


def _with_scaled_data(case: Case) -> dict[str, Any]:
    """Does training on this batch, from the initial state, diverge only if the data is unscaled?"""
    e, step, start = case.evidence, case.step, case.start
    largest = e.largest.max_abs
    if start is None or e.incident.step > EARLY or largest < LARGE_DATA:
        return {}
    if e.mechanism == "pole" or not e.grown():
        return {}

    def growth(batch: Any) -> float:
        """Return the factor by which the loss grows over a few steps, infinite if it overflows."""
        with at_state(step, start, rates=True):
            losses: list[float] = []
            while len(losses) < TRIAL_STEPS and all(map(math.isfinite, losses)):
                losses.append(abs(step.train(batch)))
        finite = all(map(math.isfinite, losses)) and losses[0]
        return losses[-1] / losses[0] if finite else math.inf

    scale = functools.partial(standardized, ids=not keras_layers.takes_floats(step.model))
    plain, scaled = growth(case.batch), growth(batches.mapped(case.batch, scale))
    cured = (plain >= 1e2 and scaled < 1e1) or (largest >= HUGE_DATA and scaled < plain / 1e3)
    return {"rescaled": "finite" if cured else "bad"}


TRIALS: tuple[Callable[[Case], dict[str, Any]], ...] = (
    _in_float32,
    _unscaled,
    _without_rows,
    _at_start,
    _in_inference,
    _with_scaled_data,
)
"""The trials in order: each returns fields of `TrialFacts`, none if it is not needed."""
