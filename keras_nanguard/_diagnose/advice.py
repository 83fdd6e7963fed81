"""Advice for each cause, in sentences specific to the program. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from keras_nanguard._core.data_names import argument_path
from keras_nanguard._core.evidence import BACKWARD, Evidence, OptimizerFacts
from keras_nanguard._diagnose.causes import MAX_RATE, Conclusion, kind
from keras_nanguard._diagnose.words import at_rows

__all__ = ["ADVICE", "advice"]

MAX_NORM = 1e15
"""Gradient norm above which the squares in an optimizer may overflow."""


def advice(e: Evidence, verdict: Conclusion) -> tuple[str, ...]:
    """Return the advice for a conclusion."""
    return tuple(dict.fromkeys(ADVICE[verdict.cause](e, verdict)))


def _name(verdict: Conclusion, otherwise: str) -> str:
    return f"{verdict.culprit!r}" if verdict.culprit else otherwise


def _data(verdict: Conclusion, otherwise: str) -> str:
    return f"{argument_path(verdict.culprit)!r}" if verdict.culprit else otherwise


def _rate(e: Evidence) -> str:
    """Return a tenth of the learning rate."""
    if not e.optimizers:
        return "a tenth of it"
    return f"{e.optimizers[0].learning_rate * 0.1:.1g}"


def _hint(e: Evidence) -> str:
    """Return the advice for the operation that produced the bad value, or for the layer that
    contains it.
    """
    origin = e.origin
    if origin is None:
        return ""
    steep = STEEP_HINTS.get(origin.steep, "") if origin.phase in BACKWARD else ""
    return steep or HINTS.get(origin.op) or HINTS.get(origin.layer_class, "")


def _clause(e: Evidence) -> str:
    return f": {hint}" if (hint := _hint(e)) else "."


def _forward(e: Evidence, v: Conclusion) -> Iterator[str]:
    yield f"Keep {_name(v, 'the layer')} inside its domain{_clause(e)}"
    if kind(e.origin) in ("exp", "overflow"):
        if not _hint(e):
            yield "Bound its input: normalize before it, or use a saturating activation."
        yield from _raw_inputs(e)
    if v.samples and e.without_rows == "finite":
        yield (
            f"Check {at_rows(v.samples)} of this batch: without"
            f" {'it' if len(v.samples) == 1 else 'them'} the step is finite."
        )


def _raw_inputs(e: Evidence) -> Iterator[str]:
    """Advice for inputs that no network takes as they are."""
    for part in e.inputs:
        name = repr(argument_path(part.name))
        if part.integer or part.max_abs < RAW:
            continue
        if part.counts:
            yield (
                f"{name} holds counts up to {part.max_abs:.3g}: train on log1p of them"
                " (keras.ops.log1p)."
            )
        else:
            yield (
                f"{name} has magnitudes up to {part.max_abs:.3g}: scale each feature to about unit"
                " standard deviation (keras.layers.Normalization, adapted to the data)."
            )


def _clean(e: Evidence, v: Conclusion) -> Iterator[str]:
    names = list(
        dict.fromkeys(repr(argument_path(part.name)) for part in (*e.inputs_bad, *e.targets_bad))
    )
    what = " and ".join(names) if len(names) > 1 else _data(v, "the inputs")
    yield f"Clean {what}: find where the NaN or Inf comes from (missing values, division, parsing)."


def _loss(e: Evidence, v: Conclusion) -> Iterator[str]:
    if e.origin is not None and e.origin.phase == "regularizer":
        yield (
            f"Make the {e.origin.layer_class} of {_name(v, 'the layer')} defined"
            f" everywhere{_clause(e)}"
        )
        yield f"Check that it accepts every value that {_name(v, 'the layer')} can take."
        return
    yield f"Make {_name(v, 'the loss')} defined everywhere{_clause(e)}"
    if kind(e.origin) in ("exp", "overflow"):
        yield from _raw_inputs(e)
    yield (
        "Check that the last activation fits the loss (softmax, sigmoid, softplus), or use"
        " from_logits=True."
    )


HINTS = {
    "Log": "take log(x + epsilon) or log_softmax, not the log of values that can be 0 or negative.",
    "Log1p": "keep its argument above -1.",
    "Exp": "use softplus, softmax or logsumexp, which do not overflow, or clip its argument.",
    "RealDiv": "divide by maximum(x, epsilon), or use keras.ops.divide_no_nan.",
    "Sqrt": "take sqrt(maximum(x, 0) + epsilon).",
    "Rsqrt": "add an epsilon before rsqrt.",
    "Reciprocal": "add an epsilon to the denominator, or guard both branches of the `where`.",
    "SqrtGrad": "add an epsilon inside the square root: its derivative at 0 is infinite.",
    "RsqrtGrad": "add an epsilon inside the rsqrt.",
    "Pow": "keep the base above 0, or add an epsilon to it.",
    "Softmax": "make sure that each row has at least one entry that is not masked.",
    "Acos": "clip its argument to the open interval from -1 to 1.",
    "Asin": "clip its argument to the open interval from -1 to 1.",
    "Atanh": "clip its argument to the open interval from -1 to 1.",
    "Xlogy": "keep its second argument above 0.",
    "Xdivy": "keep its second argument away from 0.",
    "Cholesky": (
        "add a small multiple of the identity to the matrix, so that it is positive definite."
    ),
    "MatrixInverse": (
        "add a small multiple of the identity to the matrix, or solve in the least-squares sense."
    ),
    "Cast": "its input exceeds the range of the lower dtype.",
}

_INSIDE = "its derivative at -1 and 1 is infinite: clip its argument to 1 - 1e-6 in magnitude."
_SPECTRUM = (
    "its derivative divides by differences of {}, which are 0 if two are equal: add small distinct"
    " numbers to the diagonal, or use a loss without the decomposition."
)
STEEP_HINTS = {
    "Acos": _INSIDE,
    "Acosh": "its derivative at 1 is infinite: keep its argument above 1.",
    "Asin": _INSIDE,
    "Atanh": _INSIDE,
    "Cholesky": (
        "its derivative solves with the factor: add a small multiple of the identity to the matrix."
    ),
    "Pow": (
        "a power with an exponent below 1 has an infinite derivative at 0: keep its base above 0"
        " (add an epsilon)."
    ),
    "Qr": "its derivative needs a matrix of full rank: add a small multiple of the identity.",
    "SelfAdjointEig": _SPECTRUM.format("eigenvalues"),
    "Sqrt": "add an epsilon inside the square root: its derivative at 0 is infinite.",
    "Svd": _SPECTRUM.format("singular values"),
}
"""Advice by the operation of the forward pass whose derivative is infinite."""

RAW = 100.0
"""Magnitude of an input from which it counts as not scaled."""


def _rescale(e: Evidence, v: Conclusion) -> Iterator[str]:
    if v.because == "outlier":
        each, is_far = (
            ("it", "its values are") if len(v.samples) == 1 else ("them", "their values are")
        )
        yield (
            f"Check {at_rows(v.samples)} of this batch in {_data(v, 'the data')}: {is_far} far"
            f" larger than those of all other rows, and without {each} the step is finite. Correct"
            f" or drop {each}."
        )
        return
    if v.because == "constant":
        yield (
            f"Drop constant features before {_name(v, 'Normalization')}: it divides by their"
            " standard deviation, which is 0."
        )
        return
    constant = any(part.constant for part in e.inputs)
    drop = ", and drop constant features" if constant else ""
    yield (
        f"Scale {_data(v, 'the data')} to about unit standard deviation"
        f" (keras.layers.Normalization, adapted to the data){drop}."
    )


def _gradient(e: Evidence, v: Conclusion) -> Iterator[str]:
    what = _name(v, "the loss")
    if e.origin is not None and e.origin.layer_class.startswith("regularizer "):
        what = f"the {e.origin.layer_class} of {what}"
    power = e.origin is not None and "Pow" in (e.origin.op, e.origin.steep)
    low = [(key, value) for name, key, value in e.exponents if name == v.culprit and value < 1.0]
    if power and low:
        for key, value in low:
            yield (
                f"{what} has {key}={value:g}: a power with an exponent below 1 has no finite"
                f" derivative at 0. Use {key} of at least 1, or the same loss without the power."
            )
        return
    yield f"The value of {what} is finite, its gradient is not{_clause(e)}"
    yield (
        "With `where`, put a safe value into the unused branch before the function is applied, not"
        " after: 0 times Inf is NaN."
    )


def _diverged(e: Evidence, v: Conclusion) -> Iterator[str]:
    for o in e.optimizers:
        if abs(o.shrinks) > 1.0:
            decay = dict(o.settings)["weight_decay"]
            yield (
                f"Lower weight_decay={decay:g}: its product with the learning rate of"
                f" {o.learning_rate:g} has to stay far below 1."
            )
    for words, _ in e.objective:
        yield f"{words} multiplies the gradients: lower it."
    if (
        v.because == "recurrence"
        and not e.growth.steps
        and e.origin is not None
        and e.origin.phase == "forward"
    ):
        yield (
            "Training has not started to learn: use a bounded activation (tanh) in"
            f" {_name(v, 'the layer')}, or smaller initial weights."
        )
        yield "Scale the inputs to about unit standard deviation, or shorten the sequences."
        return
    yield f"Lower the learning rate (try {_rate(e)}), or use a warmup."
    if not any(o.clips for o in e.optimizers):
        yield "Clip the gradients: global_clipnorm=1.0 in the optimizer."
    yield (
        "Scale inputs and targets to about unit standard deviation, and check activations and"
        " initial weights."
    )


def _dtype(e: Evidence) -> str:
    """Return the low-precision dtype of the bad value."""
    own = e.origin.dtype if e.origin is not None else ""
    return own if own in ("float16", "bfloat16") else e.low_precision or "float16"


def _overflowed(e: Evidence, v: Conclusion) -> Iterator[str]:
    layer = _name(v, "the layer")
    if _dtype(e) == "bfloat16":
        yield f"Let {layer} compute in float32 (dtype='float32'), where the same step is finite."
        return
    yield (
        f"Let {layer} compute in float32 (dtype='float32'), or keep its values below 65504, the"
        " largest float16."
    )
    yield "bfloat16 has the range of float32."


def _underflowed(e: Evidence, v: Conclusion) -> Iterator[str]:
    layer = _name(v, "the layer")
    if _dtype(e) == "bfloat16":
        yield (
            f"Let {layer} compute in float32 (dtype='float32'): bfloat16 has about three digits, so"
            " small differences become 0."
        )
        return
    scaled = any(o.scaled for o in e.optimizers)
    if v.because == "dead" and scaled:
        yield f"Raise the loss scale, or let {layer} compute in float32 (dtype='float32')."
    elif v.because == "dead":
        yield (
            "Use the policy mixed_float16, whose LossScaleOptimizer keeps gradients above 0, or"
            f" let {layer} compute in float32."
        )
    else:
        yield (
            f"Let {layer} compute in float32 (dtype='float32'): values below 6e-8 are 0 in float16,"
            " and so is a small epsilon."
        )


def _optimizer(e: Evidence, v: Conclusion) -> Iterator[str]:
    if v.because == "rate":
        for o in e.optimizers:
            if not abs(o.learning_rate) <= MAX_RATE:
                cure = (
                    "fix the schedule, which has a pole at this step"
                    if o.scheduled
                    else "set a finite one"
                )
                yield f"The learning rate of {o.name} is {o.learning_rate:.3g}: {cure}."
        return
    for o in e.optimizers:
        if dict(o.settings).get("centered"):
            yield (
                f"Use {o.name} with centered=False, or a larger epsilon: it divides by the root of"
                " a variance, a difference of nearly equal numbers that rounding makes 0 or"
                " negative."
            )
    yield from (
        f"Raise epsilon in {o.name}{_epsilon(o)}."
        for o in e.optimizers
        if not o.epsilon_in_dtype and o.epsilon is not None
    )
    yield from (f"Lower weight_decay in {o.name}." for o in e.optimizers if abs(o.shrinks) > 1.0)
    half = any(o.dtype == "float16" for o in e.optimizers)
    steep = not e.gradient_norm < (256.0 if half else MAX_NORM)
    if steep and not any(o.clips for o in e.optimizers):
        yield (
            "Clip the gradients (global_clipnorm=1.0): their squares overflow above"
            f" {'256 in float16' if half else '1.8e19'}."
        )
    if not steep and all(o.epsilon is None or o.epsilon_in_dtype for o in e.optimizers):
        yield (
            "Check the hyperparameters of the optimizer, listed in the evidence, and any code that"
            " writes its slots."
        )


def _epsilon(o: OptimizerFacts) -> str:
    if o.dtype == "float16":
        return " to 1e-4, or keep the weights in float32 (policy mixed_float16)"
    return " to its default of 1e-7: it has to be above 0"


def _scale(e: Evidence, v: Conclusion) -> Iterator[str]:
    if v.because == "scale_high":
        yield (
            "Use a LossScaleOptimizer with the default initial_scale of 2**15: at a scale of 1 the"
            " same step is finite."
        )
        return
    yield (
        "Find the operation that overflows at every scale (see the evidence), then use a"
        " LossScaleOptimizer with the default initial_scale of 2**15."
    )


ADVICE: dict[str, Callable[[Evidence, Conclusion], Iterator[str]]] = {
    "input_nonfinite": lambda e, v: _clean(e, v),
    "target_nonfinite": lambda e, v: iter(
        (
            (
                f"Clean {_data(v, 'the targets')}, or leave those rows out with a sample weight of"
                " 0 *and* a finite target."
            ),
        )
    ),
    "target_out_of_range": lambda e, v: iter(
        (
            (
                f"Give {_name(v, 'the loss')} targets that it accepts: class indices from 0 to"
                " classes - 1, probabilities from 0 to 1."
            ),
        )
    ),
    "input_scale": _rescale,
    "forward_domain": _forward,
    "loss_domain": _loss,
    "gradient_domain": _gradient,
    "divergence": _diverged,
    "float16_overflow": _overflowed,
    "float16_underflow": _underflowed,
    "loss_scale_collapsed": _scale,
    "optimizer_domain": _optimizer,
    "state_nonfinite": lambda e, v: iter(
        (
            (
                f"Find the code that writes to {_name(v, 'the state')} besides the optimizer, such"
                " as a callback."
                if v.because == "written"
                else (
                    f"{_name(v, 'The state')} was bad before the step: load a good file, or use"
                    " keras_nanguard.repair; keras_nanguard.scan lists every bad value."
                )
            ),
        )
    ),
    "batchnorm_statistics": lambda e, v: iter(
        (
            (
                "Re-estimate the moving statistics with keras_nanguard.recalibrate(model, data), or"
                " repair them; a momentum nearer to 0.9 follows the data faster."
            ),
        )
    ),
    "training_flag": lambda e, v: iter(
        (
            (
                "Call the model with training=True in the training loop;"
                f" {_name(v, 'BatchNormalization')} never changed."
            ),
        )
    ),
    "spike": lambda e, v: iter(
        (
            f"Check {f'{at_rows(v.samples)} of the batch' if v.samples else 'the batch'} of this"
            " step"
            + (
                "."
                if any(o.clips for o in e.optimizers)
                else ", or clip gradients (global_clipnorm=1.0)."
            ),
        )
    ),
    "transient": lambda e, v: iter(
        (
            (
                "The same step on the same state was finite: check the hardware, and the input"
                " pipeline for race conditions; run with deterministic operations."
            ),
        )
    ),
    "unknown": lambda e, v: iter(
        (
            (
                "Run keras_nanguard.diagnose(model, x, y) on this batch; with"
                " NanGuard(directory=...) the step is saved, and keras_nanguard.replay replays it"
                " in other modes."
            ),
        )
    ),
}
"""Advice by cause; every cause has an entry."""
