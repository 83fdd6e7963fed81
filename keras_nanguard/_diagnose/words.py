"""A verdict and its evidence in sentences, with the user's own names in them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from keras_nanguard._diagnose.causes import Verdict, kind
from keras_nanguard._diagnose.evidence import Birth, Evidence, LayerRow, Spread
from keras_nanguard._files._stored import plain_text
from keras_nanguard._fit._history import JUMP

__all__ = ["advice", "sentences", "table"]

PHASES = {
    "forward": "in the forward pass",
    "loss": "in the loss",
    "backward": "in the backward pass",
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


def sentences(e: Evidence, verdict: Verdict) -> tuple[str, ...]:
    """Return what was measured, most telling first."""
    return tuple(dict.fromkeys(text for part in _PARTS for text in part(e, verdict)))


def _state(e: Evidence, verdict: Verdict) -> Iterator[str]:
    if e.state:
        shown = ", ".join(f"{path} ({role})" for path, role in e.state[:4])
        more = f" and {len(e.state) - 4} more" if len(e.state) > 4 else ""
        when = " before the first step" if e.state_fresh else " before this step already" if e.refused else ""
        yield f"{shown}{more}: NaN or Inf{when}."


def _born(e: Evidence, verdict: Verdict) -> Iterator[str]:
    if e.birth is not None:
        yield _birth(e.birth)
    if e.first:
        path = f" ({e.first_path})" if e.first_path else ""
        seen = "Run again on the untouched state, the step shows it first in" if e.replay else "The step shows it first in"
        yield f"{seen} {SITES.get(e.first, e.first)}{path}."
    if verdict.because == "written":
        names = " and ".join(dict.fromkeys(facts.name for facts in e.optimizers))
        yield f"With these gradients, rates, weights and slots the arithmetic of {names} stays finite: it was there before the step."
    if e.first == "gradients" and e.birth is None and e.replay == "bad":
        yield "Every gradient is finite, and so large that the sum of their squares overflows float32."
    kinds = dict(site.partition(":")[::2] for site in e.sites)
    if kinds.get("gradients") == "stuck":
        moved = f"{e.first_path} and most other kernels stand still, bit for bit, although the loss is not at rest."
        yield moved if e.first_path else "For many steps every gradient has been exactly 0, although there is a loss."
    if kinds.get("statistics") == "spike" and e.value is not None:
        yield f"{e.first_path} has leapt to {e.value:.3g}, more than a thousand times what it was a few steps before."
    if kinds.get("loss") == "spike" and e.value is not None:
        yield f"The loss jumped to {e.value:.3g}."
    if kinds.get("statistics") == "stuck":
        yield f"{e.first_path} holds its initial values, although the layer's own weights have moved."


def _birth(birth: Birth) -> str:
    if birth.source == "batch":
        return f"The bad value comes with the batch, from {birth.op}."
    if birth.source == "variable":
        return f"The bad value is read from the variable {birth.op}."
    what = _counts(birth)
    where = f" of {birth.culprit!r}" if birth.culprit else ""
    taken = "; ".join(_operand(o.max_abs, o.zero, o.negative) for o in birth.operands[:2])
    given = f" from finite operands ({taken})" if taken else ""
    line = f", at {birth.line}" if birth.line else ""
    name = birth.op or "An operation"
    return f"{name}{where} made {what}{given}, {PHASES.get(birth.phase, 'in the step')}{line}."


def _counts(birth: Birth) -> str:
    parts = [f"{n} {word}" for n, word in ((birth.nan, "NaN"), (birth.inf, "Inf")) if n]
    return f"{' and '.join(parts) or 'NaN or Inf'} of {birth.size} values"


def _operand(largest: float, zero: bool, negative: bool) -> str:
    holds = [word for word, has in (("zeros", zero), ("negative values", negative)) if has]
    return f"magnitudes up to {largest:.3g}" + (f", with {' and '.join(holds)}" if holds else "")


def _data(e: Evidence, verdict: Verdict) -> Iterator[str]:
    for part in (*e.inputs_bad, *e.targets_bad):
        rows = f" in rows {_list(part.rows)}" if part.rows else ""
        yield f"{part.name} holds {part.nan} NaN and {part.inf} Inf{rows}."
    if e.target_fault is not None:
        output = f" of output {e.target_fault.output!r}" if e.target_fault.output else ""
        rows = f" in rows {_list(e.target_fault.rows)}" if e.target_fault.rows else ""
        yield f"The targets{output} hold {e.target_fault.words}{rows}, which {e.target_fault.loss} does not accept."
    for spread in (*e.inputs, *e.targets):
        if spread.max_abs >= 100.0 and not spread.integer:
            yield _spread(spread)


def _spread(spread: Spread) -> str:
    out = f"; rows {_list(spread.outliers)} stand out" if spread.outliers else ""
    shown = f"magnitudes up to {spread.max_abs:.3g}, mean {spread.mean:.3g}, deviation {spread.std:.3g}"
    return f"{spread.name}: {shown}{out}."


def _list(rows: tuple[int, ...]) -> str:
    return ", ".join(str(row) for row in rows[:8]) + (", ..." if len(rows) > 8 else "")


def _history(e: Evidence, verdict: Verdict) -> Iterator[str]:
    g = e.growth
    if g.losses and (max(g.loss, g.norm) >= 10.0 or verdict.cause in ("divergence", "spike")):
        yield f"Over the {g.steps} steps before, the loss went to {', '.join(f'{v:.3g}' for v in g.losses)}."
        yield f"The loss has grown {g.loss:.3g} times, the gradient norm {g.norm:.3g} times since the first steps."
    if g.weights >= 3.0:
        yield (
            f"The weights have grown {g.weights:.3g} times since the start (largest {g.largest_weight_before:.3g}, "
            f"now {g.largest_weight:.3g})."
        )
    if g.jump[0] >= JUMP:
        yield f"At step {g.jump[1]} the loss had jumped to {g.jump[0]:.3g} times its lowest value before."


def _reruns(e: Evidence, verdict: Verdict) -> Iterator[str]:
    told = {
        "float32": ("In float32 the same step", e.float32),
        "unscaled": ("With a loss scale of 1 the same step", e.unscaled),
        "rescaled": ("Begun anew with inputs and targets scaled to unit deviation, training", e.rescaled),
        "start": ("With the weights of the first step the same batch", e.at_start),
        "rows": (f"Without rows {_list(e.rows)} the same step", e.without_rows),
        "inference": ("In inference mode the forward pass", e.inference),
        "training": ("In training mode the forward pass", e.training),
    }
    for words, result in told.values():
        if result in ("finite", "bad"):
            yield f"{words} {'is finite' if result == 'finite' else 'goes bad as well'}."
    if e.replay == "finite":
        yield "Run again eagerly, the step comes out finite."
    if e.same_mode:
        what = {"finite": "comes out finite", "bad": "goes bad again", "failed": "cannot be run"}.get(e.same_mode, "")
        yield f"Run again in the mode it was compiled in ({e.mode}), the step {what}."
    if e.replay_error:
        yield f"Run again, the step raised {plain_text(' '.join(e.replay_error.split()))}"


def _optimizer(e: Evidence, verdict: Verdict) -> Iterator[str]:
    for facts in e.optimizers:
        if not math.isfinite(facts.learning_rate):
            yield f"The learning rate of {facts.name} is {facts.learning_rate}."
        if verdict.cause in ("divergence", "optimizer_domain", "spike"):
            yield f"{facts.name} with learning rate {facts.learning_rate:.3g}" + (
                " and clipping." if facts.clips else ", without clipping."
            )
        if facts.epsilon and facts.epsilon_in_dtype is not None and facts.epsilon_in_dtype < facts.epsilon / 2:
            yield f"epsilon={facts.epsilon:g} is {facts.epsilon_in_dtype:g} in {facts.dtype}, the dtype of the weights."
    if e.loss_scale is not None and verdict.cause in ("loss_scale_collapsed", "float16_overflow"):
        yield f"The loss scale was {e.loss_scale:g}."


def _layers(e: Evidence, verdict: Verdict) -> Iterator[str]:
    first = next((row for row in e.table if not row.finite), None)
    if first is not None and not (e.birth is not None and e.birth.culprit == first.path):
        yield f"The first layer whose output is not finite is {first.path!r}."
    for name, value in e.loss_parts:
        if value != value or abs(value) == float("inf"):
            yield f"Of the parts of the loss, {name} is {value}."


def _notes(e: Evidence, verdict: Verdict) -> Iterator[str]:
    yield from e.notes


_PARTS = (_state, _born, _data, _history, _reruns, _optimizer, _layers, _notes)


def advice(e: Evidence, verdict: Verdict) -> tuple[str, ...]:
    """Return what to do next."""
    return tuple(ADVICE[verdict.cause](e, verdict))


def _name(verdict: Verdict, otherwise: str) -> str:
    return f"{verdict.culprit!r}" if verdict.culprit else otherwise


def _rate(e: Evidence) -> str:
    return f"{e.optimizers[0].learning_rate / 10:.1g}" if e.optimizers else "a tenth of it"


def _forward(e: Evidence, v: Verdict) -> Iterator[str]:
    op, how = (e.birth.op if e.birth is not None else ""), kind(e.birth)
    yield f"Keep {_name(v, 'the layer')} inside its domain" + (f": {HINTS[op]}" if op in HINTS else ".")
    if how in ("exp", "overflow") and op not in HINTS:
        yield "Bound what goes into it: normalise before it, or use a saturating activation."
    if v.samples and e.without_rows == "finite":
        yield f"Look at rows {_list(v.samples)} of this batch; they alone drive it out of its domain."


def _loss(e: Evidence, v: Verdict) -> Iterator[str]:
    op = e.birth.op if e.birth is not None else ""
    yield f"Make {_name(v, 'the loss')} defined everywhere" + (f": {HINTS[op]}" if op in HINTS else ".")
    yield "Check that the last activation fits the loss (softmax, sigmoid, softplus), or use from_logits=True."


HINTS = {
    "Log": "take log(x + epsilon) or log_softmax, not log of something that can be 0 or negative.",
    "Log1p": "keep its argument above -1.",
    "Exp": "subtract the maximum first (keras.ops.softmax, logsumexp), or clip its argument.",
    "RealDiv": "divide by maximum(x, epsilon), or use keras.ops.divide_no_nan.",
    "Sqrt": "take sqrt(maximum(x, 0) + epsilon).",
    "Rsqrt": "add an epsilon before rsqrt.",
    "Reciprocal": "add an epsilon to what is divided by, or guard both sides of the `where`.",
    "SqrtGrad": "add an epsilon inside the square root: its slope at 0 is infinite.",
    "RsqrtGrad": "add an epsilon inside the rsqrt.",
    "Pow": "keep the base above 0, or add an epsilon to it.",
    "Softmax": "make sure that each row has at least one entry that is not masked.",
    "Acos": "clip its argument to the open interval from -1 to 1.",
    "Asin": "clip its argument to the open interval from -1 to 1.",
    "Atanh": "clip its argument to the open interval from -1 to 1.",
    "Xlogy": "keep its second argument above 0.",
    "Xdivy": "keep its second argument away from 0.",
    "Cast": "what it casts is beyond the range of the lower dtype.",
}


def _gradient(e: Evidence, v: Verdict) -> Iterator[str]:
    op = e.birth.op if e.birth is not None else ""
    hint = f": {HINTS[op]}" if op in HINTS else "."
    yield f"The value of {_name(v, 'the loss')} is finite, its slope is not{hint}"
    yield "With `where`, put a safe value into the unused branch before the function, not after it: 0 times Inf is NaN."


def _diverged(e: Evidence, v: Verdict) -> Iterator[str]:
    yield f"Lower the learning rate (try {_rate(e)}), or warm it up."
    if not any(o.clips for o in e.optimizers):
        yield "Clip the gradients: global_clipnorm=1.0 in the optimizer."
    yield "Scale inputs and targets to about unit deviation, and check activations and initial weights."


ADVICE: dict[str, Callable[[Evidence, Verdict], Iterator[str]]] = {
    "input_nonfinite": lambda e, v: iter(
        (f"Clean {_name(v, 'the inputs')}: find where its NaN or Inf come from (missing values, division, parsing).",)
    ),
    "target_nonfinite": lambda e, v: iter(
        (f"Clean {_name(v, 'the targets')}, or leave those rows out with a sample weight of 0 *and* a finite target.",)
    ),
    "target_out_of_range": lambda e, v: iter(
        (
            f"Give {_name(v, 'the loss')} targets that it accepts: class indices from 0 to classes - 1, "
            "probabilities from 0 to 1.",
        )
    ),
    "input_scale": lambda e, v: iter(
        (
            f"Scale {_name(v, 'the data')} to about unit deviation (keras.layers.Normalization, adapted to the data), "
            "and drop features that never change.",
        )
    ),
    "forward_domain": _forward,
    "loss_domain": _loss,
    "gradient_domain": _gradient,
    "divergence": _diverged,
    "float16_overflow": lambda e, v: iter(
        (
            f"Let {_name(v, 'the layer')} compute in float32 (dtype='float32'), or keep what goes into it below 65504.",
            "bfloat16 has the range of float32.",
        )
    ),
    "float16_underflow": lambda e, v: iter(
        (
            f"Let {_name(v, 'the layer')} compute in float32, or use mixed_float16 with a LossScaleOptimizer.",
            "Epsilons below 6e-8 are 0 in float16.",
        )
    ),
    "loss_scale_collapsed": lambda e, v: iter(
        (
            "Find what overflows at every scale (see the evidence), then start from a LossScaleOptimizer with the "
            "default initial_scale of 2**15.",
        )
    ),
    "optimizer_domain": lambda e, v: iter(
        (
            *(
                f"The learning rate is {o.learning_rate}: mend the schedule that gives it."
                for o in e.optimizers
                if not math.isfinite(o.learning_rate)
            ),
            "Raise the optimizer's epsilon to 1e-4 where weights are float16, or keep weights in float32 "
            "(policy mixed_float16).",
            "Clip the gradients (global_clipnorm=1.0): their squares overflow above 1.8e19 (float16: 256).",
        )
    ),
    "state_nonfinite": lambda e, v: iter(
        (
            f"{_name(v, 'The state')} was bad before the step: load a good file, or use keras_nanguard.repair; "
            "keras_nanguard.scan lists every bad value.",
        )
    ),
    "batchnorm_statistics": lambda e, v: iter(
        (
            "Estimate the moving statistics anew with keras_nanguard.recalibrate(model, data), or repair them; "
            "a momentum nearer to 0.9 follows the data faster.",
        )
    ),
    "training_flag": lambda e, v: iter(
        (f"Call the model with training=True in the training loop; {_name(v, 'BatchNormalization')} never moved.",)
    ),
    "spike": lambda e, v: iter(
        (
            f"Look at {f'rows {_list(v.samples)}' if v.samples else 'the batch'} of this step; clip gradients "
            "(global_clipnorm=1.0) or lower the rate.",
        )
    ),
    "transient": lambda e, v: iter(
        (
            "The same step on the same state came out finite: check the hardware, and race conditions in the input "
            "pipeline; run with deterministic operations.",
        )
    ),
    "unknown": lambda e, v: iter(
        ("Run keras_nanguard.diagnose(model, x, y) on this batch, and replay the bundle in other modes.",)
    ),
}
"""What to do, by cause; every cause has its entry."""


def table(rows: Sequence[LayerRow]) -> str:
    """Return the table of layers as text, one line for each call, the bad ones marked."""
    head = ("", "layer", "dtype", "min", "max", "mean", "zeros", "NaN", "+Inf", "-Inf", "of", "range")
    lines = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(w) if i in (1, 2) else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
        for line in lines
    )


def _cells(row: LayerRow) -> tuple[str, ...]:
    numbers = (f"{row.minimum:.3g}", f"{row.maximum:.3g}", f"{row.mean:.3g}")
    counts = tuple(str(n) for n in (row.zeros, row.nan, row.plus_inf, row.minus_inf, row.size))
    return ("" if row.finite else "*", row.path, row.dtype, *numbers, *counts, f"{row.share_of_range:.1%}")
