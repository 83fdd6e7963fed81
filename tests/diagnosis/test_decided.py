"""Evidence on both sides of every threshold: cause, culprit, rows, confidence and rule."""

import math
from dataclasses import replace

import pytest
from support.evidence import changed, evidence_of

from keras_nanguard import Finding
from keras_nanguard._core.observations import NOWHERE, BadArray, Operand, Origin, Spread
from keras_nanguard._core.variable_names import RECURRENT
from keras_nanguard._core.verdict import LayerRow
from keras_nanguard._diagnose.causes import Conclusion, decide
from keras_nanguard._diagnose.evidence import EXPONENTIALS, POLES, OptimizerFacts, TargetFault
from keras_nanguard._diagnose.explainer import conclude
from keras_nanguard._diagnose.growth import JUMP, Growth

NAN, INF = math.nan, math.inf


def operand(max_abs, **more):
    return Operand(max_abs, **{"zero": False, "negative": False, **more})


ONE, LARGE, ZERO = operand(1.0), operand(1e30), operand(0.0, zero=True)


def origin(op="Log", phase="loss", operands=(ONE,), **more):
    known = {"source": "operation", "frames": ("mse",), "culprit": "mse", "layer_class": "Loss", "dtype": "float32"}
    return Origin(5, op=op, phase=phase, operands=operands, **{**known, **more})


def findings(*named):
    """Return findings by site and kind, such as `loss:divergence`."""
    return tuple(Finding(*name.split(":")) for name in named)


def bad(*named, **more):
    """Return the evidence of a refused step whose replay is bad, with the loss first."""
    known = {"result": "bad", "bad_site": "loss", "bad_path": "d/kernel", "count": 16}
    return evidence_of(findings=findings(*named), **{**known, **more})


def update(*named, **more):
    """Return the evidence of a step whose weights are the first that is bad."""
    return bad(*named, bad_site="weights", **more)


def seen(*named, **more):
    """Return the evidence of a committed step that was not replayed."""
    found = tuple(replace(finding, path=finding.path or "d/kernel") for finding in findings(*named))
    return evidence_of(findings=found, **{"refused": False, "count": 16, **more})


def below(number):
    return math.nextafter(number, 0.0)


def above(number):
    return math.nextafter(number, INF)


def grows(**more):
    return Growth(**{"steps": 6, **more})


RISEN = grows(loss=1e3)


def risen(**more):
    """Return the evidence of an overflow after the loss has grown."""
    return bad(origin=OVERFLOW, growth=RISEN, **more)


def spread(name="inputs", max_abs=1.0, **more):
    return Spread(name, max_abs, 0.0, 1.0, **more)


def layer(path="norm", layer_class="Normalization", minimum=0.0, maximum=1.0, nan=0):
    return LayerRow(path, layer_class, "float32", (4,), minimum, maximum, 0.0, 0, nan, 0, 0, 4, 0.0)


FAULT = TargetFault("cce", "", (3,), "class index 12 with 10 classes", "With others it is finite.")
MISSING = (BadArray("inputs/a", (2, 5), 1, 0), BadArray("inputs/b", (5, 7), 1, 0))
UNLABELLED = (BadArray("targets", (4,), 1, 0), BadArray("sample_weight", (6,), 1, 0))
VARIABLE = origin("bn/moving_mean", source="variable", culprit="bn", operands=())
OVERFLOW = origin("MatMul", "forward", (LARGE,), culprit="dense")
EXP = origin("Exp", "forward", (operand(100.0),), culprit="act")
ADAM = OptimizerFacts("Adam", 1e-3, 1e-8, 1e-8)
DOMAIN = Conclusion("loss_domain", "mse", (), 0.9)
FORWARD = Conclusion("forward_domain", "dense", (), 0.9)
UNKNOWN = Conclusion("unknown", "d/kernel", (), 0.0, "")


def decided(cause, culprit="d/kernel", samples=(), confidence=0.9, because=""):
    return Conclusion(cause, culprit, samples, confidence, because)


BLAMED = decided("optimizer_domain", confidence=0.8)
CONSTANT_FEATURES = decided("input_scale", "norm", confidence=0.8, because="constant")
CONSTRAINED = decided("optimizer_domain", because="constraint")
DIED = decided("divergence", confidence=0.8, because="dead")
EXPLODES = decided("divergence", confidence=0.6)
GREW = decided("divergence", "dense", confidence=0.8)
RATE = decided("optimizer_domain", "Adam/learning_rate", confidence=0.95, because="rate")

STATE = {
    "a marker that the loss reads": (bad(origin=VARIABLE), decided("state_nonfinite", "bn/moving_mean")),
    "a marker that only a gradient reads": (bad(origin=VARIABLE, bad_site="gradients"), UNKNOWN),
    "an operation, and no state": (bad(origin=origin()), DOMAIN),
    "nothing": (bad(), UNKNOWN),
    "not even a finding": (evidence_of(), replace(UNKNOWN, culprit="")),
    "a weight": (bad(state=(("k", "weights"), ("m", "statistics"))), decided("state_nonfinite", "k", (), 0.95)),
    "statistics": (bad("loss:nonfinite", state=(("m", "statistics"),)), decided("state_nonfinite", "m", (), 0.95)),
    "a weight that was finite after the step before": (
        bad(state=(("k", "weights"),), written=True),
        decided("state_nonfinite", "k", (), 0.95, "written"),
    ),
    "a weight, after a rate without bounds": (
        bad(state=(("k", "weights"),), optimizers=(OptimizerFacts("Adam", INF),)),
        RATE,
    ),
    "a finite weight, after a jump": (
        bad("state:out_of_range", state=(("k", "weights"),), growth=Growth(jump=(1e3, 2))),
        replace(GREW, culprit="k"),
    ),
    "statistics, in a validation": (
        seen("validation:nonfinite", state=(("m", "statistics"), ("v", "statistics"))),
        decided("batchnorm_statistics", "m"),
    ),
    "statistics, in a prediction": (
        seen("predictions:nonfinite", state=(("m", "statistics"),)),
        decided("batchnorm_statistics", "m"),
    ),
    "statistics and a weight, in a validation": (
        seen("validation:nonfinite", state=(("m", "statistics"), ("k", "weights"))),
        decided("state_nonfinite", "m", (), 0.95),
    ),
}
"""The state was bad before the step."""

NORMALIZES = origin("Rsqrt", "forward", culprit="bn", layer_class="BatchNormalization")
SPOILED = {"inference": "bad", "training": "finite", "bad_site": "", "result": ""}
STATISTICS = decided("batchnorm_statistics", "bn")
FORWARD_BN = Conclusion("forward_domain", "bn", (), 0.9)

MODES = {
    "batch normalization": (bad(**SPOILED, origin=NORMALIZES), STATISTICS),
    "moving statistics of another layer": (bad(**SPOILED, origin=replace(VARIABLE, layer_class="Own")), STATISTICS),
    "another layer": (bad(**SPOILED, origin=replace(NORMALIZES, layer_class="Dense")), FORWARD_BN),
    "nobody knows where": (bad(**SPOILED), replace(UNKNOWN, culprit="")),
    "both modes are bad": (bad(**{**SPOILED, "training": "bad"}, origin=NORMALIZES), FORWARD_BN),
    "inference is finite": (bad(**{**SPOILED, "inference": "finite"}, origin=NORMALIZES), FORWARD_BN),
}
"""Inference is not finite while training is."""


def jumped(factor):
    return Growth(jump=(factor, 2))


MONITORS = {
    "divergence": (seen("weights:stuck", "loss:divergence"), decided("divergence", because="divergence")),
    "divergence, refused": (seen("loss:divergence", refused=True), UNKNOWN),
    "divergence, replayed": (seen("loss:divergence", result="bad"), UNKNOWN),
    "statistics that never move": (seen("statistics:stuck"), decided("training_flag")),
    "one that never moves before one that leaps": (seen("statistics:stuck", "statistics:spike"), decided("training_flag")),
    **{
        f"statistics: {how}": (seen(f"statistics:{how}"), decided("batchnorm_statistics"))
        for how in ("spike", "out_of_range", "explosion")
    },
    "statistics: out_of_range, as the loss has grown": (
        seen("statistics:out_of_range", growth=Growth(steps=9, loss=1e3)),
        decided("divergence", confidence=0.8),
    ),
    "statistics: spike, as the loss has grown": (
        seen("statistics:spike", growth=Growth(steps=9, loss=1e3)),
        decided("batchnorm_statistics"),
    ),
    **{
        f"loss scale: {how}": (seen(f"loss_scale:{how}"), decided("loss_scale_collapsed", ""))
        for how in ("collapse", "out_of_range", "nonfinite")
    },
    "dead after a jump": (seen("gradients:stuck", growth=jumped(JUMP)), DIED),
    "dead after less": (
        seen("gradients:stuck", growth=jumped(below(JUMP))),
        decided("float16_underflow", confidence=0.6, because="dead"),
    ),
    "targets": (seen("loss:out_of_range", target_fault=FAULT), decided("target_out_of_range", "cce", (3,), 0.8)),
    "explosion": (seen("gradients:explosion"), decided("divergence", confidence=0.8)),
    "nothing of these": (seen("loss:nonfinite"), UNKNOWN),
}
"""Findings in committed steps."""

FINITE = {"result": "finite", "same_mode": "finite", "bad_site": ""}

TRANSIENT = {
    "finite when run again": (bad(**FINITE), decided("transient", "", confidence=0.6)),
    "in another mode": (bad(**{**FINITE, "same_mode": ""}), replace(UNKNOWN, culprit="")),
    "bad, in one mode": (bad(**{**FINITE, "result": "bad"}), replace(UNKNOWN, culprit="")),
    "bad inputs": (bad(**FINITE, inputs_bad=MISSING), decided("input_nonfinite", "inputs/a", (2, 5), 0.8)),
    "bad targets": (bad(**FINITE, targets_bad=UNLABELLED), decided("target_nonfinite", "targets", (4,), 0.8)),
}
"""The same step comes out finite."""

FROM_INPUTS, FROM_TARGETS = (Origin(-1, "batch", name, "forward") for name in ("inputs/a", "targets"))
NAMED = {"origin": origin(), "inputs_bad": MISSING, "rows": (7, 2), "without_rows": "finite"}

BATCH = {
    "from the targets, and a layer has bad inputs": (
        bad(origin=FROM_TARGETS, targets_bad=UNLABELLED, inputs_bad=MISSING, table=(layer(nan=1),)),
        decided("input_nonfinite", "inputs/a", (2, 5, 7, 4, 6), 0.95),
    ),
    "from the targets, and the inputs are masked": (
        bad(origin=FROM_TARGETS, targets_bad=UNLABELLED, inputs_bad=MISSING, table=(layer(),)),
        decided("target_nonfinite", "targets", (4, 6), 0.95),
    ),
    "from the inputs": (bad(origin=FROM_INPUTS, inputs_bad=MISSING), decided("input_nonfinite", "inputs/a", (2, 5, 7), 0.95)),
    "from the inputs, rows by trial": (bad(origin=FROM_INPUTS, rows=(1,)), decided("input_nonfinite", "inputs/a", (1,), 0.95)),
    **{
        f"from the targets, {first or 'nothing'} first": (
            bad(origin=FROM_TARGETS, targets_bad=UNLABELLED, bad_site=first),
            decided("target_nonfinite", "targets", (4, 6), 0.95),
        )
        for first in ("loss", "statistics", "")
    },
    "from masked targets": (
        bad(origin=FROM_TARGETS, targets_bad=UNLABELLED, bad_site="gradients", loss_parts=(("a", 1.0), ("b", 2.0), ("c", 3.0))),
        decided("gradient_domain", "c", (4, 6), 0.8),
    ),
    "from masked targets of the one loss": (
        bad(origin=FROM_TARGETS, bad_site="gradients"),
        decided("gradient_domain", "loss", (), 0.8),
    ),
    "finite with other bad rows": (bad(**NAMED), replace(DOMAIN, samples=(7, 2))),
    "all bad rows are to blame": (bad(**{**NAMED, "rows": (2, 5, 7)}), decided("input_nonfinite", "inputs/a", (2, 5, 7), 0.9)),
    "other rows are to blame": (bad(**{**NAMED, "rows": (2, 3)}), replace(DOMAIN, samples=(2, 3))),
    "no rows are to blame": (bad(**{**NAMED, "rows": ()}), DOMAIN),
    "bad without the rows": (bad(**{**NAMED, "without_rows": "bad"}), replace(DOMAIN, samples=(7, 2))),
    "bad inputs and no origin": (bad(inputs_bad=MISSING), decided("input_nonfinite", "inputs/a", (2, 5), 0.8)),
    "bad inputs, gradients first": (
        bad(inputs_bad=MISSING, bad_site="gradients"),
        decided("input_nonfinite", "inputs/a", (2, 5), 0.8),
    ),
    "bad targets and no origin": (bad(targets_bad=UNLABELLED), decided("target_nonfinite", "targets", (4,), 0.8)),
    "bad targets, gradients first": (bad(targets_bad=UNLABELLED, bad_site="gradients"), EXPLODES),
    "bad inputs, weights first": (bad(inputs_bad=MISSING, bad_site="weights"), BLAMED),
    "bad inputs, and an operation": (bad(inputs_bad=MISSING, origin=origin()), DOMAIN),
}
"""NaN or Inf in the batch."""

OUT_OF_RANGE = decided("target_out_of_range", "cce", (3,), 0.9)
HARMLESS = replace(FAULT, proof="")

TARGETS = {
    "a proven fault": (bad(target_fault=FAULT), OUT_OF_RANGE),
    "a proven fault, bad in the loss": (bad(target_fault=FAULT, origin=origin()), OUT_OF_RANGE),
    "a proven fault after growth": (
        bad(target_fault=FAULT, origin=origin(phase="forward"), growth=RISEN),
        OUT_OF_RANGE,
    ),
    "another fault, bad before the loss": (
        bad(target_fault=HARMLESS, origin=origin(phase="forward")),
        replace(DOMAIN, cause="forward_domain"),
    ),
    "another fault": (bad(target_fault=HARMLESS, origin=origin()), DOMAIN),
    "another fault after growth": (bad(target_fault=HARMLESS, origin=OVERFLOW, growth=RISEN), GREW),
}
"""Targets that the loss does not accept."""

SCALED = {"bad_site": "gradients", "origin": origin("MatMul", "backward", (ONE,))}
GRADIENT = decided("gradient_domain", "mse")


def scaled(scale, **more):
    """Return the evidence of bad gradients under a loss scale."""
    return bad(**{**SCALED, "loss_scale": scale, **more})


TOO_HIGH = decided("loss_scale_collapsed", "", confidence=0.9, because="scale_high")
TOO_LOW = decided("loss_scale_collapsed", "", confidence=0.8)

SCALE = {
    **{
        f"a scale of {scale}": (scaled(scale), decided("loss_scale_collapsed", "", (), 0.95))
        for scale in (0.0, -2.0, INF, NAN)
    },
    "no scale": (scaled(None), GRADIENT),
    "a scale of 1": (scaled(1.0), GRADIENT),
    "a scale below 1": (scaled(below(1.0)), TOO_LOW),
    "a tiny scale": (scaled(5e-324), TOO_LOW),
    "a scale below 1, nothing bad": (scaled(0.5, bad_site="", unscaled="finite"), TOO_LOW),
    "a scale below 1, the loss is bad": (bad(loss_scale=0.5, origin=origin()), DOMAIN),
    "a scale below 1, bad inputs": (scaled(0.5, inputs_bad=MISSING), GRADIENT),
    "a scale below 1, bad without it": (scaled(0.5, unscaled="bad"), GRADIENT),
    "a high scale": (scaled(above(2.0**24), unscaled="finite"), TOO_HIGH),
    "a high scale, the loss first": (scaled(2.0**30, bad_site="loss", unscaled="finite"), TOO_HIGH),
    "a high scale, weights first": (update(loss_scale=2.0**30), BLAMED),
    "a high scale, bad without it": (scaled(2.0**30, unscaled="bad"), GRADIENT),
    "a scale that is not too high": (scaled(2.0**24, unscaled="finite"), GRADIENT),
}
"""The loss scale."""

HALF = {"low_precision": "float16", "float32": "finite", "rows": (3,)}


def half(**more):
    """Return the evidence of a step that is finite in float32."""
    return bad(**{**HALF, **more})


TOO_LARGE = decided("float16_overflow", "dense", (3,), 0.9)
TOO_SMALL = decided("float16_underflow", "mse", (3,), 0.9)
SMALL_RESULT = origin("MatMul", "forward", (operand(2.0),), dtype="float16", culprit="dense")

LOW_PRECISION = {
    "overflow": (half(origin=SMALL_RESULT), TOO_LARGE),
    "overflow of weights that have not grown": (half(origin=SMALL_RESULT, growth=grows(weights=below(20.0))), TOO_LARGE),
    "overflow of weights that have": (half(origin=SMALL_RESULT, growth=grows(weights=20.0)), GREW),
    "exp of weights that have grown": (
        half(origin=EXP, growth=grows(weights=20.0)),
        replace(GREW, culprit="act"),
    ),
    "a few rows, of weights that have grown": (
        half(origin=SMALL_RESULT, growth=grows(weights=126.0), without_rows="finite"),
        TOO_LARGE,
    ),
    "a pole, of weights that have grown": (half(origin=origin(), growth=grows(weights=20.0)), TOO_SMALL),
    "exp": (half(origin=EXP), replace(TOO_LARGE, culprit="act")),
    "a pole": (half(origin=origin()), TOO_SMALL),
    "a pole in the gradients": (half(bad_site="gradients", origin=origin()), replace(TOO_SMALL, cause="float16_overflow")),
    "a zero in the gradients": (half(bad_site="gradients", origin=origin(operands=(ONE, ZERO))), TOO_SMALL),
    "a zero that overflows": (half(origin=replace(SMALL_RESULT, operands=(ZERO,))), TOO_LARGE),
    "nobody knows where": (half(), replace(TOO_LARGE, culprit="d/kernel")),
    "bad in float32": (half(float32="bad", origin=origin()), replace(DOMAIN, samples=(3,))),
    "float32 throughout": (half(low_precision="", origin=origin()), replace(DOMAIN, samples=(3,))),
    **{f"{first} first": (half(bad_site=first), BLAMED) for first in ("weights", "slots")},
}
"""The same step in float32 is finite."""

ROUNDED = replace(ADAM, epsilon_in_dtype=0.0)
EXPLODED = decided("divergence", confidence=0.8)

UPDATE = {
    "an update": (bad(bad_site="slots", optimizers=(ADAM,)), BLAMED),
    **{
        f"a rate of {rate}": (update(optimizers=(ADAM, replace(ADAM, learning_rate=rate))), RATE)
        for rate in (NAN, INF)
    },
    "a pole of a schedule, in float32": (
        update(optimizers=(replace(ADAM, learning_rate=above(1e3), scheduled=True),)),
        RATE,
    ),
    "a large rate of a schedule": (
        update(optimizers=(replace(ADAM, learning_rate=1e3, scheduled=True),)),
        BLAMED,
    ),
    "a large rate": (update(optimizers=(replace(ADAM, learning_rate=1e9),)), BLAMED),
    "after growth": (update(optimizers=(ADAM,), growth=grows(loss=1e4)), EXPLODED),
    "after growth of the gradients": (update(growth=grows(norm=1e4)), EXPLODED),
    "after growth, by a variance that cancels": (
        update(optimizers=(replace(ADAM, settings={"centered": 1.0}),), growth=grows(loss=1e4)),
        BLAMED,
    ),
    "after less growth": (update(optimizers=(ADAM,), growth=grows(loss=below(1e4))), BLAMED),
    "after growth, with an epsilon of 0": (update(optimizers=(ROUNDED,), growth=grows(loss=1e9)), BLAMED),
    "after growth, without epsilon": (update(optimizers=(replace(ROUNDED, epsilon=0.0),), growth=grows(loss=1e9)), EXPLODED),
    "written by something else": (update(written=True), decided("state_nonfinite", confidence=0.8, because="written")),
    "written into a slot, and carried into a weight": (
        update("weights:nonfinite:d/kernel", "slots:explosion:v", "slots:nonfinite:m", written=True),
        decided("state_nonfinite", "m", confidence=0.8, because="written"),
    ),
    "written by a constraint": (update(written=True, constraints={"d/kernel": "UnitNorm"}), CONSTRAINED),
    "an operation of a constraint": (
        update(constraints={"d/kernel": "UnitNorm"}, origin=origin(phase="update", line="a.py:1 in f")),
        CONSTRAINED,
    ),
    "an operation of a custom optimizer": (
        update(constraints={"d/kernel": "UnitNorm"},
            origin=origin(phase="update", line="a.py:1 in f"),
            optimizers=(replace(ADAM, own=True),),
        ),
        BLAMED,
    ),
    "a constraint that nothing shows to be to blame": (update(constraints={"d/kernel": "UnitNorm"}), BLAMED),
    "written, the loss is bad": (bad(written=True, origin=origin()), DOMAIN),
}
"""Finite gradients, and bad weights or slots."""

POLE = origin("Log", "forward", (ONE,), culprit="dense")
FEW = {"without_rows": "finite", "rows": (1,), "count": 4}

DIVERGENCE = {
    "overflow after growth": (risen(), GREW),
    "overflow after growth of the gradients": (bad(origin=OVERFLOW, growth=grows(norm=1e3)), GREW),
    "overflow after less": (bad(origin=OVERFLOW, growth=grows(loss=below(1e3), norm=below(1e3), weights=1.0)), FORWARD),
    "overflow of grown weights": (bad(origin=OVERFLOW, growth=grows(weights=20.0)), GREW),
    "explosion after growth": (bad("gradients:explosion", growth=grows(loss=1e3)), replace(GREW, culprit="d/kernel")),
    "another finding after growth": (bad("loss:explosion", growth=grows(loss=1e3)), UNKNOWN),
    "explosion without growth": (bad("gradients:explosion"), UNKNOWN),
    "explosion next to a pole": (bad("gradients:explosion", origin=POLE, growth=grows(loss=1e3)), FORWARD),
    "a pole, of weights far away": (bad(origin=POLE, growth=grows(weights=1e3)), GREW),
    "a pole, of weights that have grown": (bad(origin=POLE, growth=grows(weights=below(1e3), loss=below(1e3))), FORWARD),
    "a pole, of weights and a loss that have": (bad(origin=POLE, growth=grows(weights=20.0, loss=1e3)), GREW),
    "a pole, of weights and gradients that have": (bad(origin=POLE, growth=grows(weights=20.0, norm=1e3)), GREW),
    "a pole, of a loss that has grown": (bad(origin=POLE, growth=grows(weights=below(20.0), loss=1e9)), FORWARD),
    "exp, of weights that have grown": (bad(origin=EXP, growth=grows(weights=20.0)), replace(GREW, culprit="act")),
    "exp, of weights that have in no step": (bad(origin=EXP, growth=grows(steps=0, weights=20.0)), replace(FORWARD, culprit="act")),
    "exp, of weights that have in one step": (bad(origin=EXP, growth=grows(steps=1, weights=20.0)), replace(GREW, culprit="act")),
    "exp, of weights and a loss that have": (bad(origin=EXP, growth=grows(weights=2.0, loss=1e3)), replace(GREW, culprit="act")),
    "exp, of weights that have a little": (bad(origin=EXP, growth=grows(weights=below(20.0))), replace(FORWARD, culprit="act")),
    "exp, of a loss that has": (bad(origin=EXP, growth=grows(weights=below(2.0), loss=1e9)), replace(FORWARD, culprit="act")),
    "moved too far": (bad(origin=OVERFLOW, at_start="finite", growth=grows(weights=1.5)), GREW),
    "moved too far, in exp": (bad(origin=EXP, at_start="finite", growth=grows(weights=1.5)), replace(GREW, culprit="act")),
    "moved too far, to a pole": (bad(origin=POLE, at_start="finite", growth=grows(weights=1.5)), FORWARD),
    "moved less": (bad(origin=OVERFLOW, at_start="finite", growth=grows(weights=below(1.5))), FORWARD),
    "as bad at the start": (bad(origin=OVERFLOW, at_start="bad", growth=grows(weights=1.5)), FORWARD),
    "few rows overflow": (bad(origin=OVERFLOW, at_start="finite", growth=grows(weights=1.5), **FEW), replace(FORWARD, samples=(1,))),
    "many rows overflow": (bad(origin=OVERFLOW, at_start="finite", growth=grows(weights=1.5), **{**FEW, "rows": (1, 2)}), GREW),
    "few rows overflow, and others": (
        bad(origin=OVERFLOW, at_start="finite", growth=grows(weights=1.5), **{**FEW, "without_rows": "bad"}),
        GREW,
    ),
    "a few rows, of weights that have grown": (
        bad(origin=OVERFLOW, growth=grows(weights=below(1e3), loss=below(20.0), norm=below(20.0)), **FEW),
        replace(FORWARD, samples=(1,)),
    ),
    "exp of a few rows, of weights that have grown": (
        bad(origin=EXP, growth=grows(weights=86.0), **FEW),
        replace(FORWARD, culprit="act", samples=(1,)),
    ),
    "a few rows, of weights far away": (bad(origin=OVERFLOW, growth=grows(weights=1e3), **FEW), GREW),
    "a few rows, of weights and a loss that have grown": (bad(origin=OVERFLOW, growth=grows(weights=20.0, loss=20.0), **FEW), GREW),
    "a few rows, of weights and gradients that have": (bad(origin=OVERFLOW, growth=grows(weights=20.0, norm=20.0), **FEW), GREW),
    "constant features": (
        risen(table=(layer("a", "Dense", maximum=1e9), layer("b"), layer("c", maximum=1e4))),
        replace(CONSTANT_FEATURES, culprit="c"),
    ),
    "constant features, negative": (
        risen(table=(layer("c", minimum=-1e4),)),
        replace(CONSTANT_FEATURES, culprit="c"),
    ),
    "constant features, and exp": (
        bad(origin=EXP, growth=grows(weights=20.0), table=(layer("c", maximum=1e4),)),
        replace(CONSTANT_FEATURES, culprit="c"),
    ),
    "features that are not constant": (risen(table=(layer("c", maximum=below(1e4)),)), GREW),
    "data that is finite at unit scale": (
        risen(rescaled="finite", inputs=(spread("inputs", 5.0),), targets=(spread("targets", 1e3),)),
        decided("input_scale", "targets", confidence=0.8, because="rescaled"),
    ),
    "data that is bad at unit scale": (risen(rescaled="bad", inputs=(spread("inputs", 1e9),)), GREW),
    "data of a usual scale": (risen(rescaled="finite", inputs=(spread("inputs", below(1e3)),)), GREW),
    "data in whole numbers": (risen(rescaled="finite", inputs=(spread("ids", 1e6, integer=True),)), GREW),
    "nobody is to blame": (
        bad(origin=replace(OVERFLOW, culprit="", phase="backward"), growth=RISEN),
        replace(GREW, culprit="d/kernel"),
    ),
}
"""Loss, gradients or weights have grown."""

FAR = {"rows": (1,), "without_rows": "finite", "inputs": (spread("inputs", 1e4, outliers=(1, 3)),)}
OUTLIER = decided("input_scale", "inputs", (1,), 0.9, "outlier")
DIVERGENCE |= {
    "an outlier": (risen(**FAR), OUTLIER),
    "an outlier among the targets": (
        risen(**{**FAR, "inputs": (), "targets": FAR["inputs"]}),
        OUTLIER,
    ),
    "an outlier in the optimizer": (bad(bad_site="slots", **FAR), OUTLIER),
    "an outlier of an ordinary size": (
        risen(**{**FAR, "inputs": (spread("inputs", below(1e4), outliers=(1,)),)}),
        GREW,
    ),
    "an outlier that is not alone to blame": (risen(**{**FAR, "without_rows": "bad"}), GREW),
    "another row is to blame": (risen(**{**FAR, "rows": (2,)}), GREW),
    "too many outliers": (risen(**{**FAR, "rows": (1, 3), "count": 7}), GREW),
}

HUGE = (spread("ids", 1e9, integer=True), spread("inputs", 1e4))
UNSCALED = decided("input_scale", "inputs", confidence=0.8)
CONSTANT = origin("RealDiv", "forward", (ONE, ZERO), culprit="norm", layer_class="Normalization")

def overflowing(count=16, **growth):
    """Return the evidence of a row of 1e38 in a committed step whose own loss and gradients are huge."""
    huge, before = (spread("inputs", 1e38, outliers=(3,)),), {"losses": (1.0, 1.5), "norms": (0.5, 0.8), **growth}
    slots = {"gradient_norm": 1e19, "inputs": huge, "growth": grows(loss=1e30, norm=1e19, **before)}
    return seen("slots:nonfinite", **{**slots, "count": count})


INPUT_SCALE = {
    "one row of a step that has committed": (overflowing(), replace(UNSCALED, samples=(3,))),
    "one row, after losses that have grown": (overflowing(losses=(-1.0, 1e3)), replace(GREW, culprit="d/kernel")),
    "one row, after gradients that have grown": (overflowing(norms=(1.0, 1e3)), replace(GREW, culprit="d/kernel")),
    "one row, after losses that have grown less": (overflowing(losses=(2.0, 1999.0)), replace(UNSCALED, samples=(3,))),
    "one row of two": (overflowing(count=2), replace(UNSCALED, samples=(3,))),
    "no history": (overflowing(losses=(), norms=()), replace(UNSCALED, samples=(3,))),
    "one row, and the smallest norm that overflows": (changed(overflowing(), gradient_norm=1e15), replace(UNSCALED, samples=(3,))),
    "one row, and a smaller norm": (changed(overflowing(), gradient_norm=below(1e15)), replace(GREW, culprit="d/kernel")),
    "huge inputs": (bad(origin=OVERFLOW, inputs=HUGE), UNSCALED),
    "huge targets": (bad(origin=OVERFLOW, inputs=(spread(),), targets=(spread("targets", 1e4),)), replace(UNSCALED, culprit="targets")),
    "huge inputs in bfloat16, which has the range of float32": (
        half(low_precision="bfloat16", origin=OVERFLOW, inputs=HUGE),
        replace(UNSCALED, samples=(3,)),
    ),
    "large inputs": (bad(origin=OVERFLOW, inputs=(spread("inputs", below(1e4)),)), FORWARD),
    "huge inputs, squared in the update": (bad(bad_site="slots", origin=OVERFLOW, inputs=HUGE), UNSCALED),
    "huge inputs, and no overflow": (bad(origin=POLE, inputs=HUGE), FORWARD),
    "huge inputs, and an explosion": (bad("gradients:explosion", inputs=HUGE), UNSCALED),
    "huge inputs, and another explosion": (bad("weights:explosion", inputs=HUGE), UNKNOWN),
    "huge inputs, and rows": (bad(origin=OVERFLOW, inputs=HUGE, rows=(4,)), replace(UNSCALED, samples=(4,))),
    "huge inputs, and outliers": (
        bad(origin=OVERFLOW, inputs=HUGE, targets=(spread("targets"), spread("weights", outliers=(6,)))),
        replace(UNSCALED, samples=(6,)),
    ),
    "constant features": (bad(origin=OVERFLOW, table=(layer(maximum=1e4),)), CONSTANT_FEATURES),
    "constant features, and an explosion": (
        bad("gradients:explosion", table=(layer(maximum=1e4),)),
        CONSTANT_FEATURES,
    ),
    "constant features, and a pole": (bad(origin=POLE, table=(layer(maximum=1e4),)), FORWARD),
    "constant features, divided by": (bad(origin=CONSTANT, rows=(2,)), decided("input_scale", "norm", (2,), 0.8, "constant")),
    "divided by in another layer": (bad(origin=replace(CONSTANT, layer_class="Dense")), replace(FORWARD, culprit="norm")),
    "divided by, backwards": (bad(origin=replace(CONSTANT, phase="backward")), decided("gradient_domain", "norm")),
    "an overflow in the layer": (
        bad(origin=replace(OVERFLOW, layer_class="Normalization", culprit="norm")),
        replace(FORWARD, culprit="norm"),
    ),
}
"""The data alone."""

RECURS = decided("divergence", "dense", confidence=0.8, because="recurrence")

REST = {
    **{f"overflow in {name}": (bad(origin=replace(OVERFLOW, layer_class=name)), RECURS) for name in sorted(RECURRENT)},
    "overflow in the gradient": (bad(origin=replace(OVERFLOW, phase="backward")), RECURS),
    "overflow in the slope": (bad(origin=replace(OVERFLOW, phase="slope")), RECURS),
    "overflow in a recurrent layer": (bad(origin=replace(OVERFLOW, frames=("net", "rnn")), table=(layer("rnn", "LSTM"),)), RECURS),
    "overflow next to one": (bad(origin=OVERFLOW, table=(layer("rnn", "LSTM"),)), FORWARD),
    "overflow elsewhere": (bad(origin=OVERFLOW), FORWARD),
    "a pole in a recurrent layer": (bad(origin=replace(POLE, layer_class="LSTM")), FORWARD),
    "a sum of squares": (bad(bad_site="gradients"), EXPLODES),
    "a sum of squares, not bad again": (bad(bad_site="gradients", result="failed"), UNKNOWN),
    "an operation in the gradients": (bad(bad_site="gradients", origin=origin()), GRADIENT),
    "a pole in the gradient": (
        bad(origin=origin(phase="backward", culprit="", variables=("v", "w")), rows=(2,)),
        replace(GRADIENT, culprit="v", samples=(2,)),
    ),
    "a pole in the gradient outside of all layers": (
        bad(origin=origin(phase="backward", culprit=""), bad_path=""),
        replace(GRADIENT, culprit="loss"),
    ),
    "a pole in the loss": (bad(origin=origin(culprit=""), rows=(2,)), replace(DOMAIN, culprit="loss", samples=(2,))),
    "a pole outside of every layer": (bad(origin=origin(phase="forward", frames=(), culprit="")), replace(DOMAIN, culprit="loss")),
    "a pole in the loss, and gradients that show it": (
        bad(origin=origin(), bad_site="gradients", table=(layer(nan=1),)),
        DOMAIN,
    ),
    "a pole in the loss that nothing shows": (bad(origin=origin(), bad_site="statistics"), replace(UNKNOWN, culprit="mse")),
    "a pole that is masked in a layer": (bad(origin=POLE, bad_site="gradients", table=(layer(),)), replace(GRADIENT, culprit="dense")),
    "a slope that is masked": (bad(origin=replace(POLE, phase="slope"), bad_site="gradients"), replace(GRADIENT, culprit="dense")),
    "a pole that a layer shows": (bad(origin=POLE, bad_site="gradients", table=(layer(), layer(nan=1))), FORWARD),
    "a slope": (bad(origin=replace(POLE, phase="slope"), rows=(1,)), replace(FORWARD, samples=(1,))),
    "a pole in the update": (bad(origin=replace(POLE, phase="update"), bad_site="gradients"), replace(UNKNOWN, culprit="dense")),
    "a constant": (bad(origin=replace(POLE, source="constant")), UNKNOWN),
    "bad weights after growth": (seen("loss:nonfinite", "weights:nonfinite", growth=RISEN), decided("divergence", confidence=0.6)),
    "bad weights without": (seen("loss:nonfinite", "weights:nonfinite"), UNKNOWN),
    "bad weights after growth, refused": (seen("weights:nonfinite", growth=RISEN, refused=True), UNKNOWN),
    "bad weights after growth, replayed": (seen("loss:nonfinite", "weights:nonfinite", growth=RISEN, result="finite"), UNKNOWN),
    "no bad weights after growth": (seen("loss:out_of_range", growth=RISEN), UNKNOWN),
}
"""Recurrence, sums that overflow, and operations that leave their domain."""

TABLES = {
    "state": STATE, "modes": MODES, "monitors": MONITORS, "transient": TRANSIENT, "batch": BATCH, "targets": TARGETS, "scale": SCALE,
    "low precision": LOW_PRECISION, "update": UPDATE, "divergence": DIVERGENCE, "input scale": INPUT_SCALE, "rest": REST,
}  # fmt: skip
CASES = {f"{table}: {name}": case for table, cases in TABLES.items() for name, case in cases.items()}


@pytest.mark.parametrize("name", CASES)
def test_the_evidence_decides_all_of_the_conclusion(name):
    """Cause, culprit, rows, confidence and reason; the diagnosis tells what was seen and what to do."""
    evidence, expected = CASES[name]
    assert decide(evidence) == expected
    diagnosis = conclude(evidence)
    assert diagnosis.cause == expected.cause and diagnosis.advice and (diagnosis.evidence or not evidence.bad_site)
    assert all(text.endswith((".", ":")) for text in (*diagnosis.evidence, *diagnosis.advice))


KINDS = [
    (NOWHERE, ""),
    (origin(source="variable"), ""),
    (origin("RealDiv", operands=(LARGE, ZERO)), "pole"),
    (origin("RealDiv", operands=(LARGE, operand(1e-40, tiny=True))), "pole"),
    *((origin(op, operands=(operand(1e15), ONE)), "overflow") for op in ("RealDiv", "Div", "Xdivy")),
    (origin("RealDiv", operands=(operand(below(1e15)), ONE)), "pole"),
    (origin("RealDiv", operands=(ONE, operand(1e15))), "overflow"),
    (origin("RealDiv", operands=(operand(1e3), ONE), dtype="float16"), "overflow"),
    (origin("RealDiv", operands=(operand(below(1e3)), ONE), dtype="float16"), "pole"),
    (origin("RealDiv", operands=(operand(1e3), ONE), dtype="bfloat16"), "pole"),
    *((origin(op, operands=(LARGE,)), "pole") for op in ("RealDiv", "Div", "Xdivy")),
    (origin("Pow", operands=(operand(1e15), ONE)), "overflow"),
    (origin("Pow", operands=(operand(below(1e15)), ONE)), "exp"),
    (origin("Pow", operands=(operand(50.1), ONE)), "exp"),
    (origin("Pow", operands=(operand(50.0), operand(60.0))), "pole"),
    (origin("Pow", operands=()), "pole"),
    *((origin(op, operands=(ONE,), dtype="float16"), "exp") for op in EXPONENTIALS - {"Pow"}),
    *((origin(op, operands=(LARGE,), dtype="float16"), "pole") for op in POLES - {"RealDiv", "Div", "Xdivy"}),
    (origin("MatMul", operands=(LARGE, operand(1.0, holds="Inf")), dtype="float16"), "pole"),
    (origin("MatMul", operands=(ONE, operand(1e15))), "overflow"),
    (origin("MatMul", operands=(operand(below(1e15)), ONE)), "pole"),
    *((origin("MatMul", operands=(ONE,), dtype=dtype), "overflow") for dtype in ("float16", "bfloat16")),
    (origin("MatMul", operands=()), "pole"),
]


@pytest.mark.parametrize(("where", "expected"), KINDS)
def test_how_a_value_became_nonfinite(where, expected):
    assert evidence_of(origin=where).mechanism == expected


@pytest.mark.parametrize(("grew", "expected"), [
    (Growth(steps=0, loss=1e9), False),
    (Growth(steps=1, loss=1e3), True),
    (Growth(steps=1, norm=1e3), True),
    (Growth(steps=1, weights=20.0), True),
    (Growth(steps=1, loss=below(1e3), norm=below(1e3), weights=below(20.0)), False),
])  # fmt: skip
def test_what_has_grown(grew, expected):
    assert evidence_of(growth=grew).grown() is expected


@pytest.mark.parametrize(("count", "most"), [(0, 1), (1, 1), (7, 1), (8, 2), (16, 4)])
def test_a_quarter_of_the_rows_are_few(count, most):
    """One row always is; none is not."""
    assert [n for n in range(6) if evidence_of(count=count).few(range(n))] == [*range(1, most + 1)]
