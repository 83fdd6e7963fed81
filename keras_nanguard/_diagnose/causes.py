"""From evidence to cause: rules in causal order. The first that applies decides.

A rule is a function of the evidence; its docstring has the evidence that each of its causes needs.
If no rule applies, the cause is `unknown`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from keras_nanguard._core.incident import rate_of
from keras_nanguard._core.literals import RESULT_SITES, Cause
from keras_nanguard._core.observations import BACKWARD, BadArray
from keras_nanguard._core.variable_names import CELLS, RECURRENT
from keras_nanguard._diagnose.evidence import (
    GROWTH,
    HUGE_DATA,
    LARGE_DATA,
    MAX_NORM,
    MIN_WEIGHT_GROWTH,
    Evidence,
    OptimizerFacts,
    distinct,
)
from keras_nanguard._diagnose.growth import JUMP, Growth

SCALE_TOO_HIGH = 2.0**24
"""Loss scale above which every ordinary gradient overflows in float16."""

FAR = 1e3
"""Growth of the norm of all weights that is never ordinary."""

SEEN = 0.95
"""Confidence if the bad number was seen where it comes from: in the batch, the state, a learning
rate or a loss scale.
"""

SHOWN = 0.9
"""Confidence if an operation, or a replay with one change, shows the cause."""

EXPLAINED = 0.8
"""Confidence if the measurements explain the bad number, and no replay shows the cause."""

POSSIBLE = 0.6
"""Confidence if no measurement contradicts the cause."""


Because = Literal[
    "", "constant", "constraint", "dead", "divergence", "outlier", "rate", "recurrence", "rescaled",
    "scale_high", "written",
]  # fmt: skip
"""The observations that select sentences or advice: conditions (`when`) in `causes.toml`."""

BECAUSE: tuple[str, ...] = get_args(Because)


@dataclass(frozen=True, slots=True)
class Conclusion:
    """A cause, with its place, its rows, its confidence, and the observation that decided, if it
    makes a difference to the evidence or the advice.
    """

    cause: Cause
    culprit: str = ""
    samples: tuple[int, ...] = ()
    confidence: float = SHOWN
    because: Because = ""

    @property
    def diverged(self) -> bool:
        """Whether training has diverged, although the scale of the data is the cause."""
        return self.because == "rescaled"


def decide(evidence: Evidence) -> Conclusion:
    """Return the cause that the evidence supports."""
    for rule in RULES:
        if (found := rule(evidence)) is not None:
            return found
    return Conclusion("unknown", evidence.place, confidence=0.0)


# State


def _marker(e: Evidence) -> Conclusion | None:
    """The state before the step is finite as a whole, but the loss reads NaN from a variable: a NaN
    marker was read as a number.
    """
    if e.state or e.replay.origin.source != "variable" or e.bad_site != "loss":
        return None
    return Conclusion("state_nonfinite", e.replay.origin.op)


def _bad_state(e: Evidence) -> Conclusion | None:
    """Variables are bad before the step: `state_nonfinite`. Exceptions:

    - the step before had a learning rate without bounds: `optimizer_domain`,
    - they are finite, and the loss has jumped: `divergence`,
    - only moving statistics are bad, and only validation or prediction reads them:
      `batchnorm_statistics`.
    """
    if not e.state:
        return None
    path, _ = e.state[0]
    if e.incident.refused:
        if (rate := _unbounded_rate(e)) is not None:
            return rate
        if not e.found("state", "nonfinite") and e.growth.jump[0] >= GROWTH:
            return Conclusion("divergence", path, confidence=EXPLAINED)
    outside = any(site in e.kinds for site in RESULT_SITES)
    if outside and all(role == "statistics" for _, role in e.state):
        return Conclusion("batchnorm_statistics", path)
    because: Because = "written" if e.written else ""
    return Conclusion("state_nonfinite", path, confidence=SEEN, because=because)


def _modes(e: Evidence) -> Conclusion | None:
    """Inference is bad while training is finite, and the bad value is from BatchNormalization: only
    inference reads the moving statistics.
    """
    origin = e.replay.origin
    if e.trials.inference != "bad" or e.trials.training != "finite":
        return None
    if origin.layer_class != "BatchNormalization" and "moving_" not in origin.op:
        return None
    return Conclusion("batchnorm_statistics", origin.culprit)


# Checks between steps


def _committed(e: Evidence) -> Conclusion | None:
    """Findings in committed steps, which no replay has confirmed: their kind decides."""
    if e.replay.result or e.incident.refused:
        return None
    kinds = e.kinds
    path, statistics = e.bad_path, kinds.get("statistics")
    if "divergence" in kinds.values():
        return Conclusion("divergence", path, because="divergence")
    if statistics == "stuck":
        return Conclusion("training_flag", path)
    if statistics == "out_of_range" and e.grown():
        # They follow the activations, and other code that writes them changes no loss.
        return Conclusion("divergence", path, confidence=EXPLAINED)
    if statistics in ("spike", "out_of_range", "explosion"):
        return Conclusion("batchnorm_statistics", path)
    if kinds.get("loss_scale") in ("collapse", "out_of_range", "nonfinite"):
        return Conclusion("loss_scale_collapsed")
    if kinds.get("gradients") == "stuck":
        return _dead(e)
    if (fault := e.trials.target_fault) is not None:
        return Conclusion("target_out_of_range", fault.loss, fault.rows, EXPLAINED)
    if "explosion" in kinds.values():
        return Conclusion("divergence", path, confidence=EXPLAINED)
    return None


def _dead(e: Evidence) -> Conclusion:
    """Gradients that are exactly zero, in a model with float16."""
    if e.growth.jump[0] >= JUMP:
        return Conclusion("divergence", e.bad_path, confidence=EXPLAINED, because="dead")
    return Conclusion("float16_underflow", e.bad_path, confidence=POSSIBLE, because="dead")


# Refused steps


def _invalid_scale(e: Evidence) -> Conclusion | None:
    """The loss scale is 0, negative or not finite. A replay is finite, because the refusal has
    replaced the scale.
    """
    if e.loss_scale is None or 0.0 < e.loss_scale < math.inf:
        return None
    return Conclusion("loss_scale_collapsed", confidence=SEEN)


def _transient(e: Evidence) -> Conclusion | None:
    """The step is finite in an eager replay and in its own mode, and its batch is finite."""
    finite = e.replay.result == "finite" and e.replay.same_mode == "finite"
    if finite and not (e.batch.inputs_bad or e.batch.targets_bad):
        return Conclusion("transient", confidence=POSSIBLE)
    return None


def _batch(e: Evidence) -> Conclusion | None:
    """NaN or Inf is in the batch, and the bad value comes from there: `input_nonfinite` or
    `target_nonfinite`. If bad targets spoil the gradient of a finite loss, a `where` has masked
    them: `gradient_domain`.
    """
    inputs, targets = e.batch.inputs_bad, e.batch.targets_bad
    if e.replay.origin.source == "batch":
        return _from_batch(e)
    named = {row for part in inputs for row in part.rows}
    # If the step is finite with some of them, NaN is imputed, and something else is the cause.
    if named and named == set(e.trials.rows) and e.trials.without_rows == "finite":
        return Conclusion("input_nonfinite", inputs[0].name, _rows_of(e, inputs))
    if not e.replay.origin.source and e.bad_site != "weights":
        if inputs:
            return Conclusion("input_nonfinite", inputs[0].name, inputs[0].rows, EXPLAINED)
        if targets and e.bad_site in ("", "loss"):
            return Conclusion("target_nonfinite", targets[0].name, targets[0].rows, EXPLAINED)
    return None


def _from_batch(e: Evidence) -> Conclusion:
    name = e.replay.origin.op
    if name.startswith("inputs"):
        return Conclusion("input_nonfinite", name, _rows_of(e, e.batch.inputs_bad), SEEN)
    if e.batch.inputs_bad and not all(row.finite for row in e.replay.table):
        # Later operations may have dropped the bad inputs.
        rows = _rows_of(e, (*e.batch.inputs_bad, *e.batch.targets_bad))
        return Conclusion("input_nonfinite", e.batch.inputs_bad[0].name, rows, SEEN)
    rows = _rows_of(e, e.batch.targets_bad)
    if e.bad_site in ("loss", "statistics", ""):
        return Conclusion("target_nonfinite", name, rows, SEEN)
    last = e.replay.loss_parts[-1][0] if e.replay.loss_parts else "loss"
    return Conclusion("gradient_domain", last, rows, EXPLAINED)


def _rows_of(e: Evidence, found: Sequence[BadArray]) -> tuple[int, ...]:
    return distinct(part.rows for part in found) or e.trials.rows


def _targets(e: Evidence) -> Conclusion | None:
    """The loss does not accept the targets, and it is proven that this makes the step bad or has
    made training diverge.
    """
    fault = e.trials.target_fault
    if fault is None or not fault.proof:
        return None
    return Conclusion("target_out_of_range", fault.loss, fault.rows)


def _scale(e: Evidence) -> Conclusion | None:
    """The loss scale is above `SCALE_TOO_HIGH`, and the step is finite with a scale of 1; or it is
    below 1, the gradients are bad, and they are not known to be bad with a scale of 1.
    """
    scale, of_gradients = e.loss_scale, e.bad_site in ("gradients", "")
    if scale is None:
        return None
    if scale > SCALE_TOO_HIGH and e.trials.unscaled == "finite":
        return Conclusion("loss_scale_collapsed", because="scale_high")
    if scale < 1.0 and of_gradients and not e.batch.inputs_bad and e.trials.unscaled != "bad":
        return Conclusion("loss_scale_collapsed", confidence=EXPLAINED)
    return None


def _low_precision(e: Evidence) -> Conclusion | None:
    """The same step is finite in float32, and the failure is neither in the optimizer nor a
    divergence. A pole is an underflow, unless only the gradient has it and no zero explains it.
    bfloat16 has the range of float32: it can only underflow.
    """
    if not e.low_precision or e.trials.float32 != "finite":
        return None
    if e.bad_site in ("weights", "slots"):
        return None
    how = e.mechanism
    grown = e.growth.weights >= MIN_WEIGHT_GROWTH and not _of_rows(e)
    if how in ("overflow", "exp") and grown:
        return None
    by_zero = any(o.zero for o in e.replay.origin.operands)
    if how == "pole" and (e.bad_site != "gradients" or by_zero):
        return Conclusion("float16_underflow", e.place, e.trials.rows)
    if e.low_precision == "bfloat16":
        return None
    return Conclusion("float16_overflow", e.place, e.trials.rows)


def _outlier_row(e: Evidence) -> Conclusion | None:
    """A few rows are far larger than all others, and without them the step is finite."""
    if not e.few(e.trials.rows) or e.trials.without_rows != "finite":
        return None
    if e.mechanism not in ("", "overflow"):
        return None
    named = (part for part in e.floats if set(e.trials.rows) <= set(part.outliers))
    part = next((part for part in named if part.max_abs >= HUGE_DATA), None)
    if part is None:
        return None
    return Conclusion("input_scale", part.name, e.trials.rows, SHOWN, "outlier")


def _update(e: Evidence) -> Conclusion | None:
    """Gradients are finite, weights or slots after the update are not: `optimizer_domain`.
    Exceptions: after growth, unless the optimizer divides by zero, `divergence`; if neither update
    nor constraint can have produced the value, `state_nonfinite`.
    """
    if e.bad_site not in ("weights", "slots"):
        return None
    if (found := _unbounded_rate(e) or _input_scale(e)) is not None:
        return found
    if e.grown(10 * GROWTH) and not any(map(_divides_by_zero, e.optimizers)):
        return Conclusion("divergence", e.bad_path, confidence=EXPLAINED)
    by_optimizer = any(o.own for o in e.optimizers)
    own_code = e.replay.origin.line and not by_optimizer
    if e.constraint and (e.written or own_code):
        return Conclusion("optimizer_domain", e.bad_path, because="constraint")
    if e.written:
        # Gradients are finite, so the update has carried NaN from the slots into the weights.
        slots = (f.path for f in e.incident.findings if (f.site, f.kind) == ("slots", "nonfinite"))
        place = next(slots, e.bad_path)
        return Conclusion("state_nonfinite", place, confidence=EXPLAINED, because="written")
    return Conclusion("optimizer_domain", e.bad_path, confidence=EXPLAINED)


def _unbounded_rate(e: Evidence) -> Conclusion | None:
    """A learning rate is not finite or, from a schedule, far too high."""
    for o in e.optimizers:
        if o.rate_is_bad and (o.scheduled or not o.rate_is_finite):
            place = rate_of(o.name)
            return Conclusion("optimizer_domain", place, confidence=SEEN, because="rate")
    return None


def _divides_by_zero(facts: OptimizerFacts) -> bool:
    """Whether the divisor of an update can be 0: its epsilon rounds to 0, or it is a variance that
    cancels.
    """
    rounds_to_0 = facts.epsilon and facts.epsilon_in_dtype == 0.0
    return bool(rounds_to_0 or facts.settings.get("centered"))


def _divergence(e: Evidence) -> Conclusion | None:
    """Training has diverged: numbers grew over the previous steps until they overflowed, or the
    first steps moved the weights too far. It is `input_scale` if a Normalization layer has divided
    by a constant feature, or if the same steps with scaled data are healthy.
    """
    if not _blown(e) and not _moved_too_far(e):
        return None
    if _normalized(e):
        return Conclusion("input_scale", _normalized(e), (), EXPLAINED, "constant")
    if e.trials.rescaled == "finite" and e.largest.max_abs >= LARGE_DATA:
        return Conclusion("input_scale", e.largest.name, (), EXPLAINED, "rescaled")
    return Conclusion("divergence", e.place or e.bad_path, confidence=EXPLAINED)


def _blown(e: Evidence) -> bool:
    """Whether the growth explains the bad value: a pole or an exponential requires weights that
    have grown.
    """
    how, growth = e.mechanism, e.growth
    if how == "pole":
        far = growth.weights >= MIN_WEIGHT_GROWTH and max(growth.loss, growth.norm) >= GROWTH
        return far or growth.weights >= FAR
    if _of_rows(e):
        return False
    if how == "exp":
        return growth.weights >= 2.0 and e.grown()
    return _overflows(e) and e.grown()


def _of_rows(e: Evidence) -> bool:
    """Whether a few rows explain the bad value: without them the step is finite, and no growth is
    more than that of ordinary training, in which weights grow while the loss falls.
    """
    growth = e.growth
    ordinary = max(growth.loss, growth.norm) < JUMP and growth.weights < FAR
    return e.trials.without_rows == "finite" and e.few(e.trials.rows) and ordinary


def _overflows(e: Evidence) -> bool:
    """Whether large numbers have overflowed, in an operation or in the sum over the gradients."""
    exploded = not e.replay.origin.source and e.found("gradients", "explosion")
    return exploded or e.mechanism == "overflow"


def _moved_too_far(e: Evidence) -> bool:
    """Whether the first steps moved the weights so far that the whole batch overflows, which it did
    not initially.
    """
    far = e.trials.at_start == "finite" and e.growth.weights >= 1.5
    return far and e.mechanism in ("exp", "overflow") and not _of_rows(e)


def _normalized(e: Evidence) -> str:
    """Return the path of a Normalization layer with huge outputs, which constant features cause."""
    rows = [row for row in e.replay.table if row.layer_class == "Normalization"]
    return next((row.path for row in rows if max(-row.minimum, row.maximum) >= HUGE_DATA), "")


def _input_scale(e: Evidence) -> Conclusion | None:
    """Nothing has grown yet, and the numbers that overflow are huge in the data, or become huge in
    a Normalization layer; or this layer divides by zero.
    """
    origin, largest = e.replay.origin, e.largest
    squares = e.bad_site == "slots" and e.gradient_norm >= MAX_NORM  # of a committed step
    outliers = next((s.outliers for s in (*e.batch.inputs, *e.batch.targets) if s.outliers), ())
    by_rows = squares and e.few(outliers) and _was_steady(e.growth)
    if (_overflows(e) or squares) and (by_rows or not e.grown()) and largest.max_abs >= HUGE_DATA:
        return Conclusion("input_scale", largest.name, e.trials.rows or outliers, EXPLAINED)
    if _overflows(e) and _normalized(e):
        return Conclusion("input_scale", _normalized(e), (), EXPLAINED, "constant")
    divides = e.mechanism == "pole" and origin.phase == "forward"
    if divides and origin.layer_class == "Normalization":
        return Conclusion("input_scale", origin.culprit, e.trials.rows, EXPLAINED, "constant")
    return None


def _was_steady(growth: Growth) -> bool:
    """Whether neither loss nor gradients had grown before the step, which is not counted."""
    series = ([abs(value) for value in values] for values in (growth.losses, growth.norms))
    return all(max(values) < GROWTH * min(values) for values in series if values)


def _recurrence(e: Evidence) -> Conclusion | None:
    """Numbers overflow in a recurrent layer (or in a cell of one) or in the backward pass, without
    earlier growth: they grow within the step.
    """
    origin = e.replay.origin
    if e.mechanism != "overflow":
        return None
    running = {row.layer_class for row in e.replay.table if row.path in origin.frames}
    if origin.phase in BACKWARD or (RECURRENT | CELLS) & {origin.layer_class, *running}:
        return Conclusion("divergence", e.place, confidence=EXPLAINED, because="recurrence")
    return None


def _exploded(e: Evidence) -> Conclusion | None:
    """Every gradient is finite, but the sum of their squares overflows."""
    if e.bad_site != "gradients" or e.replay.origin.source or e.replay.result != "bad":
        return None
    return Conclusion("divergence", e.bad_path, confidence=POSSIBLE)


def _domain(e: Evidence) -> Conclusion | None:
    """An operation has finite operands and a bad result: `gradient_domain` in the backward pass, or
    if the forward pass masks the result; else `loss_domain` in a loss or regularizer, and
    `forward_domain` in a layer.
    """
    origin = e.replay.origin
    if origin.source != "operation":
        return None
    if origin.phase == "backward" or _masked(e):
        return Conclusion("gradient_domain", e.place or "loss", e.trials.rows)
    in_loss = origin.phase in ("loss", "regularizer") or not origin.frames
    if in_loss and e.bad_site in ("loss", "gradients"):
        return Conclusion("loss_domain", e.place, e.trials.rows)
    if origin.phase in ("forward", "slope"):
        return Conclusion("forward_domain", e.place, e.trials.rows)
    return None


def _masked(e: Evidence) -> bool:
    """Whether the bad value is masked in the loss (the unused branch of a `where`), but not in the
    gradient.
    """
    phases = ("forward", "loss", "regularizer", "slope")
    in_layer = e.replay.origin.phase in phases and all(row.finite for row in e.replay.table)
    return e.bad_site == "gradients" and in_layer


def _committed_growth(e: Evidence) -> Conclusion | None:
    """NaN or Inf in a committed step that was not replayed, after growth."""
    nonfinite = any(finding.kind == "nonfinite" for finding in e.incident.findings)
    if e.replay.result == "" and not e.incident.refused and e.grown() and nonfinite:
        return Conclusion("divergence", e.bad_path, confidence=POSSIBLE)
    return None


RULES: tuple[Callable[[Evidence], Conclusion | None], ...] = (
    _marker,
    _bad_state,
    _modes,
    _committed,
    _invalid_scale,
    _transient,
    _batch,
    _targets,
    _scale,
    _low_precision,
    _outlier_row,
    _update,
    _divergence,
    _input_scale,
    _recurrence,
    _exploded,
    _domain,
    _committed_growth,
)
"""The rules in causal order."""
