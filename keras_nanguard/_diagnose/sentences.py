"""The evidence of a diagnosis in sentences: what was seen and measured; and the table of layers.
Steps count from 1, rows are indices. Pure functions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from keras_nanguard._core.data import argument_path
from keras_nanguard._core.literals import causes_with
from keras_nanguard._core.observations import Operand, Origin, Spread
from keras_nanguard._core.plain_values import one_line
from keras_nanguard._core.verdict import LayerRow
from keras_nanguard._diagnose.causes import Conclusion
from keras_nanguard._diagnose.evidence import BatchFacts, Evidence, OptimizerFacts, TargetFault
from keras_nanguard._diagnose.growth import JUMP

PHASES = {
    "forward": "in the forward pass",
    "loss": "in the loss",
    "regularizer": "in the regularizer",
    "backward": "in the backward pass",
    "slope": "in the forward or backward pass",
    "update": "in the optimizer's update",
}

SITES = {
    "loss": "the loss",
    "outputs": "an output",
    "statistics": "a moving statistic",
    "gradients": "a gradient",
    "weights": "a weight after the update",
    "slots": "an optimizer slot after the update",
}

RESULTS = {"finite": "is finite", "bad": "is bad again", "failed": "cannot be run"}

LARGEST_NORM = 6.5e18
"""Gradient norm from which its squares may have overflowed in a sum of float32: the norm is then a
lower bound.
"""

OF_RATES = causes_with("settings")
"""Causes whose evidence has the hyperparameters of the optimizers."""


def sentences(e: Evidence, conclusion: Conclusion) -> tuple[str, ...]:
    """Return the evidence as sentences, the most relevant first."""
    parts = (
        _state(e),
        e.notes if conclusion.because == "divergence" else (),
        _origin(e, conclusion),
        _findings(e),
        data_sentences(e.batch, e.trials.target_fault),
        _history(e, conclusion),
        _reruns(e),
        _optimizers(e, conclusion),
        _layers(e),
        e.notes,
    )
    return tuple(dict.fromkeys(text for part in parts for text in part))


def _state(e: Evidence) -> Iterator[str]:
    if e.state:
        listed = ", ".join(f"{path} ({role})" for path, role in e.state[:4])
        more = f" and {len(e.state) - 4} more" if len(e.state) > 4 else ""
        when = " already before this step" if e.incident.refused else ""
        fresh = "state" in e.incident.sites and "predictions" not in e.incident.sites
        when = " before the first step" if fresh and not e.incident.refused else when
        finite = e.found("state", "out_of_range") and not e.found("state", "nonfinite")
        what = "finite, but so large that sums overflow," if finite else "NaN or Inf"
        yield f"{listed}{more}: {what}{when}."


def _origin(e: Evidence, conclusion: Conclusion) -> Iterator[str]:
    origin = e.replay.origin
    if origin.source:
        yield _origin_sentence(origin)
    if e.bad_site:
        path = f" ({e.bad_path})" if e.bad_path else ""
        reached = "The bad value reaches" if e.replay.result else "The step left it in"
        if e.replay.result and e.incident.refused:
            reached = "A replay on the unchanged state reproduces it in"
        yield f"{reached} {SITES.get(e.bad_site, e.bad_site)}{path}."
    if conclusion.because == "written" and e.state:
        yield "It was finite after the step before, so other code has written it since."
    elif conclusion.because in ("written", "constraint") and e.written:
        names = " and ".join(dict.fromkeys(facts.name for facts in e.optimizers))
        by_constraint = conclusion.because == "constraint"
        writer = f"the constraint {e.constraint}" if by_constraint else "other code"
        place = "it" if conclusion.culprit == e.bad_path else conclusion.culprit
        yield (
            f"With these gradients, rates, weights and slots the update of {names} stays finite, so"
            f" {writer} has written {place}."
        )
    if conclusion.cause == "gradient_domain" and origin.phase in ("forward", "loss"):
        yield (
            "The value is masked before the loss, as in the unused branch of a `where`; its"
            " gradient is not masked."
        )
    if e.bad_site == "gradients" and not origin.source and e.replay.result == "bad":
        yield (
            "Every gradient is finite, and so large that the sum of their squares overflows"
            " float32."
        )


def _findings(e: Evidence) -> Iterator[str]:
    """Findings that are not NaN or Inf."""
    path, kinds = e.bad_path, e.kinds
    if kinds.get("gradients") == "stuck":
        yield "For many steps every gradient has been exactly 0, although the loss is not."
    if kinds.get("statistics") == "spike" and e.value is not None:
        times = "more than a thousand times its value a few steps before"
        yield f"{path} has jumped to {e.value:.3g}, {times}."
    if kinds.get("statistics") == "stuck":
        changed = "although the weights of its layer have changed"
        yield f"{path} still has its initial values, {changed}."


def _origin_sentence(origin: Origin) -> str:
    if origin.source == "batch":
        return f"The bad value comes from the batch, in {argument_path(origin.op)!r}."
    if origin.source == "variable":
        return f"The bad value is read from the variable {origin.op}."
    where = f" of {origin.culprit!r}" if origin.culprit else ""
    counts = _counts(origin.nan, origin.inf) or "NaN or Inf"
    operands = "; ".join(map(_operand, origin.operands[:2]))
    finite = "" if any(o.holds for o in origin.operands) else "finite "
    taken = f" from {finite}operands ({operands})" if operands else ""
    line = f", at {origin.line}" if origin.line else ""
    phase = PHASES.get(origin.phase, "in the step")
    if origin.layer_class.startswith("regularizer "):
        regularizer = f"in the {origin.layer_class}"
        phase = regularizer if origin.phase == "regularizer" else f"{phase}, {regularizer}"
    operation = f"{origin.op or 'An operation'}{where}"
    return f"{operation} produced {counts} of {origin.size} values{taken}, {phase}{line}."


def _counts(nan: int, inf: int) -> str:
    return " and ".join(f"{n} {word}" for n, word in ((nan, "NaN"), (inf, "Inf")) if n)


def _operand(operand: Operand) -> str:
    if operand.whole or not operand.max_abs:
        values = " and ".join(filter(None, ("zeros" * operand.zero, operand.holds)))
        return f"only {values}" if values else "no values"
    negative = "negative values" * operand.negative
    holds = " and ".join(filter(None, ("zeros" * operand.zero, negative, operand.holds)))
    return f"magnitudes up to {operand.max_abs:.3g}" + (f", with {holds}" if holds else "")


def data_sentences(batch: BatchFacts, fault: TargetFault | None = None) -> Iterator[str]:
    """Yield what is unusual about the batch, in sentences, and what is wrong with its targets."""
    for part in (*batch.inputs_bad, *batch.targets_bad):
        column = "" if part.column is None else f" in column {part.column}"
        rows = f", in {at_rows(part.rows)}" if part.rows else ""
        rows = ", in every row" if len(part.rows) == batch.count else rows
        yield f"{argument_path(part.name)!r} contains {_counts(part.nan, part.inf)}{column}{rows}."
    if fault is not None:
        output = f" of output {fault.output!r}" if fault.output else ""
        rows = f" in {at_rows(fault.rows)}" if fault.rows else ""
        contain = f"The targets{output} contain {fault.words}{rows}"
        yield f"{contain}, which {fault.loss} does not accept."
        if fault.proof:
            yield fault.proof
    for spread in (*batch.inputs, *batch.targets):
        if spread.max_abs >= 100.0 and not spread.integer:
            yield _spread(spread)


def _spread(spread: Spread) -> str:
    verb = "is an outlier" if len(spread.outliers) == 1 else "are outliers"
    outliers = f"; {at_rows(spread.outliers)} {verb}" if spread.outliers else ""
    numbers = f"mean {spread.mean:.3g}, standard deviation {spread.std:.3g}{outliers}"
    return f"{argument_path(spread.name)!r}: magnitudes up to {spread.max_abs:.3g}, {numbers}."


def at_rows(rows: Sequence[int]) -> str:
    """Return rows of the batch in words, by their indices."""
    named = ", ".join(str(row) for row in rows[:8]) + (", ..." if len(rows) > 8 else "")
    return f"the row at index {named}" if len(rows) == 1 else f"the rows at indices {named}"


def _history(e: Evidence, conclusion: Conclusion) -> Iterator[str]:
    g = e.growth
    large = max(g.loss, g.norm) >= 10.0
    if g.losses and (large or conclusion.cause == "divergence"):
        losses = ", ".join(f"{value:.3g}" for value in g.losses)
        last = f"the last {len(g.losses)} of " if len(g.losses) < g.steps else ""
        steps = f"{g.steps} steps" if g.steps > 1 else "step"
        yield f"In {last}the {steps} before, the loss was {losses}."
    loss = "the magnitude of the loss" if any(value < 0.0 for value in g.losses) else "the loss"
    factors = {loss: g.loss, "the gradient norm": g.norm}
    grown = " and ".join(
        f"{what} has grown by a factor of {n:.3g}" for what, n in factors.items() if n > 1.5
    )
    if grown and large:
        yield f"{grown[0].upper()}{grown[1:]} since the first steps."
    if 3.0 <= g.weights < math.inf:
        largest = f"largest {g.largest_weight_before:.3g}, now {g.largest_weight:.3g}"
        yield f"The weights have grown by a factor of {g.weights:.3g} since the start ({largest})."
    if g.jump[0] >= JUMP:
        times = f"{g.jump[0]:.3g} times its lowest earlier value"
        yield f"At step {g.jump[1] + 1} the loss jumped to {times}."


def _reruns(e: Evidence) -> Iterator[str]:
    scaled = "inputs and targets scaled to unit standard deviation"
    reruns = {
        "In float32 the same step": e.trials.float32,
        "With a loss scale of 1 the same step": e.trials.unscaled,
        f"Restarted with {scaled}, training": e.trials.rescaled,
        "With the initial weights the same batch": e.trials.at_start,
        f"Without {at_rows(e.trials.rows)} the same step": e.trials.without_rows,
    }
    for change, result in reruns.items():
        if result in ("finite", "bad"):
            yield f"{change} is {'finite' if result == 'finite' else 'bad as well'}."
    for mode, result in (("inference", e.trials.inference), ("training", e.trials.training)):
        if result:
            yield f"In {mode} mode the forward pass is {result}."
    if e.replay.result == "finite":
        yield "An eager replay of the step is finite."
    if e.replay.same_mode:
        yield f"A replay in the mode of the step ({e.mode}) {RESULTS[e.replay.same_mode]}."
    if e.replay.error and e.incident.refused:
        yield f"The replay of the step raised {raised(e.replay.error)}."


def raised(error: str) -> str:
    """Return the text of an exception on one line, without the colors and the arguments that Keras
    adds.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", error).partition("Arguments received by")[0]
    return one_line(text, 300).rstrip(".")


def _optimizers(e: Evidence, conclusion: Conclusion) -> Iterator[str]:
    relevant = conclusion.cause in OF_RATES
    of_update = conclusion.cause == "optimizer_domain"
    for o in e.optimizers:
        if o.rate_is_bad and o.iteration is not None:
            rate = f"{o.learning_rate:.3g} at iteration {o.iteration}"
            yield f"The learning rate of {o.name} was {rate}."
        if relevant or not o.rate_is_finite:
            yield _settings(o)
        if of_update and o.epsilon == 0.0:
            yield f"epsilon=0 in {o.name}: if a gradient is 0, the update divides 0 by 0."
        rounded = o.epsilon_in_dtype
        if o.epsilon and rounded is not None and rounded < o.epsilon / 2:
            dtype = f"{o.dtype}, the dtype of the weights"
            yield f"epsilon={o.epsilon:g} rounds to {rounded:g} in {dtype}."
    if of_update and math.isfinite(e.gradient_norm):
        least = "at least " if e.gradient_norm >= LARGEST_NORM else ""
        yield f"The gradient norm of this step was {least}{e.gradient_norm:.3g}."
    of_scale = conclusion.cause in ("loss_scale_collapsed", "float16_overflow")
    if e.loss_scale is not None and of_scale:
        yield f"The loss scale was {e.loss_scale:g}."


def _settings(facts: OptimizerFacts) -> str:
    """Return the hyperparameters of an optimizer by Keras' names, with their values."""
    named = {"learning_rate": facts.learning_rate, **facts.settings}
    values = {name: f"{value:.4g}" for name, value in named.items() if value is not None}
    values |= {"centered": "True"} if "centered" in named else {}
    text = ", ".join(f"{name}={value}" for name, value in values.items())
    return f"{facts.name} has {text}" + ("." if facts.clips else ", and no clipping.")


def _layers(e: Evidence) -> Iterator[str]:
    first = next((row for row in e.replay.table if not row.finite), None)
    if first is not None and e.replay.origin.culprit != first.path:
        yield f"The first layer whose output is not finite is {first.path!r}."
    for name, value in e.replay.loss_parts if len(e.replay.loss_parts) > 1 else ():
        if not math.isfinite(value):
            yield f"Among the parts of the loss, {name} is {value}."


# The table of layers

COLUMNS = (
    *("", "layer", "dtype", "min", "max", "mean", "zeros"),
    *("NaN", "+Inf", "-Inf", "of", "range"),
)
"""The columns of the table of layers."""


def layer_table(rows: Sequence[LayerRow]) -> str:
    """Return the table of layers as text, one line per call, the bad ones marked."""
    lines = [COLUMNS, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(map(_aligned, COLUMNS, line, widths)) for line in lines)


def _aligned(column: str, cell: str, width: int) -> str:
    return cell.ljust(width) if column in ("layer", "dtype") else cell.rjust(width)


def _cells(row: LayerRow) -> tuple[str, ...]:
    numbers = (f"{number:.3g}" for number in (row.minimum, row.maximum, row.mean))
    counts = map(str, (row.zeros, row.nan, row.plus_inf, row.minus_inf, row.size))
    mark, share = "" if row.finite else "*", f"{row.share_of_range:.1%}"
    return (mark, row.path, row.dtype, *numbers, *counts, share)
