"""From evidence to cause: a list of rules in causal order, of which the first that applies decides;
else `unknown`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keras_nanguard._core.evidence import (
    BACKWARD,
    Constant,
    Evidence,
    OptimizerFacts,
    Origin,
    Spread,
)
from keras_nanguard._core.history import JUMP, RISE
from keras_nanguard._core.literals import Cause

EXPONENTIALS = frozenset({"Exp", "Expm1", "Sinh", "Cosh", "Softplus", "Pow"})
"""Operations that overflow for moderate operands."""

POLES = frozenset(
    (
        *("RealDiv", "Div", "TruncateDiv", "FloorDiv", "FloorMod", "Xdivy", "Reciprocal", "Inv"),
        *("Sqrt", "Rsqrt", "SqrtGrad", "RsqrtGrad", "ReciprocalGrad", "InvGrad"),
        *("Log", "Log1p", "Xlogy", "Xlog1py", "Lgamma", "Digamma", "Polygamma", "Zeta"),
        *("Betainc", "Igamma", "Softmax", "LogSoftmax"),
        *("Acos", "Asin", "Acosh", "Atanh", "Atan2", "Sin", "Cos", "Tan", "Erfinv", "Ndtri"),
        *("Cholesky", "MatrixInverse", "MatrixDeterminant", "LogMatrixDeterminant"),
        *("MatrixSolve", "Svd", "Qr"),
    )
)
"""Operations with points at which their value is not finite."""

RECURRENT = frozenset({"LSTM", "GRU", "SimpleRNN", "RNN", "Bidirectional", "StackedRNNCells"})
RECURRENT |= {"LSTMCell", "GRUCell", "SimpleRNNCell"}

MIN_WEIGHT_GROWTH = 20.0
"""Growth of the norm of all weights since the start above which it contributes to the failure."""

HUGE_DATA = 1e4
"""Magnitude above which inputs or targets alone explain a divergence in the first steps."""

LARGE_DATA = 1e3
"""Magnitude above which a trial is made whether they explain it."""

MAX_RATE = 1e3
"""Learning rate of a schedule above which the schedule is wrong."""

SCALE_TOO_HIGH = 2.0**24
"""Loss scale above which every ordinary gradient overflows in float16."""


@dataclass(frozen=True, slots=True)
class Conclusion:
    """A cause, with its place, its confidence, and the rule that decided."""

    cause: Cause
    culprit: str = ""
    samples: tuple[int, ...] = ()
    confidence: float = 0.9
    because: str = ""


def decide(evidence: Evidence) -> Conclusion:
    """Return the cause that the evidence supports."""
    for rule in RULES:
        found = rule(evidence)
        if found is not None:
            return found
    return Conclusion("unknown", _culprit(evidence), confidence=0.0)


def kind(origin: Origin | None) -> str:
    """Return how the value became non-finite: `"overflow"` of large numbers, `"exp"` of moderate
    ones, `"pole"`, or `""`.
    """
    if origin is None or origin.source != "operation":
        return ""
    largest = max((o.max_abs for o in origin.operands), default=0.0)
    if origin.op in ("RealDiv", "Div", "Xdivy") and len(origin.operands) > 1:
        below = origin.operands[1]
        return "pole" if below.zero or below.tiny or largest < _large(origin.dtype) else "overflow"
    if origin.op == "Pow":
        if largest >= _large(origin.dtype):  # a square, which PyTorch reports as Pow
            return "overflow"
        base = origin.operands[0] if origin.operands else None
        return "exp" if base is not None and base.max_abs > 50.0 else "pole"
    if origin.op in EXPONENTIALS:
        return "exp"
    if origin.op in POLES:
        return "pole"
    if any(o.infinite for o in origin.operands):
        return "pole"
    large = origin.dtype in ("float16", "bfloat16") or largest >= _large(origin.dtype)
    return "overflow" if large else "pole"


def _large(dtype: str) -> float:
    return 1e3 if dtype == "float16" else 1e15


def grown(e: Evidence, factor: float = 1e3) -> bool:
    """Whether loss, gradients or weights have grown over the previous steps."""
    growth = e.growth
    return growth.steps >= 1 and (
        growth.weights >= MIN_WEIGHT_GROWTH or growth.loss >= factor or growth.norm >= factor
    )


def _culprit(e: Evidence) -> str:
    if e.origin is not None and e.origin.source == "operation":
        inside = "loss" if e.origin.phase in ("loss", "forward", "regularizer") else e.first_path
        return e.origin.culprit or (e.origin.variables[0] if e.origin.variables else inside)
    return e.first_path


def _bad_state(e: Evidence) -> Conclusion | None:
    if not e.state:
        if e.origin is None or e.origin.source != "variable" or e.first != "loss":
            return None
        # A NaN marker was read as a number.
        return Conclusion("state_nonfinite", e.origin.op, confidence=0.9, because="state")
    if e.refused and (rate := _broken_rate(e)) is not None:  # in the step before
        return rate
    path, _ = e.state[0]
    finite = "state:nonfinite" not in e.sites
    if e.refused and finite and e.growth.jump[0] >= 1e3:  # in the steps before, not in this one
        return Conclusion("divergence", path, confidence=0.85, because="growth")
    only_statistics = all(r == "statistics" for _, r in e.state)
    outside = any(s.startswith(("validation", "predictions")) for s in e.sites)
    if only_statistics and outside:
        return Conclusion("batchnorm_statistics", path, because="state")
    return Conclusion("state_nonfinite", path, confidence=0.95, because="state")


def _modes(e: Evidence) -> Conclusion | None:
    """Inference is not finite while training is: only inference reads the moving statistics."""
    origin = e.origin
    if origin is None or e.inference != "bad" or e.training != "finite":
        return None
    if origin.layer_class != "BatchNormalization" and "moving_" not in origin.op:
        return None
    return Conclusion("batchnorm_statistics", origin.culprit, confidence=0.9, because="modes")


def _monitors(e: Evidence) -> Conclusion | None:
    """Findings in committed steps, whose kind alone decides the cause."""
    if e.replay or e.refused:
        return None
    kinds = {site.partition(":")[0]: site.partition(":")[2] for site in e.sites}
    path, statistics = e.first_path, kinds.get("statistics")
    if "divergence" in kinds.values():
        return Conclusion("divergence", path, confidence=0.9, because="divergence")
    if statistics == "stuck":
        return Conclusion("training_flag", path, because="stuck")
    if statistics == "out_of_range" and grown(e):
        # They follow the activations, and other code that writes them changes no loss.
        return Conclusion("divergence", path, confidence=0.8, because="statistics")
    if statistics in ("spike", "out_of_range", "explosion"):
        return Conclusion("batchnorm_statistics", path, because="statistics")
    if kinds.get("loss_scale") in ("collapse", "out_of_range", "nonfinite"):
        return Conclusion("loss_scale_collapsed", because="scale")
    if "stuck" in (kinds.get("gradients"), kinds.get("weights")):
        return _dead(e)
    if (fault := e.target_fault) is not None:
        return Conclusion("target_out_of_range", fault.loss, fault.rows, 0.8, "negative")
    if "explosion" in kinds.values():
        return Conclusion("divergence", path, confidence=0.85, because="explosion")
    if "spike" in kinds.values():
        return Conclusion("spike", path, _outliers(e), confidence=0.8, because="spike")
    return None


def _dead(e: Evidence) -> Conclusion:
    """Gradients or weights that no longer change."""
    jump, path = e.growth.jump[0], e.first_path
    if jump >= JUMP:
        return Conclusion("divergence", path, confidence=0.8, because="dead")
    if e.low_precision == "float16":
        return Conclusion("float16_underflow", path, confidence=0.7, because="dead")
    cause: Cause = "divergence" if jump >= RISE and path else "unknown"
    return Conclusion(cause, path, confidence=0.6, because="dead")


def _outliers(e: Evidence) -> tuple[int, ...]:
    """Return the outliers among the rows of the batch, if they are few."""
    rows = tuple(dict.fromkeys(row for part in _floats(e) for row in part.outliers))
    return rows if len(rows) <= e.count / 4 else ()


def _invalid_scale(e: Evidence) -> Conclusion | None:
    """A loss scale that can scale nothing; a replay is finite, as the refusal has put another in
    its place.
    """
    if e.loss_scale is None or 0.0 < e.loss_scale < float("inf"):
        return None
    return Conclusion("loss_scale_collapsed", confidence=0.95, because="scale")


def _scale(e: Evidence) -> Conclusion | None:
    """A loss scale at which nothing can be learned."""
    scale = e.loss_scale
    if scale is None:
        return None
    of_gradients = e.first in ("gradients", "")
    finite_at_1 = e.unscaled == "finite"
    if (
        scale > SCALE_TOO_HIGH
        and finite_at_1
        and (of_gradients or e.first in ("loss", "statistics"))
    ):
        return Conclusion("loss_scale_collapsed", confidence=0.9, because="scale_high")
    if scale < 1.0 and of_gradients and not e.inputs_bad and e.unscaled != "bad":
        return Conclusion("loss_scale_collapsed", confidence=0.8, because="scale")
    return None


def _batch(e: Evidence) -> Conclusion | None:
    """NaN or Inf in the batch, if the bad value comes from there."""
    origin, inputs, targets = e.origin, e.inputs_bad, e.targets_bad
    if origin is not None and origin.source == "batch":
        return _from_batch(e, origin)
    named = {row for part in inputs for row in part.rows}
    if named and e.rows and set(e.rows) <= named and e.without_rows == "finite":
        return Conclusion("input_nonfinite", inputs[0].name, _rows_of(e, inputs), 0.9, "batch")
    if origin is None and e.first != "weights":
        if inputs:
            return Conclusion("input_nonfinite", inputs[0].name, inputs[0].rows, 0.8, "batch")
        if targets and e.first in ("", "loss"):
            return Conclusion("target_nonfinite", targets[0].name, targets[0].rows, 0.8, "batch")
    return None


def _from_batch(e: Evidence, origin: Origin) -> Conclusion:
    rows = _rows_of(e, e.inputs_bad)
    if origin.op.startswith("inputs"):
        return Conclusion("input_nonfinite", origin.op, rows, 0.95, "batch")
    in_layer = any(not row.finite for row in e.table)  # later operations may have dropped it
    if e.inputs_bad and in_layer:
        rows = _rows_of(e, (*e.inputs_bad, *e.targets_bad))
        return Conclusion("input_nonfinite", e.inputs_bad[0].name, rows, 0.95, "batch")
    rows = _rows_of(e, e.targets_bad)
    if e.first in ("loss", "statistics", ""):
        return Conclusion("target_nonfinite", origin.op, rows, 0.95, "batch")
    return Conclusion("gradient_domain", _last_loss(e), rows, 0.8, "where")


def _rows_of(e: Evidence, found: Sequence[Constant]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(row for part in found for row in part.rows)) or e.rows


def _last_loss(e: Evidence) -> str:
    return e.loss_parts[-1][0] if e.loss_parts else "loss"


def _targets(e: Evidence) -> Conclusion | None:
    fault = e.target_fault
    if fault is None or (e.origin is not None and e.origin.phase == "forward" and not grown(e)):
        return None
    if fault.fatal or grown(e):
        return Conclusion("target_out_of_range", fault.loss, fault.rows, 0.9, "targets")
    return None


def _transient(e: Evidence) -> Conclusion | None:
    if e.replay == "finite" and e.same_mode == "finite" and not (e.inputs_bad or e.targets_bad):
        return Conclusion("transient", confidence=0.7, because="replay")
    return None


def _low_precision(e: Evidence) -> Conclusion | None:
    if not e.low_precision or e.float32 != "finite" or e.first in ("weights", "slots"):
        return None
    how = kind(e.origin)
    if how in ("overflow", "exp") and e.growth.weights >= MIN_WEIGHT_GROWTH:
        return None
    by_zero = e.origin is not None and any(o.zero for o in e.origin.operands)
    underflow = how == "pole" and (e.first != "gradients" or by_zero)
    if e.low_precision == "bfloat16" and not underflow:  # its range is that of float32
        return None
    cause: Cause = "float16_underflow" if underflow else "float16_overflow"
    return Conclusion(cause, _culprit(e), e.rows, 0.9, "float32")


def _divides_by_zero(facts: OptimizerFacts) -> bool:
    """Whether the divisor of an update can be 0: its epsilon rounds to 0, or it is a variance that
    cancels.
    """
    rounds_to_0 = facts.epsilon and facts.epsilon_in_dtype == 0.0
    return bool(rounds_to_0 or dict(facts.settings).get("centered"))


def _broken_rate(e: Evidence) -> Conclusion | None:
    """Return that a learning rate is to blame if it is not finite or, from a schedule, far too
    high.
    """
    for o in e.optimizers:
        broken = o.scheduled or not math.isfinite(o.learning_rate)
        if broken and not abs(o.learning_rate) <= MAX_RATE:
            place = f"{o.name}/learning_rate"
            return Conclusion("optimizer_domain", place, confidence=0.95, because="rate")
    return None


def _update(e: Evidence) -> Conclusion | None:
    if e.first not in ("weights", "slots"):
        return None
    if (rate := _broken_rate(e)) is not None:
        return rate
    if grown(e, 1e4) and not any(map(_divides_by_zero, e.optimizers)):
        return Conclusion("divergence", e.first_path, confidence=0.8, because="growth")
    if e.written:
        return Conclusion("state_nonfinite", e.first_path, confidence=0.85, because="written")
    return Conclusion("optimizer_domain", e.first_path, confidence=0.85, because="update")


def _outlier_row(e: Evidence) -> Conclusion | None:
    """A few rows are far larger than all others, and without them the step is finite."""
    few = 0 < len(e.rows) <= max(1.0, e.count / 4)
    if not few or e.without_rows != "finite" or kind(e.origin) not in ("", "overflow"):
        return None
    named = (part for part in _floats(e) if set(e.rows) <= set(part.outliers))
    part = next((part for part in named if part.max_abs >= HUGE_DATA), None)
    return None if part is None else Conclusion("input_scale", part.name, e.rows, 0.9, "outlier")


def _divergence(e: Evidence) -> Conclusion | None:
    how, growth = kind(e.origin), e.growth
    if how == "pole":
        far = growth.weights >= MIN_WEIGHT_GROWTH and max(growth.loss, growth.norm) >= 1e3
        blown = far or growth.weights >= 1e3
    elif how == "exp":
        blown = growth.weights >= 2.0 and grown(e)
    else:
        blown = _overflows(e) and grown(e)
    if not blown and not _moved_too_far(e):
        return None
    if _normalized(e):
        return Conclusion("input_scale", _normalized(e), (), 0.8, "constant")
    if e.rescaled == "finite" and _magnitude(e) >= LARGE_DATA:
        return Conclusion("input_scale", _largest(e), (), 0.75, "rescaled")
    return Conclusion("divergence", _culprit(e) or e.first_path, confidence=0.85, because="growth")


def _overflows(e: Evidence) -> bool:
    """Whether large numbers have overflowed, in an operation or in the sum over the gradients."""
    exploded = e.origin is None and "gradients:explosion" in e.sites
    return exploded or kind(e.origin) == "overflow"


def _moved_too_far(e: Evidence) -> bool:
    """Whether the first steps moved the weights so far that the whole batch overflows, which it did
    not initially.
    """
    few = e.without_rows == "finite" and len(e.rows) <= e.count / 4
    return (
        e.at_start == "finite"
        and e.growth.weights >= 1.5
        and kind(e.origin) in ("exp", "overflow")
        and not few
    )


def _normalized(e: Evidence) -> str:
    """Return the path of a Normalization layer with huge outputs, which constant features cause."""
    rows = [row for row in e.table if row.layer_class == "Normalization"]
    return next((row.path for row in rows if max(-row.minimum, row.maximum) >= HUGE_DATA), "")


def _floats(e: Evidence) -> list[Spread]:
    return [spread for spread in (*e.inputs, *e.targets) if not spread.integer]


def _magnitude(e: Evidence) -> float:
    return max((s.max_abs for s in (*e.inputs, *e.targets) if not s.integer), default=0.0)


def _largest(e: Evidence) -> str:
    return max(_floats(e), key=lambda s: s.max_abs).name


def _input_scale(e: Evidence) -> Conclusion | None:
    """Nothing has grown yet, and the data alone is large or constant."""
    if _overflows(e) and not grown(e) and _magnitude(e) >= HUGE_DATA:
        outliers = next((s.outliers for s in (*e.inputs, *e.targets) if s.outliers), ())
        return Conclusion("input_scale", _largest(e), e.rows or outliers, 0.85, "huge")
    if _overflows(e) and _normalized(e):
        return Conclusion("input_scale", _normalized(e), (), 0.8, "constant")
    origin = e.origin
    if origin is None or kind(origin) != "pole" or origin.phase != "forward":
        return None
    if origin.layer_class != "Normalization":
        return None
    return Conclusion("input_scale", origin.culprit, e.rows, 0.85, "constant")


def _recurrence(e: Evidence) -> Conclusion | None:
    origin = e.origin
    if kind(origin) != "overflow" or origin is None:
        return None
    if origin.phase in BACKWARD or origin.layer_class in RECURRENT:
        return Conclusion("divergence", _culprit(e), confidence=0.75, because="recurrence")
    return None


def _exploded(e: Evidence) -> Conclusion | None:
    """Every gradient is finite, but the sum of their squares overflows."""
    if e.first != "gradients" or e.origin is not None or e.replay != "bad":
        return None
    return Conclusion("divergence", e.first_path, confidence=0.7, because="explosion")


def _domain(e: Evidence) -> Conclusion | None:
    origin = e.origin
    if origin is None or origin.source != "operation":
        return None
    if origin.phase == "backward" or _masked(e, origin):
        return Conclusion("gradient_domain", _culprit(e) or "loss", e.rows, 0.9, "domain")
    in_loss = origin.phase in ("loss", "regularizer") or not origin.frames
    if in_loss and e.first in ("loss", "gradients"):
        return Conclusion("loss_domain", _culprit(e), e.rows, 0.9, "domain")
    if origin.phase in ("forward", "slope"):
        return Conclusion("forward_domain", _culprit(e), e.rows, 0.9, "domain")
    return None


def _masked(e: Evidence, origin: Origin) -> bool:
    """Whether the bad value is masked in the loss (the unused branch of a `where`), but not in the
    gradient.
    """
    phases = ("forward", "loss", "regularizer", "slope")
    return e.first == "gradients" and origin.phase in phases and all(row.finite for row in e.table)


def _committed_growth(e: Evidence) -> Conclusion | None:
    if e.replay == "" and not e.refused and grown(e) and any("nonfinite" in s for s in e.sites):
        return Conclusion("divergence", e.first_path, confidence=0.6, because="growth")
    return None


RULES: tuple[Callable[[Evidence], Conclusion | None], ...] = (
    _bad_state,
    _modes,
    _monitors,
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
