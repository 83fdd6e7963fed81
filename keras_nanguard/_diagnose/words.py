"""Evidence as sentences for the user; steps count from 1, rows are indices. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from keras_nanguard._core.data_names import argument_path
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
from keras_nanguard._diagnose.causes import MAX_RATE, Conclusion
from keras_nanguard._files.stored import plain_text

__all__ = ["at_rows", "sentences", "table"]

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


def sentences(e: Evidence, verdict: Conclusion) -> tuple[str, ...]:
    """Return the evidence as sentences, the most relevant first."""
    return tuple(dict.fromkeys(text for part in _PARTS for text in part(e, verdict)))


def _state(e: Evidence, verdict: Conclusion) -> Iterator[str]:
    if e.state:
        listed = ", ".join(f"{path} ({role})" for path, role in e.state[:4])
        more = f" and {len(e.state) - 4} more" if len(e.state) > 4 else ""
        when = (
            " before the first step"
            if e.state_fresh
            else " already before this step"
            if e.refused
            else ""
        )
        yield f"{listed}{more}: NaN or Inf{when}."


def _course(e: Evidence, verdict: Conclusion) -> Iterator[str]:
    if verdict.because == "divergence":
        yield from e.notes


def _origin(e: Evidence, verdict: Conclusion) -> Iterator[str]:
    if e.origin is not None:
        yield _origin_sentence(e.origin)
    if e.first:
        path = f" ({e.first_path})" if e.first_path else ""
        reproduced = "A replay on the unchanged state reproduces it, in"
        reached = (
            reproduced
            if e.replay and e.refused
            else "It reaches"
            if e.replay
            else "The step left it in"
        )
        yield f"{reached} {SITES.get(e.first, e.first)}{path}."
    if e.origin is not None and e.origin.phase in BACKWARD and e.origin.steep:
        yield f"{e.origin.steep} in the forward pass has no finite derivative at one of its values."
    if verdict.because == "written":
        names = " and ".join(dict.fromkeys(facts.name for facts in e.optimizers))
        yield (
            f"With these gradients, rates, weights and slots the update of {names} stays finite, so"
            " other code has written it."
        )
    if (
        verdict.cause == "gradient_domain"
        and e.origin is not None
        and e.origin.phase in ("forward", "loss")
    ):
        yield (
            "The value is masked before the loss, as in the unused branch of a `where`; its"
            " gradient is not masked."
        )
    if e.first == "gradients" and e.origin is None and e.replay == "bad":
        yield (
            "Every gradient is finite, and so large that the sum of their squares overflows"
            " float32."
        )
    kinds = dict(site.partition(":")[::2] for site in e.sites)
    if kinds.get("gradients") == "stuck":
        unchanged = (
            f"{e.first_path} and most other kernels no longer change, bit for bit, although the"
            " loss does."
        )
        yield (
            unchanged
            if e.first_path
            else "For many steps every gradient has been exactly 0, although the loss is not."
        )
    if kinds.get("statistics") == "spike" and e.value is not None:
        yield (
            f"{e.first_path} has jumped to {e.value:.3g}, more than a thousand times its value a"
            " few steps before."
        )
    if kinds.get("loss") == "spike" and e.value is not None:
        yield f"The loss jumped to {e.value:.3g}."
    if kinds.get("statistics") == "stuck":
        yield (
            f"{e.first_path} still has its initial values, although the weights of its layer have"
            " changed."
        )


def _origin_sentence(origin: Origin) -> str:
    if origin.source == "batch":
        return f"The bad value comes from the batch, in {argument_path(origin.op)!r}."
    if origin.source == "variable":
        return f"The bad value is read from the variable {origin.op}."
    what = _counts(origin)
    where = f" of {origin.culprit!r}" if origin.culprit else ""
    taken = "; ".join(map(_operand, origin.operands[:2]))
    finite = "" if any(o.infinite for o in origin.operands) else "finite "
    given = f" from {finite}operands ({taken})" if taken else ""
    line = f", at {origin.line}" if origin.line else ""
    name = origin.op or "An operation"
    phase = PHASES.get(origin.phase, "in the step")
    if origin.layer_class.startswith("regularizer "):
        phase = (
            f"{phase}, in the {origin.layer_class}"
            if origin.phase != "regularizer"
            else f"in the {origin.layer_class}"
        )
    return f"{name}{where} produced {what}{given}, {phase}{line}."


def _counts(origin: Origin) -> str:
    parts = [f"{n} {word}" for n, word in ((origin.nan, "NaN"), (origin.inf, "Inf")) if n]
    return f"{' and '.join(parts) or 'NaN or Inf'} of {origin.size} values"


def _operand(operand: Operand) -> str:
    if operand.whole or not operand.max_abs:
        values = " and ".join(filter(None, ("zeros" * operand.zero, operand.holds)))
        return f"only {values}" if values else "no values"
    kinds = (
        ("zeros", operand.zero),
        ("negative values", operand.negative),
        (operand.holds, operand.infinite),
    )
    holds = [name for name, present in kinds if present and name]
    return f"magnitudes up to {operand.max_abs:.3g}" + (
        f", with {' and '.join(holds)}" if holds else ""
    )


def _data(e: Evidence, verdict: Conclusion) -> Iterator[str]:
    for part in (*e.inputs_bad, *e.targets_bad):
        counts = " and ".join(
            f"{n} {word}" for n, word in ((part.nan, "NaN"), (part.inf, "Inf")) if n
        )
        yield (
            f"{argument_path(part.name)!r} contains"
            f" {counts}{f', in {at_rows(part.rows)}' if part.rows else ''}."
        )
    if e.target_fault is not None:
        output = f" of output {e.target_fault.output!r}" if e.target_fault.output else ""
        rows = f" in {at_rows(e.target_fault.rows)}" if e.target_fault.rows else ""
        yield (
            f"The targets{output} contain {e.target_fault.words}{rows}, which {e.target_fault.loss}"
            " does not accept."
        )
    for spread in (*e.inputs, *e.targets):
        if spread.max_abs >= 100.0 and not spread.integer:
            yield _spread(spread)


def _spread(spread: Spread) -> str:
    verb = "is an outlier" if len(spread.outliers) == 1 else "are outliers"
    outliers = f"; {at_rows(spread.outliers)} {verb}" if spread.outliers else ""
    numbers = (
        f"magnitudes up to {spread.max_abs:.3g}, mean {spread.mean:.3g}, standard deviation"
        f" {spread.std:.3g}"
    )
    return f"{argument_path(spread.name)!r}: {numbers}{outliers}."


def at_rows(rows: Sequence[int]) -> str:
    """Return rows of the batch in words, by their indices."""
    named = ", ".join(str(row) for row in rows[:8]) + (", ..." if len(rows) > 8 else "")
    return f"the row at index {named}" if len(rows) == 1 else f"the rows at indices {named}"


def _history(e: Evidence, verdict: Conclusion) -> Iterator[str]:
    g = e.growth
    if g.losses and (max(g.loss, g.norm) >= 10.0 or verdict.cause in ("divergence", "spike")):
        losses = ", ".join(f"{value:.3g}" for value in g.losses)
        last = f"the last {len(g.losses)} of " if len(g.losses) < g.steps else ""
        yield (
            f"In {last}the {f'{g.steps} steps' if g.steps > 1 else 'step'} before, the loss was"
            f" {losses}."
        )
    factors = {"the loss": g.loss, "the gradient norm": g.norm}
    grown = [
        f"{what} has grown by a factor of {factor:.3g}"
        for what, factor in factors.items()
        if factor > 1.5
    ]
    if grown and max(g.loss, g.norm) >= 10.0:
        text = " and ".join(grown)
        yield f"{text[0].upper()}{text[1:]} since the first steps."
    if 3.0 <= g.weights < math.inf:
        yield (
            f"The weights have grown by a factor of {g.weights:.3g} since the start (largest"
            f" {g.largest_weight_before:.3g}, now {g.largest_weight:.3g})."
        )
    if g.jump[0] >= JUMP:
        yield (
            f"At step {g.jump[1] + 1} the loss jumped to {g.jump[0]:.3g} times its lowest earlier"
            " value."
        )


def _rerun_results(e: Evidence, verdict: Conclusion) -> Iterator[str]:
    reruns = (
        ("In float32 the same step", e.float32),
        ("With a loss scale of 1 the same step", e.unscaled),
        (
            "Restarted with inputs and targets scaled to unit standard deviation, training",
            e.rescaled,
        ),
        ("With the initial weights the same batch", e.at_start),
        (f"Without {at_rows(e.rows)} the same step", e.without_rows),
        ("In inference mode the forward pass", e.inference),
        ("In training mode the forward pass", e.training),
    )
    for change, result in reruns:
        if result in ("finite", "bad"):
            yield f"{change} is {'finite' if result == 'finite' else 'bad as well'}."
    if e.replay == "finite":
        yield "An eager replay of the step is finite."
    if e.same_mode:
        what = {"finite": "is finite", "bad": "is bad again", "failed": "cannot be run"}.get(
            e.same_mode, ""
        )
        yield f"A replay in the mode of the step ({e.mode}) {what}."
    if e.replay_error and e.refused:
        yield f"The replay of the step raised {plain_text(' '.join(e.replay_error.split()))}"


def _optimizer(e: Evidence, verdict: Conclusion) -> Iterator[str]:
    relevant = verdict.cause in ("divergence", "optimizer_domain", "spike", "input_scale")
    for facts in e.optimizers:
        if not abs(facts.learning_rate) <= MAX_RATE and facts.iteration is not None:
            yield (
                f"The learning rate of {facts.name} was {facts.learning_rate:.3g} at iteration"
                f" {facts.iteration}."
            )
        if relevant or not math.isfinite(facts.learning_rate):
            yield _settings(facts)
        if relevant and 1.0 < abs(facts.shrinks) < math.inf:
            yield (
                f"Weight decay alone multiplies the weights by {facts.shrinks:.3g} in each step of"
                f" {facts.name}."
            )
        if verdict.cause == "optimizer_domain" and facts.epsilon == 0.0:
            yield f"epsilon=0 in {facts.name}: where a gradient is 0, the update divides 0 by 0."
        if (
            facts.epsilon
            and facts.epsilon_in_dtype is not None
            and facts.epsilon_in_dtype < facts.epsilon / 2
        ):
            yield (
                f"epsilon={facts.epsilon:g} rounds to {facts.epsilon_in_dtype:g} in {facts.dtype},"
                " the dtype of the weights."
            )
    for words, value in e.objective if relevant else ():
        yield f"{words} is {value:g}."
    if verdict.cause == "optimizer_domain" and math.isfinite(e.gradient_norm):
        yield f"The gradient norm of this step was {e.gradient_norm:.3g}."
    if e.loss_scale is not None and verdict.cause in ("loss_scale_collapsed", "float16_overflow"):
        yield f"The loss scale was {e.loss_scale:g}."


def _settings(facts: OptimizerFacts) -> str:
    """Return the hyperparameters of an optimizer by Keras' names, with their values."""
    named = [("learning_rate", facts.learning_rate), *facts.settings]
    text = ", ".join(
        f"{name}={'True' if name == 'centered' else f'{value:.4g}'}" for name, value in named
    )
    return f"{facts.name} has {text}" + ("." if facts.clips else ", and no clipping.")


def _layers(e: Evidence, verdict: Conclusion) -> Iterator[str]:
    first = next((row for row in e.table if not row.finite), None)
    if first is not None and not (e.origin is not None and e.origin.culprit == first.path):
        yield f"The first layer whose output is not finite is {first.path!r}."
    for name, value in e.loss_parts if len(e.loss_parts) > 1 else ():
        if value != value or abs(value) == float("inf"):
            yield f"Among the parts of the loss, {name} is {value}."


def _notes(e: Evidence, verdict: Conclusion) -> Iterator[str]:
    yield from e.notes


_PARTS = (_state, _course, _origin, _data, _history, _rerun_results, _optimizer, _layers, _notes)


def table(rows: Sequence[LayerRow]) -> str:
    """Return the table of layers as text, one line per call, the bad ones marked."""
    head = (
        "",
        "layer",
        "dtype",
        "min",
        "max",
        "mean",
        "zeros",
        "NaN",
        "+Inf",
        "-Inf",
        "of",
        "range",
    )
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i in (1, 2) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths))
        )
        for line in lines
    )


def _cells(row: LayerRow) -> tuple[str, ...]:
    numbers = (f"{row.minimum:.3g}", f"{row.maximum:.3g}", f"{row.mean:.3g}")
    counts = tuple(str(n) for n in (row.zeros, row.nan, row.plus_inf, row.minus_inf, row.size))
    return (
        "" if row.finite else "*",
        row.path,
        row.dtype,
        *numbers,
        *counts,
        f"{row.share_of_range:.1%}",
    )
