"""From evidence to the diagnosis that the user reads: what was seen, in sentences, and the advice.
Steps count from 1, rows are indices. Pure functions.

The advice is in `_core/causes.toml`; `_words` has what its sentences name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

from keras_nanguard._core.data import argument_path
from keras_nanguard._core.evidence import (
    BACKWARD,
    Evidence,
    LayerRow,
    Operand,
    OptimizerFacts,
    Origin,
    Spread,
)
from keras_nanguard._core.history import JUMP
from keras_nanguard._core.incident import NAMES_DATA, Diagnosis
from keras_nanguard._core.literals import CAUSE_WORDS, DERIVATIVE_HINTS, HINTS, causes_with
from keras_nanguard._core.plain_values import plain_text
from keras_nanguard._diagnose.causes import (
    LOW,
    MAX_RATE,
    Because,
    Conclusion,
    decide,
    first_kinds,
    kind,
)

PHASES = {
    "forward": "in the forward pass",
    "loss": "in the loss",
    "regularizer": "in the regularizer",
    "backward": "in the backward pass",
    "slope": "in the forward or backward pass",
    "update": "in the optimizer's update",
    "other": "in the step",
}

SITES = {
    "loss": "the loss",
    "outputs": "an output",
    "statistics": "a moving statistic",
    "gradients": "a gradient",
    "weights": "a weight after the update",
    "slots": "an optimizer slot after the update",
}

OF_RATES = causes_with("settings")
"""Causes whose evidence has the hyperparameters of the optimizers."""

RAW = 100.0
"""Magnitude above which an input counts as not scaled."""

LARGE_WEIGHT = 10.0
"""Magnitude of a weight that no usual initializer gives."""

MAX_NORM = 1e15
"""Gradient norm above which the squares in an optimizer may overflow, in float32."""

MAX_HALF_NORM = 256.0
"""The same in float16."""


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
        conclusion.because == "rescaled",
    )


def sentences(e: Evidence, conclusion: Conclusion) -> tuple[str, ...]:
    """Return the evidence as sentences, the most relevant first."""
    parts = (
        _state(e),
        e.notes if conclusion.because == "divergence" else (),
        _origin(e, conclusion),
        _findings(e),
        data_sentences(e),
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
        when = " already before this step" if e.refused else ""
        when = " before the first step" if e.state_fresh else when
        finite = "state:out_of_range" in e.sites and "state:nonfinite" not in e.sites
        what = "finite, but so large that sums overflow," if finite else "NaN or Inf"
        yield f"{listed}{more}: {what}{when}."


def _origin(e: Evidence, conclusion: Conclusion) -> Iterator[str]:
    origin = e.origin
    if origin.source:
        yield _origin_sentence(origin)
    if e.first:
        path = f" ({e.first_path})" if e.first_path else ""
        reached = "The bad value reaches" if e.replay else "The step left it in"
        if e.replay and e.refused:
            reached = "A replay on the unchanged state reproduces it in"
        yield f"{reached} {SITES.get(e.first, e.first)}{path}."
    if origin.phase in BACKWARD and origin.steep:
        yield f"{origin.steep} in the forward pass has no finite derivative at one of its values."
    if conclusion.because == "written" and e.state:
        yield "It was finite after the step before, so other code has written it since."
    elif conclusion.because in ("written", "constraint") and e.written:
        names = " and ".join(dict.fromkeys(facts.name for facts in e.optimizers))
        by_constraint = conclusion.because == "constraint"
        writer = f"the constraint {e.constraint}" if by_constraint else "other code"
        yield (
            f"With these gradients, rates, weights and slots the update of {names} stays finite, so"
            f" {writer} has written it."
        )
    if conclusion.cause == "gradient_domain" and origin.phase in ("forward", "loss"):
        yield (
            "The value is masked before the loss, as in the unused branch of a `where`; its"
            " gradient is not masked."
        )
    if e.first == "gradients" and not origin.source and e.replay == "bad":
        yield (
            "Every gradient is finite, and so large that the sum of their squares overflows"
            " float32."
        )


def _findings(e: Evidence) -> Iterator[str]:
    """Findings that are not NaN or Inf."""
    path, kinds = e.first_path, first_kinds(e)
    if kinds.get("gradients") == "stuck" and path:
        yield (f"{path} and most other kernels no longer change at all, although the loss does.")
    elif kinds.get("gradients") == "stuck":
        yield "For many steps every gradient has been exactly 0, although the loss is not."
    if kinds.get("statistics") == "spike" and e.value is not None:
        times = "more than a thousand times its value a few steps before"
        yield f"{path} has jumped to {e.value:.3g}, {times}."
    if kinds.get("loss") == "spike" and e.value is not None:
        yield f"The loss jumped to {e.value:.3g}."
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
    finite = "" if any(o.infinite for o in origin.operands) else "finite "
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
    negative, infinite = "negative values" * operand.negative, operand.holds * operand.infinite
    holds = " and ".join(filter(None, ("zeros" * operand.zero, negative, infinite)))
    return f"magnitudes up to {operand.max_abs:.3g}" + (f", with {holds}" if holds else "")


def data_sentences(e: Evidence) -> Iterator[str]:
    """Yield what is unusual about the batch, in sentences."""
    for part in (*e.inputs_bad, *e.targets_bad):
        column = "" if part.column is None else f" in column {part.column}"
        rows = f", in {at_rows(part.rows)}" if part.rows else ""
        rows = ", in every row" if len(part.rows) == e.count else rows
        yield f"{argument_path(part.name)!r} contains {_counts(part.nan, part.inf)}{column}{rows}."
    if (fault := e.target_fault) is not None:
        output = f" of output {fault.output!r}" if fault.output else ""
        rows = f" in {at_rows(fault.rows)}" if fault.rows else ""
        contain = f"The targets{output} contain {fault.words}{rows}"
        yield f"{contain}, which {fault.loss} does not accept."
    for spread in (*e.inputs, *e.targets):
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
    if g.losses and (large or conclusion.cause in ("divergence", "spike")):
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
        "In float32 the same step": e.float32,
        "With a loss scale of 1 the same step": e.unscaled,
        f"Restarted with {scaled}, training": e.rescaled,
        "With the initial weights the same batch": e.at_start,
        f"Without {at_rows(e.rows)} the same step": e.without_rows,
        "In inference mode the forward pass": e.inference,
        "In training mode the forward pass": e.training,
    }
    for change, result in reruns.items():
        if result in ("finite", "bad"):
            yield f"{change} is {'finite' if result == 'finite' else 'bad as well'}."
    if e.replay == "finite":
        yield "An eager replay of the step is finite."
    if e.same_mode:
        results = {"finite": "is finite", "bad": "is bad again", "failed": "cannot be run"}
        yield f"A replay in the mode of the step ({e.mode}) {results.get(e.same_mode, '')}."
    if e.replay_error and e.refused:
        yield f"The replay of the step raised {plain_text(' '.join(e.replay_error.split()))}"


def _optimizers(e: Evidence, conclusion: Conclusion) -> Iterator[str]:
    relevant = conclusion.cause in OF_RATES
    of_update = conclusion.cause == "optimizer_domain"
    for o in e.optimizers:
        if not abs(o.learning_rate) <= MAX_RATE and o.iteration is not None:
            rate = f"{o.learning_rate:.3g} at iteration {o.iteration}"
            yield f"The learning rate of {o.name} was {rate}."
        if relevant or not math.isfinite(o.learning_rate):
            yield _settings(o)
        if relevant and 1.0 < abs(o.shrinks) < math.inf:
            times = f"{o.shrinks:.3g} in each step of {o.name}"
            yield f"Weight decay alone multiplies the weights by {times}."
        if of_update and o.epsilon == 0.0:
            yield f"epsilon=0 in {o.name}: if a gradient is 0, the update divides 0 by 0."
        rounded = o.epsilon_in_dtype
        if o.epsilon and rounded is not None and rounded < o.epsilon / 2:
            dtype = f"{o.dtype}, the dtype of the weights"
            yield f"epsilon={o.epsilon:g} rounds to {rounded:g} in {dtype}."
    for words, value in e.objective if relevant else ():
        yield f"{words} is {value:g}."
    if of_update and math.isfinite(e.gradient_norm):
        yield f"The gradient norm of this step was {e.gradient_norm:.3g}."
    of_scale = conclusion.cause in ("loss_scale_collapsed", "float16_overflow")
    if e.loss_scale is not None and of_scale:
        yield f"The loss scale was {e.loss_scale:g}."


def _settings(facts: OptimizerFacts) -> str:
    """Return the hyperparameters of an optimizer by Keras' names, with their values."""
    named = {"learning_rate": facts.learning_rate, **dict(facts.settings)}
    values = {name: f"{value:.4g}" for name, value in named.items()}
    values |= {"centered": "True"} if "centered" in named else {}
    text = ", ".join(f"{name}={value}" for name, value in values.items())
    return f"{facts.name} has {text}" + ("." if facts.clips else ", and no clipping.")


def _layers(e: Evidence) -> Iterator[str]:
    first = next((row for row in e.table if not row.finite), None)
    if first is not None and e.origin.culprit != first.path:
        yield f"The first layer whose output is not finite is {first.path!r}."
    for name, value in e.loss_parts if len(e.loss_parts) > 1 else ():
        if not math.isfinite(value):
            yield f"Among the parts of the loss, {name} is {value}."


# Advice


def advice(e: Evidence, conclusion: Conclusion) -> tuple[str, ...]:
    """Return the advice for a conclusion, in sentences specific to the program."""
    known = _words(e, conclusion)
    found = []
    for entry in CAUSE_WORDS[conclusion.cause]["do"]:
        entry = {"say": entry} if isinstance(entry, str) else entry
        for item in known[entry["each"]] if "each" in entry else ({},):
            words = {**known, **item}
            if all(_holds(word, words) for word in entry.get("when", "").split()):
                text = entry["say"].format_map(words)
                found.append(text[0].upper() + text[1:])
    return tuple(dict.fromkeys(found))


def _holds(word: str, words: Mapping[str, Any]) -> bool:
    return not words[word[1:]] if word.startswith("!") else bool(words[word])


def _words(e: Evidence, v: Conclusion) -> Mapping[str, Any]:
    """Return the names in the advice, and the conditions on which it depends.

    The observation that decided (`Conclusion.because`) is a condition, too.
    """
    origin, optimizers = e.origin, [_about(o) for o in e.optimizers]
    half = any(o.dtype == "float16" for o in e.optimizers)
    hint = _hint(e)
    names = [repr(argument_path(part.name)) for part in (*e.inputs_bad, *e.targets_bad)]
    culprit = _culprit(e, v)
    one = len(v.samples) == 1
    facts = {
        "culprit": culprit,
        "layer_class": origin.layer_class,
        "data": " and ".join(dict.fromkeys(names)) if len(set(names)) > 1 else culprit,
        "rows": at_rows(v.samples),
        "in_batch": f"{at_rows(v.samples)} of the batch" if v.samples else "the batch",
        "them": "it" if one else "them",
        "their": "its" if one else "their",
        "hint": f": {hint}" if hint else ".",
        "tenth": f"{e.optimizers[0].learning_rate * 0.1:.1g}" if optimizers else "a tenth of it",
        "steepest": "256 in float16" if half else "1.8e19",
        # Each of them is one of a list.
        "optimizers": optimizers,
        "raw_inputs": _raw_inputs(e),
        "columns": _whole_columns(e),
        "objective": [{"words": words} for words, _ in e.objective],
        "exponents": _exponents(e, v),
        # Conditions.
        "hinted": bool(hint),
        "constraint": e.constraint if v.because == "constraint" else "",
        "initial": _large_initial_weight(e),
        "large": kind(origin) in ("exp", "overflow"),
        "cured": bool(v.samples) and e.without_rows == "finite",
        "regularizer": origin.phase == "regularizer",
        "constants": any(part.constant for part in e.inputs),
        "bfloat16": (origin.dtype if origin.dtype in LOW else e.low_precision) == "bfloat16",
        "scaled": any(o.scaled for o in e.optimizers),
        "clips": any(o.clips for o in e.optimizers),
        "steep": not e.gradient_norm < (MAX_HALF_NORM if half else MAX_NORM),
        "own": any(o.own for o in e.optimizers),
        "epsilons": all(o.epsilon is None or o.epsilon_in_dtype for o in e.optimizers),
        "untrained": v.because == "recurrence" and not e.growth.steps and origin.phase == "forward",
    }
    rules = dict.fromkeys(get_args(Because), False)
    return {**rules, v.because: True, **facts}


def _culprit(e: Evidence, v: Conclusion) -> str:
    """Return the culprit as the advice names it."""
    layer_class = e.origin.layer_class
    nobody = CAUSE_WORDS[v.cause].get("thing", "")
    if v.cause == "loss_domain" and e.origin.phase == "regularizer":
        nobody = "the layer"
    shown = argument_path(v.culprit) if v.cause in NAMES_DATA else v.culprit
    name = repr(shown) if shown else nobody
    if v.cause == "gradient_domain" and layer_class.startswith("regularizer "):
        return f"the {layer_class} of {name}"
    return name


def _about(o: OptimizerFacts) -> dict[str, Any]:
    """Return the advice about one optimizer."""
    settings = dict(o.settings)
    return {
        **asdict(o),
        "decay": settings.get("weight_decay", 0.0),
        "decays": abs(o.shrinks) > 1.0,
        "centered": bool(settings.get("centered")),
        "broken": not abs(o.learning_rate) <= MAX_RATE,
        "half": o.dtype == "float16",
        "no_epsilon": o.epsilon is not None and not o.epsilon_in_dtype,
    }


def _whole_columns(e: Evidence) -> list[dict[str, Any]]:
    """Return the columns of the inputs that are bad in every row."""
    parts = (p for p in e.inputs_bad if p.column is not None and len(p.rows) == e.count)
    return [{"name": repr(argument_path(part.name)), "column": part.column} for part in parts]


def _large_initial_weight(e: Evidence) -> float:
    """Return the largest weight if numbers overflow, and weights were large initially; else 0."""
    growth = e.growth
    untrained = kind(e.origin) in ("exp", "overflow") and growth.weights < 2.0
    return growth.largest_weight if untrained and growth.largest_weight >= LARGE_WEIGHT else 0.0


def _raw_inputs(e: Evidence) -> list[dict[str, Any]]:
    """Return the inputs that have to be scaled for any network."""
    raw = [part for part in e.inputs if not part.integer and part.max_abs >= RAW]
    return [{**asdict(part), "name": repr(argument_path(part.name))} for part in raw]


def _exponents(e: Evidence, v: Conclusion) -> list[dict[str, Any]]:
    """Return the exponents below 1 of the loss to blame, if the bad value comes from a power."""
    if "Pow" not in (e.origin.op, e.origin.steep):
        return []
    found = [(key, value) for name, key, value in e.exponents if name == v.culprit]
    return [{"key": key, "value": value} for key, value in found if value < 1.0]


def _hint(e: Evidence) -> str:
    """Return the advice for the operation that produced the bad value, or for its layer."""
    origin = e.origin
    steep = DERIVATIVE_HINTS.get(origin.steep, "") if origin.phase in BACKWARD else ""
    own = HINTS.get(origin.op, "")
    if origin.op == "Mul" and kind(origin) == "overflow":  # not 0 times Inf
        own = ""
    return steep or own or HINTS.get(origin.layer_class, "")


# The table of layers

HEAD = ("", "layer", "dtype", "min", "max", "mean", "zeros", "NaN", "+Inf", "-Inf", "of", "range")
"""The columns of the table of layers."""


def table(rows: Sequence[LayerRow]) -> str:
    """Return the table of layers as text, one line per call, the bad ones marked."""
    lines = [HEAD, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(map(_aligned, HEAD, line, widths)) for line in lines)


def _aligned(column: str, cell: str, width: int) -> str:
    return cell.ljust(width) if column in ("layer", "dtype") else cell.rjust(width)


def _cells(row: LayerRow) -> tuple[str, ...]:
    numbers = (f"{number:.3g}" for number in (row.minimum, row.maximum, row.mean))
    counts = map(str, (row.zeros, row.nan, row.plus_inf, row.minus_inf, row.size))
    mark, share = "" if row.finite else "*", f"{row.share_of_range:.1%}"
    return (mark, row.path, row.dtype, *numbers, *counts, share)
